"""`report.html` while the run goes on: written again now and then, in a hundredth of the run's time at most."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from quatrain.checkpoint.atomic import write_file
from quatrain.pages.metrics import read_metrics
from quatrain.pages.run import run_page
from quatrain.train.preflight import METRICS_FILE, REPORT_FILE, RUN_FILE
from quatrain.train.reporter import EvalRecord, Reporter, StepRecord

PAUSE = 5.0  # seconds between two updates, at least
PAUSE_OF_EVALUATIONS = 1.0
SHARE = 100  # an update waits this many times as long as the last one took


def write_report(folder: Path) -> Path:
    """`report.html` of a run folder, from its `run.json` and `metrics.jsonl`. Raises OSError or ValueError."""
    record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{RUN_FILE} holds no JSON object")
    updated = time.strftime("%Y-%m-%d %H:%M:%S")
    text = run_page(folder.absolute().name, record, read_metrics(folder / METRICS_FILE), updated)
    write_file(folder / REPORT_FILE, text.encode())
    return folder / REPORT_FILE


class LiveReport(Reporter):
    """Writes the page at the start, after steps and evaluations when it is time, and when told to. That it cannot be
    written is told once; the run goes on and later updates are tried all the same."""

    def __init__(self, folder: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._warned = False
        self._done_at, self._cost = float("-inf"), 0.0

    def started(self, step: int, total_steps: int) -> None:
        self.update()

    def step(self, record: StepRecord) -> None:
        self._update_after(PAUSE)

    def evaluation(self, record: EvalRecord) -> None:
        self._update_after(PAUSE_OF_EVALUATIONS)

    def update(self) -> None:
        """Write the page now."""
        began = self._clock()
        try:
            write_report(self._folder)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the page, the run must not end for it
            if not self._warned:
                self._warn(f"{self._folder / REPORT_FILE} could not be written: {error}; the run goes on without it")
            self._warned = True
        self._done_at = self._clock()
        self._cost = self._done_at - began

    def _update_after(self, pause: float) -> None:
        if self._clock() - self._done_at >= max(pause, SHARE * self._cost):
            self.update()
