"""The cache of captured steps by itself, on a device that only counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from quatrain.engine.device import HostDevice, Replay
from quatrain.engine.graphs import GraphCache, StepKey
from quatrain.engine.inputs import Bucket, bucket_for
from quatrain.errors import KernelError

SMALL, LARGE, LARGER = (StepKey(tokens, 8, 1, "train") for tokens in (16, 64, 96))


@dataclass
class Counter(HostDevice):
    """`nbytes` is what each capture takes; `log` is what happened."""

    nbytes: int = 10
    log: list[str] = field(default_factory=list)

    def work(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(f"run {name}")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def capture(self, work: Callable[[], None]) -> Replay:
        ran, self.log = self.log, []
        work()
        name = self.log[0].removeprefix("run ")  # what it would have run is recorded, not run
        self.log = [*ran, f"capture {name}"]
        return Replay(lambda: self.log.append(f"launch {name}"), self.nbytes)


def run(cache: GraphCache, device: Counter, *keys: StepKey) -> list[str]:
    device.log.clear()
    for key in keys:
        cache.run(key, device.work(str(key.tokens)))
    return device.log


def test_run_then_capture_and_launch_then_launch() -> None:
    device = Counter()
    cache = GraphCache(device, 100)
    assert run(cache, device, SMALL, SMALL, SMALL, LARGE, SMALL, LARGE) == [
        "run 16", "capture 16", "launch 16", "launch 16", "run 64", "launch 16", "capture 64", "launch 64",
    ]  # fmt: skip
    assert cache.replays == 4


def test_every_part_of_the_key_counts() -> None:
    device = Counter()
    cache = GraphCache(device, 1000)
    keys = [StepKey(16, 8, 1, "train"), StepKey(32, 8, 1, "train"), StepKey(16, 16, 1, "train"),
            StepKey(16, 8, 2, "train"), StepKey(16, 8, 1, "from")]  # fmt: skip
    for key in keys * 2:
        cache.run(key, device.work(str(key)))
    assert sum(line.startswith("capture") for line in device.log) == len(keys)


def test_prepared_largest_first_until_the_budget_is_full() -> None:
    device = Counter()
    cache = GraphCache(device, 25)
    cache.prepare([(key, device.work(str(key.tokens))) for key in (SMALL, LARGER, LARGE)])
    assert device.log == ["run 96", "capture 96", "run 64", "capture 64", "run 16", "capture 16"]
    assert [shape["tokens"] for shape in cache.report()["captured"]] == [96, 64]
    assert run(cache, device, LARGE, LARGER) == ["launch 64", "launch 96"]


def test_the_longest_unused_goes_when_the_budget_is_full() -> None:
    device = Counter()
    cache = GraphCache(device, 25)
    run(cache, device, SMALL, SMALL, LARGE, LARGE, SMALL)
    assert run(cache, device, LARGER, LARGER) == ["run 96", "capture 96", "synchronize", "launch 96"]
    assert run(cache, device, SMALL) == ["launch 16"]  # used after LARGE was
    assert run(cache, device, LARGE) == ["capture 64", "synchronize", "launch 64"]
    assert [shape["tokens"] for shape in cache.report()["captured"]] == [64, 16]


def test_a_step_too_large_for_the_budget_is_refused() -> None:
    device, told = Counter(nbytes=30), []
    cache = GraphCache(device, 25, on_refused=told.append)
    assert run(cache, device, SMALL, SMALL, SMALL, LARGE, LARGE) == [
        "run 16", "capture 16", "run 16", "run 16", "run 64", "run 64",
    ]  # fmt: skip
    assert told == [cache.reason] and "the plan has 0 MB for graphs" in told[0]


def test_what_is_captured_stays_when_something_later_fails() -> None:
    device = Counter()
    cache = GraphCache(device, 100)
    run(cache, device, SMALL, SMALL)
    cache.refuse("no more")
    assert run(cache, device, SMALL, LARGE, LARGE) == ["launch 16", "run 64", "run 64"]


def test_a_fault_of_our_own_is_not_swallowed() -> None:
    device = Counter()
    cache = GraphCache(device, 100)
    run(cache, device, SMALL)
    with pytest.raises(TypeError):
        cache.run(SMALL, lambda: device.log.append(1 + "1"))  # type: ignore[operator]
    assert cache.reason is None


def test_required_capture_is_an_error() -> None:
    with pytest.raises(KernelError, match="cuda_graph on: why") as error:
        GraphCache(Counter(), 100, required=True).refuse("why")
    assert "--cuda-graph auto" in str(error.value.hint)


@pytest.mark.parametrize(
    ("tokens", "targets", "capacity", "want"),
    [
        (1, 0, 128, Bucket(16, 16)),
        (16, 17, 128, Bucket(16, 32)),
        (113, 128, 128, Bucket(128, 128)),
        (4096, 1000, 4096, Bucket(4096, 1024)),
        (100, 5, 100, Bucket(100, 13)),  # the last bucket is the capacity itself
    ],
)
def test_buckets(tokens: int, targets: int, capacity: int, want: Bucket) -> None:
    assert bucket_for(tokens, targets, capacity) == want


def test_there_are_few_buckets_and_each_holds_its_steps() -> None:
    capacity = 3072
    buckets = {bucket_for(tokens, 1, capacity).tokens for tokens in range(1, capacity + 1)}
    assert len(buckets) == 8
    assert all(bucket_for(n, n, capacity).tokens >= n <= bucket_for(n, n, capacity).targets for n in range(1, 3073))
