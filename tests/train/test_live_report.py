"""The page during a run: when it is written, what it may cost, and that nothing about it ends the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from train.standin import Recorder, Standin, loop_of

from quatrain.config import TrainOptions
from quatrain.train import live_report
from quatrain.train.live_report import PAUSE, SHARE, LiveReport, write_report
from quatrain.train.reporter import Reporters


class Clock:
    """`cost` passes at each second look inside an update."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"result": {"ending": "running"}, "steps": {"total": 20}}))
    return tmp_path


def test_updates_wait_for_the_pause_and_for_a_hundred_times_their_cost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, writes, cost = Clock(), [], 0.001

    def write(folder: Path) -> None:
        writes.append(clock.now)
        clock.now += cost

    monkeypatch.setattr(live_report, "write_report", write)
    report = LiveReport(folder, pytest.fail, clock)
    for _ in range(1000):
        clock.now += 0.1
        report.step(None)  # type: ignore[arg-type]
    assert len(writes) == pytest.approx(100 / PAUSE, abs=1)
    cost = 1.0  # now it takes a second
    writes.clear()
    for _ in range(10_000):
        clock.now += 0.1
        report.step(None)  # type: ignore[arg-type]
    assert len(writes) <= 1000 / SHARE + 1


def test_a_run_leaves_the_page_of_its_last_step(folder: Path) -> None:
    reporter = Recorder()
    loop = loop_of(folder, Standin(), TrainOptions(max_steps=20, eval_every=5), reporter=reporter)
    loop.reporter = Reporters(reporter, LiveReport(folder, reporter.warning))
    loop.run()
    assert "step" in (folder / "report.html").read_text()
    assert "20 of 20" in write_report(folder).read_text()
    assert len(reporter.records) == 20 and reporter.warnings == []


def test_a_page_that_cannot_be_written_is_told_once_and_the_run_goes_on(folder: Path) -> None:
    (folder / "report.html").mkdir()  # nothing can be renamed over it
    (folder / "report.html" / "x").write_text("")
    reporter = Recorder()
    report = LiveReport(folder, reporter.warning)
    loop = loop_of(folder, Standin(), TrainOptions(max_steps=5, eval_every=1), reporter=reporter)
    loop.reporter = Reporters(reporter, report)
    assert loop.run() == "finished"
    report.update()
    assert len(reporter.warnings) == 1 and "report.html could not be written" in reporter.warnings[0]
    shutil.rmtree(folder / "report.html")
    report.update()  # once it can, it is
    assert (folder / "report.html").is_file()
