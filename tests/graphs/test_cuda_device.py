"""The device object of a GPU on a torch.cuda that only notes what it is asked: order between streams, captures that
fail at either end, memory pools."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from quatrain.engine.device import CudaDevice

Log = list[Any]


class Stream:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


class Graph:
    """`fails`: the methods that raise."""

    made: ClassVar[list[weakref.ref[Graph]]] = []
    fails: ClassVar[tuple[str, ...]] = ()
    log: ClassVar[Log] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))

    def _note(self, name: str) -> None:
        self.log.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name}: capture invalidated")

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pool = pool
        self._note("begin")

    def capture_end(self) -> None:
        self._note("end")

    def reset(self) -> None:
        self._note("reset")

    def replay(self) -> None:
        self._note("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log: Log = []
    now = [Stream("caller", log)]
    names, pools = iter(("ours", "side")), iter(range(1, 100))

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        now.append(entered)
        try:
            yield
        finally:
            now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1].name == "side")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 41))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: log.append("end of allocations"), raising=False)
    Graph.made, Graph.fails, Graph.log = [], (), log
    return log


def test_the_caller_goes_on_behind_our_work_also_after_an_exception(log: Log) -> None:
    device = CudaDevice()
    before, after = ("ours", "waits for", "caller"), ("caller", "waits for", "ours")
    with device.running():
        log.append("work")
    assert log == [before, "work", after]
    log.clear()
    with pytest.raises(ValueError, match="half way"), device.running():
        log.append("work")
        raise ValueError("half way")
    assert log == [before, "work", after]


@pytest.mark.parametrize("fails", [(), ("end",)])
def test_work_that_fails_ends_the_capture(log: Log, fails: tuple[str, ...]) -> None:
    """Whatever the end says: the work's own exception is what the caller learns. The side stream is joined first."""
    device = CudaDevice()
    Graph.fails = fails

    def work() -> None:
        raise ValueError("not allowed here")

    with pytest.raises(ValueError, match="not allowed here"):
        device.capture(work)
    assert log == ["begin", ("caller", "waits for", "side"), "end", "end of allocations", "reset"]


def test_an_end_that_fails_leaves_nothing_open(log: Log) -> None:
    """torch's allocators hold on to a graph whose end has failed: they are told, and it stays alive."""
    device = CudaDevice()
    Graph.fails = ("end",)
    with pytest.raises(RuntimeError, match="end: capture invalidated"):
        device.capture(lambda: log.append("work"))
    assert log == ["begin", "work", "end", "end of allocations", "reset"]
    assert Graph.made[0]() is not None
    Graph.fails = ()
    device.capture(lambda: None).launch()
    assert log[-1] == "replay"


def test_a_pool_lives_as_long_as_its_graphs(log: Log) -> None:
    """torch frees a pool with the last graph of it and refuses it from then on."""
    device = CudaDevice()

    def pool_of(replay: Any) -> int:
        return int(replay.launch.__self__.pool)

    first, second = device.capture(lambda: None), device.capture(lambda: None)
    assert pool_of(first) == pool_of(second)
    kept = pool_of(first)
    del first
    third = device.capture(lambda: None)
    assert pool_of(third) == kept
    del second, third
    assert pool_of(device.capture(lambda: None)) != kept


@pytest.mark.parametrize(("torch_took", "went", "counts"), [(2, 5, 5), (2, 1, 2), (0, -7, 0), (3, 900, 3 + 64)])
def test_what_another_process_takes_meanwhile_counts_little(
    log: Log, monkeypatch: pytest.MonkeyPatch, torch_took: int, went: int, counts: int
) -> None:
    """In MB: of torch's pool, and of all memory of the GPU, which others use too."""
    taken = iter([(0, 0), (went, torch_took)])
    now = [(0, 0)]

    def free() -> tuple[int, int]:
        now[0] = next(taken)
        return (1000 - now[0][0]) << 20, 2000 << 20

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: now[0][1] << 20)
    assert CudaDevice().capture(lambda: None).nbytes == counts << 20
