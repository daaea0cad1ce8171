"""A whole run in Python on a tiny model: what is logged, what is refused, what counts as a success."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_rows, write_tiny_model
from train.standin import Recorder

from quatrain.checkpoint.atomic import write_manifest
from quatrain.errors import CheckpointError, ConfigError, QuatrainError
from quatrain.train.run import _require_changed, prepare_run, train
from quatrain.train.settings import Settings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", 8)
    return folder


def run(world: Path, out: Path, **more: Any) -> list[dict[str, Any]]:
    given = {"model": str(world / "model"), "data": str(world / "rows.jsonl"), "out": str(out), "lora_rank": 4}
    train({**given, "compute_dtype": "fp32", "max_seq_len": 64, "schedule": "constant", **more}, Recorder())
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_logged_loss_and_norm_do_not_depend_on_accumulation(world: Path, tmp_path: Path) -> None:
    """E2: accumulation 1, 2 and 8 over the same rows log the same loss and gradient norm."""
    runs = [
        run(world, tmp_path / str(accumulation), max_steps=2, batch_size=8 // accumulation, accumulation=accumulation)
        for accumulation in (1, 2, 8)
    ]
    for other in runs[1:]:
        for line, want in zip(other, runs[0], strict=True):
            assert line["response_tokens"] == want["response_tokens"] and line["tokens"] == want["tokens"]
            # fp32 sums in another order: a few ULP, far below what a factor of the accumulation would be.
            assert line["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_steps_and_schedule_are_counted_on_the_rows_that_are_used(world: Path, tmp_path: Path) -> None:
    """C7: 100 rows, 10 of no use, batches of 9: ten steps an epoch, and a learning rate that is done after ten."""
    rows = [{"instruction": f"say {i}", "response": "" if i % 10 == 3 else "yes"} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": str(world / "model"), "data": str(tmp_path / "rows.jsonl"), "out": str(tmp_path / "out")}
    it = prepare_run(Settings.resolve({**given, "batch_size": 9, "epochs": 1, "max_seq_len": 64}), Recorder())
    assert (it.prepared.report.read, it.prepared.report.skipped) == (100, {"empty answer": 10})
    assert it.total_steps == it.schedule.total_steps == 10 and it.batching.length.steps_of_epoch == (10,)


def test_the_disk_is_compared_with_the_checkpoints_that_the_run_will_have(world: Path) -> None:
    """M7: `keep_checkpoints` may say "all": a run of 10 steps that saves every 4 writes 3."""
    files = {"model": str(world / "model"), "data": [str(world / "rows.jsonl")], "batch_size": 1, "max_steps": 10}
    for every, kept in ((4, 3), (100, 1), ("epoch", 2)):
        it = prepare_run(Settings.resolve({**files, "keep_checkpoints": 10**12, "save_every": every}), Recorder())
        assert it.kept_checkpoints == kept


def test_every_adapter_learns_when_accumulating(world: Path, tmp_path: Path) -> None:
    """E3: accumulation 4: every B is non-zero after one step."""
    from safetensors.torch import load_file

    run(world, tmp_path / "out", max_steps=1, batch_size=2, accumulation=4)
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    norms = [tensor.norm().item() for name, tensor in adapter.items() if ".lora_B." in name]
    assert len(norms) == 14 and all(norms)


def test_a_run_that_changed_nothing_is_not_a_success() -> None:
    """E3: an adapter that never moved is an error at the end, by name."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_B.weight"
    state = {f"master.{name.format(0)}": torch.ones(2), f"exp_avg.{name.format(1)}": torch.zeros(2)}
    _require_changed(SimpleNamespace(state=lambda: state))  # type: ignore[arg-type]
    state[f"master.{name.format(1)}"] = torch.zeros(2)
    with pytest.raises(QuatrainError, match=r"1 adapters did not change at all, first .*layers\.1\.self_attn\.q_proj"):
        _require_changed(SimpleNamespace(state=lambda: state))  # type: ignore[arg-type]


def test_a_run_without_a_finite_evaluation_is_not_a_success(world: Path, tmp_path: Path) -> None:
    """F10: the loss was finite before each step and the adapter is finite; the evaluations are not."""
    with pytest.raises(QuatrainError, match="no evaluation gave a finite loss"):
        run(world, tmp_path / "out", max_steps=2, learning_rate=1e30, val_split=0.2)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["result"]["ending"] == "failed"
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_failed_run_says_so_in_its_record(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise QuatrainError("no")

    monkeypatch.setattr("quatrain.train.pipeline.InstructPipeline.start_step", broken)
    with pytest.raises(QuatrainError, match=r"^no$"):
        run(world, tmp_path / "out", max_steps=1)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["result"]["ending"] == "failed"


def test_a_checkpoint_of_another_version_is_refused_as_such(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "out", max_steps=1)
    folder = tmp_path / "out" / "checkpoints" / "step-000001"
    record = json.loads((folder / "progress.json").read_text())
    without = {name: value for name, value in record.items() if name != "given"}
    for other in ({**record, "progress": {**record["progress"], "moons": 2}}, without):
        (folder / "progress.json").write_text(json.dumps(other))
        write_manifest(folder)
        with pytest.raises(CheckpointError, match=r"progress.json is not the record of a run as this version"):
            train({"out": str(tmp_path / "out"), "resume": True}, Recorder())


def test_a_run_is_not_resumed_into_fewer_steps_than_it_has_done(world: Path, tmp_path: Path) -> None:
    """F6: it would be "finished after step 3 of 2"."""
    run(world, tmp_path / "out", max_steps=3)
    resume = {"out": str(tmp_path / "out"), "resume": True, "override": True}
    with pytest.raises(ConfigError, match="step-000003: 3 steps are done, and with these options the run has 2"):
        train({**resume, "max_steps": 2}, Recorder())
    assert train({**resume, "max_steps": 4}, Recorder()).steps == 4


def test_an_adapter_is_not_overwritten_by_the_run_that_goes_on_from_it(world: Path, tmp_path: Path) -> None:
    """P6: a run that breaks off early would leave neither the old one nor a new one."""
    run(world, tmp_path / "out", max_steps=1)
    for adapter in (tmp_path / "out", tmp_path / "out" / "adapter"):
        with pytest.raises(ConfigError, match="which --overwrite would empty"):
            run(world, tmp_path / "out", max_steps=1, adapter=str(adapter), overwrite=True)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
