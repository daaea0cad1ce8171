"""Stopping and going on gives the bits of never having stopped; evaluating changes nothing. Tolerance 0, on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from same.conftest import arithmetic_options
from tiny_model import write_rows, write_tiny_model

from quatrain.checkpoint.resume import newest_complete
from quatrain.errors import CheckpointError
from quatrain.train.interrupt import StopRequest
from quatrain.train.reporter import Reporter, StepRecord
from quatrain.train.run import Outcome, train
from quatrain.train.watch import Watch


class StopAfter(Reporter):
    """Asks for a stop after some steps, as Ctrl-C would."""

    def __init__(self, stop: StopRequest, step: int) -> None:
        self.stop, self.at = stop, step

    def step(self, record: StepRecord) -> None:
        if record.step == self.at:
            self.stop.request()


@dataclass(frozen=True)
class World:
    """A model and rows on disk, and the arithmetic of every run on them."""

    folder: Path
    options: dict[str, Any]


@pytest.fixture(scope="module", params=[("reference", "fp32"), ("best", "fp32"), ("best", "bf16")], ids="-".join)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    options = arithmetic_options(*request.param)
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", 20)
    return World(folder, options)


OPTIONS: dict[str, Any] = {
    "epochs": 2, "batch_size": 2, "accumulation": 2, "learning_rate": 5e-3, "lora_rank": 4, "lora_dropout": 0.2,
    "val_split": 0.15, "eval_every": 3, "save_every": 4, "max_seq_len": 64, "seed": 3,
    "threads": 2,
}  # fmt: skip


def run(world: World, out: Path, stop_after: int | None = None, **more: Any) -> Outcome:
    given = {"out": str(out), **more}
    if not more.get("resume"):
        files = {"model": str(world.folder / "model"), "data": [str(world.folder / "rows.jsonl")]}
        given = {**files, **OPTIONS, **world.options, **given}
    stop = StopRequest()
    return train(given, StopAfter(stop, stop_after) if stop_after else Reporter(), stop)


def bits(out: Path) -> dict[str, torch.Tensor]:
    checkpoint, passed_over = newest_complete(out / "checkpoints")
    assert checkpoint is not None and passed_over == []
    return checkpoint.tensors()


def history(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = ("tokens_per_s", "peak_memory_bytes")
    return [{name: value for name, value in line.items() if name not in measured} for line in lines]


def assert_same(one: Path, other: Path) -> None:
    a, b = bits(one), bits(other)
    assert a.keys() == b.keys() and len(a) > 20
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []
    a, b = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def unbroken(world: World) -> Path:
    outcome = run(world, world.folder / "unbroken")
    assert outcome.ending == "finished" and outcome.steps == outcome.total_steps == 10
    return world.folder / "unbroken"


def test_watching_changes_nothing(
    world: World, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4: without sample answers and without a look at the layers the run has the same bits."""
    monkeypatch.setattr(Watch, "is_due", lambda self, step: False)
    monkeypatch.setattr(Watch, "measure", lambda self: {})
    run(world, tmp_path / "run", samples=0)
    assert_same(tmp_path / "run", unbroken)
    lines = history(unbroken)
    counts = [sum(line.pop(name, None) is not None for line in lines) for name in ("adapter_norms", "grad_norms")]
    assert counts == [10, 10] and sum(line.pop("samples", None) is not None for line in lines) == 4
    assert lines == history(tmp_path / "run")


@pytest.mark.parametrize("stops", [[1, 4, 9], [7], [10]])
def test_resumed_is_unbroken_bit_for_bit(world: World, unbroken: Path, tmp_path: Path, stops: list[int]) -> None:
    out = tmp_path / "run"
    for index, stop in enumerate(stops):
        outcome = run(world, out, stop_after=stop, **({"resume": True} if index else {}))
        assert outcome.ending == "interrupted" and outcome.steps == stop
    assert run(world, out, resume=True).ending == "finished"
    assert_same(out, unbroken)
    assert history(out) == history(unbroken)


def test_a_broken_newest_checkpoint_costs_steps_but_no_bits(world: World, unbroken: Path, tmp_path: Path) -> None:
    """M2: an empty file in the newest checkpoint: the one before it is taken."""
    out = tmp_path / "run"
    run(world, out, stop_after=6)
    (out / "checkpoints" / "step-000006" / "state.safetensors").write_bytes(b"")
    run(world, out, resume=True)
    assert_same(out, unbroken)
    assert history(out) == history(unbroken)


def test_a_run_may_be_moved(world: World, unbroken: Path, tmp_path: Path) -> None:
    """F9: the run folder is moved between two parts of a run."""
    run(world, tmp_path / "here", stop_after=4)
    (tmp_path / "here").rename(tmp_path / "there")
    outcome = run(world, tmp_path / "there", resume=True)
    assert outcome.adapter == tmp_path / "there" / "adapter"
    assert_same(tmp_path / "there", unbroken)


def test_an_overridden_option_reaches_the_first_resumed_update(world: World, tmp_path: Path) -> None:
    """F4: the same checkpoint resumed for one step with weight decay 0 and 0.5. AdamW's decay is apart from its
    gradient, so the two results differ by learning rate * 0.5 * the weights that were saved."""
    masters = []
    for decay in (0.0, 0.5):
        out = tmp_path / str(decay)
        run(world, out, stop_after=4, schedule="constant", warmup_steps=0)
        before = bits(out)
        assert run(world, out, stop_after=5, resume=True, weight_decay=decay, override=True).steps == 5
        masters.append({name: tensor for name, tensor in bits(out).items() if name.startswith("master.")})
    for name, undecayed in masters[0].items():
        want = OPTIONS["learning_rate"] * 0.5 * before[name]
        assert torch.allclose(undecayed - masters[1][name], want, rtol=0, atol=2e-7), name


def test_the_comparison_can_fail(world: World, unbroken: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", seed=4)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "run", unbroken)


def test_evaluating_changes_no_bit_of_training(world: World, unbroken: Path, tmp_path: Path) -> None:
    """Q4: the adapter does not depend on how often is evaluated."""
    run(world, tmp_path / "run", eval_every="epoch")
    a, b = bits(tmp_path / "run"), bits(unbroken)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_weighted_sources_go_on_with_the_same_rows(world: World, tmp_path: Path) -> None:
    """A stop inside the second epoch of a mix; the data is tokenised again in between. Other weights are other data."""
    write_rows(tmp_path / "more.jsonl", 9)
    data: list[Any] = [f"{world.folder / 'rows.jsonl'}@0.4", {"path": str(tmp_path / "more.jsonl"), "weight": 1.5}]
    whole = run(world, tmp_path / "whole", data=data, epochs=3)
    assert whole.ending == "finished"  # a SIGTERM from outside stops a run too, at its last step with another best
    assert run(world, tmp_path / "parts", data=data, epochs=3, stop_after=7).total_steps == whole.total_steps == 15
    with pytest.raises(CheckpointError, match="rows are not those of"):
        run(world, tmp_path / "parts", resume=True, data=[data[0], str(tmp_path / "more.jsonl")])
    assert run(world, tmp_path / "parts", resume=True, cache=False).ending == "finished"
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert_same(tmp_path / "parts", tmp_path / "whole")
