"""`quatrain runs`: a folder of runs, sound and broken, listed and compared."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages.test_shell import Balanced

from quatrain.cli.main import main


def write_run(folder: Path, ending: str, losses: list[float], started: str, **options: Any) -> Path:
    folder.mkdir(parents=True)
    record = {
        "versions": {"quatrain": "0.1.0"}, "started": f"2026-11-{started}T10:00:00+00:00", "steps": {"total": 4},
        "options": {"model": "m.gguf", "data": ["d/rows.jsonl"], "out": str(folder), "learning_rate": 1e-3, **options},
        "process": {"pid": os.getpid(), "host": platform.node()},
        "result": {"ending": ending, "peak_memory_bytes": 123_000_000},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    lines: list[dict[str, Any]] = [
        {"step": at, "epoch": at / 4, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": 10, "tokens_per_s": 50.0}
        for at, loss in enumerate(losses, 1)
    ]
    lines += [{"step": at, "eval_loss": loss / 2, "eval_perplexity": 2.0} for at, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two sound runs, and every kind of trouble."""
    folder = tmp_path / "runs"
    write_run(folder / "warm", "finished", [3.0, 2.0, 2.5, 1.5], "02", learning_rate=2e-3, clip="layer")
    write_run(folder / "cold", "interrupted", [3.0, 2.5], "01")
    write_run(folder / "alive", "running", [], "03")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    text = (write_run(folder / "gone", "running", [3.0], "04") / "run.json").read_text()
    (folder / "gone" / "run.json").write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {int(gone.stdout)}'))
    (write_run(folder / "cut", "finished", [1.0], "05") / "run.json").write_text('{"versions": ')
    (write_run(folder / "odd", "finished", [1.0], "06") / "run.json").write_text('{"versions": {}, "options": 3}')
    (folder / "early" / "checkpoints").mkdir(parents=True)
    (folder / "something else").mkdir()
    (folder / "notes.txt").write_text("mine")
    return folder


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["runs", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_every_run_is_listed_with_its_state(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, str(runs))["runs"]
    states = {run["name"]: run["state"] for run in found}
    assert states == {
        "cut": "broken", "early": "broken", "odd": "broken", "cold": "interrupted", "warm": "finished",
        "alive": "running", "gone": "broken off",
    }  # fmt: skip
    assert list(states)[3:] == ["cold", "warm", "alive", "gone"]  # by the day they began
    warm = next(run for run in found if run["name"] == "warm")
    assert warm == {
        "name": "warm", "folder": str(runs / "warm"), "state": "finished", "problem": None, "model": "m.gguf",
        "data": ["d/rows.jsonl"], "steps": 4, "total_steps": 4, "loss": 1.5, "best_eval_loss": 0.75, "best_step": 4,
        "tokens_per_s": 50.0, "peak_memory_bytes": 123_000_000, "started": "2026-11-02 10:00",
    }  # fmt: skip
    assert main(["runs", str(runs)]) == 0
    said = capsys.readouterr().out
    for part in ("warm", "2/4", "0.7500 at 4", "rows.jsonl", "broken off", "early: run.json: No such file", "not that"):
        assert part in said, part
    assert "something else" not in said


def test_options_that_differ_stand_side_by_side(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(runs / "cold"), str(runs / "warm")]
    assert listed(capsys, *both)["differences"] == {"learning_rate": [1e-3, 2e-3], "clip": [None, "layer"]}
    assert main(["runs", *both, "--compare"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["learning_rate", "0.001", "0.002"] for line in said)
    assert any(line.split() == ["clip", "not", "set", "layer"] for line in said)
    assert main(["runs", str(runs / "cold"), "--compare"]) == 0
    assert "no option, over 1 run" in capsys.readouterr().out


def test_the_page_lays_all_curves_over_each_other(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "runs.html"
    assert main(["runs", str(runs), "--html", str(page)]) == 0
    text = page.read_text()
    Balanced(text)
    for part in ("warm", "broken off", "Evaluation loss", "learning_rate", "cold: 1.25", "warm: 0.75"):
        assert part in text, part
    assert main(["runs", str(runs), "--html", str(tmp_path / "no" / "x.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "none in ." in capsys.readouterr().out
    write_run(tmp_path / "runs" / "a", "finished", [1.0], "01")
    assert main(["runs"]) == 0  # now there is a folder of that name
    assert "finished" in capsys.readouterr().out
    assert main(["runs", "absent"]) == 2
    assert "absent is no folder" in capsys.readouterr().err
