"""Run folders, as seen from outside: what each was, how it went, and what sets several apart."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quatrain.pages.metrics import Metrics, read_metrics
from quatrain.pages.run import peak_bytes, state, when
from quatrain.train.preflight import CHECKPOINTS, METRICS_FILE, RUN_FILE

BROKEN = "broken"  # run.json is missing or cannot be read
BROKEN_OFF = "broken off"  # it says that it runs, and its process is gone

# Options that say where things are, not what is computed.
_PLACES = frozenset({"out", "resume", "override", "overwrite", "template_date", "cache_dir"})


@dataclass(frozen=True)
class Run:
    """One folder. `record` is empty where run.json could not be read; `problem` then says why."""

    folder: Path
    state: str
    record: dict[str, Any]
    metrics: Metrics
    problem: str = ""

    @property
    def options(self) -> dict[str, Any]:
        options = self.record.get("options")
        return options if isinstance(options, dict) else {}

    def summary(self) -> dict[str, Any]:
        """What the list shows; None for what is not known."""
        best, metrics = self.metrics.best, self.metrics
        data = self.options.get("data") or []
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "state": self.state,
            "problem": self.problem or None,
            "model": self.options.get("model"),
            "data": data if isinstance(data, list) else [str(data)],
            "steps": int(metrics.steps[-1]) if metrics.steps else 0,
            "total_steps": _number(self.record, "steps", "total"),
            "loss": metrics.last("loss"),
            "best_eval_loss": best["eval_loss"] if best else None,
            "best_step": best["step"] if best else None,
            "tokens_per_s": metrics.last("tokens_per_s", statistics.median),
            "peak_memory_bytes": peak_bytes(self.record, metrics) or None,
            "started": when(self.record) or None,
        }


def read_run(folder: Path) -> Run:
    """The run in `folder`. Never raises: what cannot be read is a state."""
    record: dict[str, Any] = {}
    problem = ""
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        if isinstance(content, dict) and _is_sound(content):
            record = content
        else:
            problem = f"{RUN_FILE} is not that of a run"
    except OSError as error:
        problem = f"{RUN_FILE}: {error.strerror}"
    except ValueError as error:
        problem = f"{RUN_FILE}: {error}"
    try:
        metrics = read_metrics(folder / METRICS_FILE)
    except OSError as error:
        metrics, problem = Metrics(), problem or f"{METRICS_FILE}: {error.strerror}"
    if problem:
        return Run(folder, BROKEN, record, metrics, problem)
    ending = state(record)
    return Run(folder, BROKEN_OFF if ending == "running" and not _alive(record) else ending, record, metrics)


def find_runs(folders: list[Path]) -> list[Run]:
    """The runs that are or lie in `folders`, the oldest first."""
    found: list[Path] = []
    for folder in folders:
        candidates = [folder] if _looks_like_a_run(folder) else sorted(folder.iterdir())
        found += [path for path in candidates if path.is_dir() and _looks_like_a_run(path)]
    return sorted(map(read_run, dict.fromkeys(found)), key=lambda run: (str(run.record.get("started", "")), run.folder))


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """The options that are not the same in all runs: name to one value for each, None where it has no such option."""
    names = dict.fromkeys(name for run in runs for name in run.options if name not in _PLACES)
    values = {name: [run.options.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _looks_like_a_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RUN_FILE, METRICS_FILE, CHECKPOINTS))


def _is_sound(record: dict[str, Any]) -> bool:
    """Whether the parts that are looked into are of the kind they should be."""
    parts = ("options", "result", "steps", "plan", "data", "given", "process")
    return "versions" in record and all(isinstance(record.get(name, {}), dict) for name in parts)


def _alive(record: dict[str, Any]) -> bool:
    """Whether the process of a run may still be there. On another machine nobody can tell."""
    process = record.get("process", {})
    if process.get("host") != platform.node():
        return True
    try:
        os.kill(int(process["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, TypeError, KeyError):
        return True
    return True


def _number(record: dict[str, Any], *path: str) -> int | None:
    found: Any = record
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None
