"""Trackers: TensorBoard, Weights & Biases and MLflow get the numbers of a run. Off unless `track` names them.

Each is imported when it is used; where it sends things, and whether it may use a network, is its own configuration
(`WANDB_MODE`, `MLFLOW_TRACKING_URI`, ...). Nothing that a tracker does ends a run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from quatrain.checkpoint.atomic import write_file
from quatrain.errors import ConfigError
from quatrain.train.preflight import TENSORBOARD, TRACKERS_FILE
from quatrain.train.reporter import EvalRecord, Reporter, StepRecord

_MOST_PARAMETERS = 100  # that MLflow takes at once
_LONGEST_VALUE = 500


def require_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError, with what to install, when a tracker's package is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"track: {', '.join(missing)} is not installed",
            hint=f"pip install 'quatrain[{','.join(missing)}]', or leave it out of track",
        )


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self, ending: str) -> None: ...


class TensorBoard:
    """Event files in the run folder. On resume, what was written after the checkpoint is purged from the view."""

    def __init__(self, folder: Path, options: Mapping[str, Any], earlier: str | None, step: int) -> None:
        module = import_module("torch.utils.tensorboard")
        self.identity = TENSORBOARD
        self._writer = module.SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1 if step else None)
        if earlier is None:
            lines = [f"| {name} | {value} |" for name, value in options.items()]
            self._writer.add_text("options", "\n".join(["| option | value |", "|---|---|", *lines]), 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, ending: str) -> None:
        self._writer.close()


class WandB:
    """One run of Weights & Biases, in the project that its settings name, else `quatrain`. The step is a value of its
    own: a resumed run may take steps again, and W&B's own counter never goes back."""

    def __init__(self, folder: Path, options: Mapping[str, Any], earlier: str | None, step: int) -> None:
        wandb = import_module("wandb")
        project = None if os.environ.get("WANDB_PROJECT") else "quatrain"
        self._run = wandb.init(
            project=project, name=folder.absolute().name, dir=str(folder), config=dict(options), id=earlier,
            resume="allow" if earlier else None,
        )  # fmt: skip
        self.identity = str(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, ending: str) -> None:
        self._run.finish(exit_code=1 if ending == "failed" else 0)


class MLflow:
    """One run of MLflow, in the experiment that its settings name, else `quatrain`."""

    _STATUS = {"failed": "FAILED", "interrupted": "KILLED"}  # noqa: RUF012 - read only

    def __init__(self, folder: Path, options: Mapping[str, Any], earlier: str | None, step: int) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if not (os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")):
            mlflow.set_experiment("quatrain")
        run = mlflow.start_run(run_id=earlier, run_name=None if earlier else folder.absolute().name)
        self.identity = str(run.info.run_id)
        if earlier is None:
            items = [(name, str(value)[:_LONGEST_VALUE]) for name, value in options.items()]
            for at in range(0, len(items), _MOST_PARAMETERS):
                mlflow.log_params(dict(items[at : at + _MOST_PARAMETERS]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, ending: str) -> None:
        self._mlflow.end_run(status=self._STATUS.get(ending, "FINISHED"))


_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Tracking(Reporter):
    """Passes steps and evaluations on to trackers. One that fails is told once and left alone from then on.

    `trackers.json` in the run folder holds which run of each tracker is this one, for resume to go on with it."""

    def __init__(
        self, names: Sequence[str], folder: Path, options: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._names, self._folder, self._options, self._warn = names, folder, options, warn
        self._open: dict[str, Tracker] = {}

    def started(self, step: int, total_steps: int) -> None:
        path = self._folder / TRACKERS_FILE
        earlier = _identities(path) if step else {}
        identities = dict(earlier)

        def start(name: str) -> Callable[[], None]:
            def opened() -> None:
                tracker = _KINDS[name](self._folder, self._options, earlier.get(name), step)
                self._open[name], identities[name] = tracker, tracker.identity

            return opened

        for name in self._names:
            self._try(name, start(name))
        if self._names:
            write_file(path, (json.dumps(identities) + "\n").encode())

    def step(self, record: StepRecord) -> None:
        names = ("epoch", "loss", "lr", "grad_norm", "tokens_per_s")
        self._log({f"train/{name}": getattr(record, name) for name in names}, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._log({"eval/loss": record.eval_loss, "eval/perplexity": record.eval_perplexity}, record.step)

    def close(self, ending: str) -> None:
        """The run is over, and this is how."""
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.close(ending))  # type: ignore[misc]
        self._open.clear()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(finite, step))  # type: ignore[misc]

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a tracker's trouble is not the run's
            self._open.pop(name, None)
            self._warn(f"{name} failed and gets nothing more of this run: {type(error).__name__}: {error}")


def _identities(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
