"""The progress of a run: one line that moves in a terminal, plain lines at a sensible pace elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from quatrain.cli import progress
from quatrain.cli.progress import PLAIN_LINES, TerminalReporter
from quatrain.train.reporter import StepRecord


def record(step: int, total: int, **more: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "total_steps": total, "epoch": 0.5, "loss": 1.2345, "lr": 2e-4, "grad_norm": 1.0, "tokens": 100,
        "response_tokens": 50, "tokens_per_s": 1234.5, "skipped": False,
    }  # fmt: skip
    return StepRecord(**{**values, **more})


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(progress, "peak_bytes", lambda device: 696_000_000)


def lines_of(clock: Clock, total: int, seconds: float, first: int = 0) -> list[str]:
    """What a run of `total` steps of so many seconds prints in a file, from step `first` on."""
    reporter = TerminalReporter()
    out = io.StringIO()
    reporter.console = Console(file=out, width=100, soft_wrap=True)
    reporter.started(first, total)
    for step in range(first + 1, total + 1):
        clock.now += seconds
        reporter.step(record(step, total))
    reporter.stopped()
    return out.getvalue().splitlines()


def test_a_line_has_all_that_one_wants_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(Clock(monkeypatch), 4, 15.0)
    assert lines[0] == "step 1/4  epoch 0.50  loss 1.2345  lr 2.0e-04  1,234 tok/s  696.0 MB  ETA 0:45"
    assert lines[-1].endswith("ETA 0:00") and len(lines) == 4


def test_the_rest_is_estimated_from_this_run_alone_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(Clock(monkeypatch), 100, 10.0, first=98)[0].endswith("ETA 0:10")


def test_lines_are_about_fifty_and_never_a_minute_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert len(lines_of(clock, 100_000, 0.01)) == PLAIN_LINES + 1
    assert len(lines_of(clock, 1000, 12.0)) == pytest.approx(1000 * 12 / 60, rel=0.25)


@pytest.mark.parametrize("width", [50, 80, 160])
def test_in_a_terminal_it_is_one_line(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    Clock(monkeypatch)
    reporter = TerminalReporter()
    out = io.StringIO()
    reporter.console = Console(file=out, width=width, force_terminal=True, color_system=None)
    reporter.started(0, 4)
    assert reporter.bar is not None
    reporter.step(record(3, 4, skipped=True))
    text = io.StringIO()
    still = Console(file=text, width=width)
    still.print(reporter.bar.get_renderable())
    reporter.stopped()
    shown = text.getvalue().rstrip("\n")
    assert "\n" not in shown and len(shown) <= width
    if width >= 80:
        assert all(part in shown for part in ("3/4", "skipped", "696.0 MB", "ETA"))
