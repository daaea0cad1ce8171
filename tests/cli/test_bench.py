"""`quatrain bench` on a tiny model: what it prints, what its JSON file holds, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from quatrain.cli.main import main
from quatrain.model.shapes import SHAPES

QUICK = ["--tokens", "64", "--row", "32", "--steps-tokens", "32,64", "--repeats", "1", "--lora-rank", "4", "--no-cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("bench") / "model"))


def test_everything_is_measured_and_kept(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", model, *QUICK, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    for part in ("GFLOP/s bf16", "GB/s", "gate+up backward", "torch ms", "tokens/s", "planned"):
        assert part in said, part
    report = json.loads(out.read_text())
    assert report["tokens"] == 64 and report["machine"]["cpu"]["cores"] >= 1
    limits = report["limits"]
    assert {*limits["flops_per_second"]} == {"bf16", "fp32"} and min(limits["flops_per_second"].values()) > 1e8
    assert limits["bytes_per_second"] > 1e8
    assert len(report["rows"]) == 28
    for row in report["rows"]:
        assert row["ms"] > 0 and 0 < row["percent_of_peak"] < 110, row
    assert [step["tokens"] for step in report["steps"]] == [32, 64]
    for step in report["steps"]:
        assert step["tokens_per_second"] > 0 and 0 < step["percent_of_peak"] < 110
        assert step["measured_peak_bytes"] > 5e7 < step["planned_bytes"]
        assert 4 < step["loss"] < 7  # 259 tokens at random: ln 259 = 5.6
        assert {"linear_lora_backward", "adamw_step"} < {op["op"] for op in step["ops"]}


def test_one_part_alone(model: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert main(["bench", model, *QUICK, "--only", "kernels", "--kernels", "reference", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["kernels"] == "reference" and len(report["rows"]) == 28 and report["steps"] == []


def test_a_step_that_does_not_fit_is_a_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, *QUICK, "--only", "steps", "--memory-budget", "10MB"]) == 1
    assert capsys.readouterr().out.count("failed: the run needs") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "all"], "want kernels or steps, got 'all'"),
        (["--steps-tokens", "512;1024"], "want numbers of tokens"),
        (["--tokens", "700"], "700 tokens are no whole number of rows of 512"),
        (["--shape", "gpt-5"], "'gpt-5' is not listed"),
        (["--compute-dtype", "fp64"], "bench measures bf16 and fp32"),
        (["smollm2-135m", "--shape", "smollm2-135m"], "contradict each other"),
    ],
)
def test_bad_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_json_file_that_cannot_be_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("new/bench.json", "is no folder"), ("", "is a folder")):
        assert main(["bench", "--shape", "smollm2-135m", "--json", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in SHAPES)
