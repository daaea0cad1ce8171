"""Trackers: what they are given, that resume goes on with the same run, and that their trouble is not the run's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from train.standin import Recorder, Standin, loop_of

from quatrain.config import TrainOptions
from quatrain.errors import ConfigError
from quatrain.train import trackers
from quatrain.train.loop import Progress
from quatrain.train.reporter import Reporters
from quatrain.train.trackers import Tracking, require_trackers

OPTIONS = {"learning_rate": 1e-3, "data": ["rows.jsonl"]}


def run(folder: Path, *names: str, steps: int = 4, done: int = 0, losses: list[float] | None = None) -> Recorder:
    """A run of `steps` steps, or its end after `done` of them."""
    reporter = Recorder()
    tracking = Tracking(names, folder, OPTIONS, reporter.warning)
    progress = Progress(step=done, evaluated_step=done)
    options = TrainOptions(max_steps=steps, eval_every=2)
    loop = loop_of(folder, Standin(losses), options, progress=progress, reporter=reporter)
    loop.reporter = Reporters(reporter, tracking)
    tracking.close(loop.run())
    return reporter


class WandbStandin(ModuleType):
    """What we use of wandb, recorded."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.exit_codes: list[int] = []
        self.breaks_at = -1

    def init(self, **given: Any) -> Any:
        self.inits.append(given)
        return SimpleNamespace(
            id=given["id"] or "abc", log=self.log, finish=lambda exit_code: self.exit_codes.append(exit_code),
            define_metric=lambda name, step_metric=None: self.metrics.append((name, step_metric)),
        )  # fmt: skip

    def log(self, values: dict[str, Any]) -> None:
        if values["step"] == self.breaks_at:
            raise ConnectionError("no route")
        self.logged.append(values)


class MlflowStandin(ModuleType):
    """What we use of mlflow, recorded."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.calls.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))

    def log_params(self, values: dict[str, str]) -> None:
        assert len(values) <= 100
        self.calls.append(("params", values))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("metrics", step, values))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandbStandin:
    monkeypatch.setitem(sys.modules, "wandb", standin := WandbStandin())
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return standin


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowStandin:
    monkeypatch.setitem(sys.modules, "mlflow", standin := MlflowStandin())
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    return standin


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name != "mlflow" else object())
    with pytest.raises(ConfigError, match="track: tensorboard, wandb is not installed") as caught:
        require_trackers(["tensorboard", "mlflow", "wandb"])
    assert "pip install 'quatrain[tensorboard,wandb]'" in str(caught.value.hint)
    require_trackers(["mlflow"])


def test_it_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quatrain.train.run import train

    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    given = {"model": "absent", "data": ["absent.jsonl"], "out": str(tmp_path / "out"), "track": "wandb"}
    with pytest.raises(ConfigError, match="wandb is not installed"):
        train(given, Recorder())


def test_wandb_gets_steps_and_evaluations_and_resume_goes_on_with_the_same_run(
    tmp_path: Path, wandb: WandbStandin
) -> None:
    assert run(tmp_path, "wandb", losses=[2.0, float("nan")]).warnings[0].startswith("step 2 skipped")
    (first,) = wandb.inits
    assert first["project"] == "quatrain" and first["config"] == OPTIONS and first["id"] is None
    assert first["name"] == tmp_path.name and first["dir"] == str(tmp_path) and first["resume"] is None
    assert wandb.metrics == [("step", None), ("*", "step")]
    steps = [line for line in wandb.logged if "train/lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["train/loss"] == 2.0 and "train/loss" not in steps[1]  # NaN is left out, the step is not
    assert [line["step"] for line in wandb.logged if "eval/loss" in line] == [2, 4]
    assert wandb.exit_codes == [0]

    run(tmp_path, "wandb", steps=6, done=4)
    assert wandb.inits[1]["id"] == "abc" and wandb.inits[1]["resume"] == "allow"
    assert [line["step"] for line in wandb.logged if "train/lr" in line] == [1, 2, 3, 4, 5, 6]
    run(tmp_path, "wandb")  # a run that starts over is another one
    assert wandb.inits[2]["id"] is None


def test_the_users_own_project_is_left_to_wandb(
    tmp_path: Path, wandb: WandbStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run(tmp_path, "wandb")
    assert wandb.inits[0]["project"] is None


def test_mlflow_gets_the_same(tmp_path: Path, mlflow: MlflowStandin) -> None:
    run(tmp_path, "mlflow")
    assert mlflow.calls[:3] == [
        ("experiment", "quatrain"), ("start", None, tmp_path.name),
        ("params", {"learning_rate": "0.001", "data": "['rows.jsonl']"}),
    ]  # fmt: skip
    metrics = [call for call in mlflow.calls if call[0] == "metrics"]
    assert [step for _, step, _ in metrics] == [1, 2, 2, 3, 4, 4] and "eval/loss" in metrics[2][2]
    assert mlflow.calls[-1] == ("end", "FINISHED")
    mlflow.calls.clear()
    run(tmp_path, "mlflow", steps=6, done=4)
    assert mlflow.calls[1] == ("start", "r1", None) and mlflow.calls[2][:2] == ("metrics", 5)


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(
    tmp_path: Path, wandb: WandbStandin, mlflow: MlflowStandin
) -> None:
    wandb.breaks_at = 2
    reporter = run(tmp_path, "wandb", "mlflow")
    assert reporter.warnings == ["wandb failed and gets nothing more of this run: ConnectionError: no route"]
    assert len(reporter.records) == 4 and len(wandb.logged) == 1 and wandb.exit_codes == []
    assert mlflow.calls[-1] == ("end", "FINISHED")
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "abc", "mlflow": "r1"}


def test_a_tracker_that_does_not_start_is_told_once(
    tmp_path: Path, wandb: WandbStandin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(WandbStandin, "init")
    reporter = run(tmp_path, "wandb")
    assert len(reporter.warnings) == 1 and len(reporter.records) == 4


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "checkpoints", "metrics.jsonl"]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    """With the real package: the numbers of a run, its options, and a resumed run without the steps it took again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard", losses=[2.0, 1.5, 1.25, 1.125])
    run(tmp_path, "tensorboard", steps=5, done=3, losses=[0.5, 0.25])  # steps 4 and 5, the fourth again
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 2.0), (2, 1.5), (3, 1.25), (4, 0.5), (5, 0.25)]
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 5]
    assert "learning_rate" in str(events.Tensors("options/text_summary"))
