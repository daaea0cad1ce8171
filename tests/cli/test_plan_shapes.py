"""`quatrain plan --shape`: a model by its numbers alone, on a GPU that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

from quatrain.cli.main import main
from quatrain.model.shapes import SHAPES

GIB = 1 << 30
CUDA = ["--device", "cuda", "--tokens", "4096"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def of_shape(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> dict[str, Any]:
    facts: dict[str, Any] = plan(capsys, "--shape", name, *words)[name]
    return facts


def test_every_shape_has_a_plan_that_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name in SHAPES for word in ("--shape", name)]
    plans = plan(capsys, *words, *CUDA)
    assert list(plans) == list(SHAPES)
    for name, facts in plans.items():
        assert facts["device"] == "cuda" and facts["choices"], name
        assert facts["total_bytes"] == sum(facts["groups"].values()) == sum(e["bytes"] for e in facts["entries"])
        assert facts["host_bytes"] == sum(entry["bytes"] for entry in facts["host_entries"])


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
def test_8b_with_recomputed_blocks_takes_7_gib_before_the_context(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = of_shape(capsys, name, *CUDA, "--checkpoint", "block")
    assert 6 * GIB < facts["total_bytes"] - facts["groups"]["device"] <= 7 * GIB
    assert facts["groups"]["device"] > 500_000_000
    embedding = next(entry for entry in facts["host_entries"] if entry["name"] == "embedding")
    assert embedding["bytes"] == SHAPES[name]["vocab_size"] * 4096 * 2
    assert "the embedding stays on the host" in " ".join(facts["choices"])


def test_a_smaller_budget_is_met_by_more_choices_until_it_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    offloaded = []
    for budget in (24, 12, 8, 7.5, 7):
        facts = of_shape(capsys, "qwen3-8b", *CUDA, "--memory-budget", f"{budget}GiB")
        assert facts["total_bytes"] <= budget * GIB
        kept = facts["groups"].get("kept blocks", 0)
        inputs = [entry["bytes"] for entry in facts["host_entries"] if entry["name"] == "block inputs"]
        assert (kept > 0) == (budget >= 12) and bool(inputs) == (budget < 8)
        offloaded.append(sum(inputs))
    assert offloaded[-1] > offloaded[-2] > 0
    assert main(["plan", "--shape", "qwen3-8b", *CUDA, "--memory-budget", "6.5GiB"]) == 0
    assert "the output head stays on the host" in capsys.readouterr().out  # the last choice
    assert main(["plan", "--shape", "qwen3-8b", *CUDA, "--memory-budget", "4.5GiB"]) == 4
    said = capsys.readouterr().err
    assert "the budget is 4832 MB" in said and "try:" in said


def test_12_gb_holds_8b(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("qwen3-8b", "llama-3.1-8b"):
        assert main(["plan", "--shape", name, *CUDA, "--memory-budget", "12GB"]) == 0
        said = capsys.readouterr().out
        assert "blocks keep their intermediates, the others are recomputed" in said
        peak = next(line for line in said.splitlines() if "planned peak" in line)
        assert float(peak.split()[-2].replace(",", "")) <= 12_000


def test_accumulation_and_graphs_are_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    small = of_shape(capsys, "qwen3-0.6b", *CUDA)
    off = of_shape(capsys, "qwen3-0.6b", *CUDA, "--cuda-graph", "off")
    assert small["groups"]["device"] - off["groups"]["device"] == 128 << 20


def test_several_shapes_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "qwen3-0.6b", "--shape", "qwen3-4b", *CUDA]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4096 tokens a micro-batch, computing in bfloat16 on a GPU" in lines[0]
    header = next(line for line in lines if "planned peak" in line)
    assert all(group in header for group in ("device", "weights", "adapters", "block inputs", "workspace"))
    rows = [line for line in lines if line.strip().startswith("qwen3-") and "," in line and "GiB" not in line]
    assert len(rows) == 2 and "smallest usual one that holds it" in "\n".join(lines)


def test_a_shape_on_the_cpu_and_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    facts = of_shape(capsys, "smollm2-135m", "--memory-budget", "64GB")
    assert facts["device"] == "cpu" and "host_bytes" not in facts and facts["choices"] == []
    assert main(["plan", "--shape", "smollm3-135m"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_a_model_and_its_rows_on_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from tiny_model import write_rows

    if torch.cuda.is_available():
        pytest.skip("there is one here")
    model = write_tiny_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl")
    words = ["--model", str(model), "--data", str(rows), "--device", "cuda", "--batch-size", "2", "--accumulation", "3"]
    facts = plan(capsys, *words)
    assert facts["device"] == "cuda" and facts["total_steps"] == 12
    assert {"ids.0", "ids.2", "row_end.2"} <= {
        entry["name"] for entry in facts["entries"]
    }  # a set for each micro-batch
    assert main(["train", *words, "--out", str(tmp_path / "out")]) == 2
    assert "device cuda: torch" in capsys.readouterr().err
