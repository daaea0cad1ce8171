"""`quatrain export` from a trained run to something that `quatrain chat` opens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from oracles import families
from tiny_model import write_rows
from trained import write_base

from quatrain.cli.main import main


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_base(folder / "model", families.BY_NAME["llama"])
    rows = write_rows(folder / "rows.jsonl", 16)
    words = ["train", "--model", str(folder / "model"), "--data", str(rows), "--out", str(folder / "run")]
    assert main([*words, "--max-steps", "6", "--lr", "2e-2", "--lora-rank", "4", "--compute-dtype", "fp32"]) == 0
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["chat", *words, "--max-new-tokens", "12", "--compute-dtype", "fp32", "Paint room 3"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("form", ["hf", "gguf", "ollama"])
def test_what_is_exported_answers_as_the_run_does(world: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """L5: asked again after the export, in chat. I10: the difference is printed."""
    out = world / form
    assert main(["export", "--adapter", str(world / "run"), "--format", form, "--type", "f32", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "into its dequantised NF4 weights, stored as f32" in said
    assert "max |logit difference| to the adapter on a probe prompt: " in said
    assert "the date" not in said  # the template prints none
    assert f"quatrain chat --model {out}" in said.replace("\n           ", "")  # what to do next
    assert ("ollama create" in said) == (form == "ollama")
    want = answer(capsys, "--model", str(world / "run"))
    assert answer(capsys, "--model", str(out), "--quantize", "none") == want
    assert answer(capsys, "--model", str(world / "model")) != want


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--out", "x"], 2, "nothing given for adapter"),
        (["--adapter", "RUN"], 2, "nothing given for out"),
        (["--adapter", "RUN", "--out", "RUN"], 2, "is not empty and holds no export"),
        (["--adapter", "RUN", "--out", "x", "--format", "onnx"], 2, "format: want"),
        (["--adapter", "none", "--out", "x"], 2, "adapter: none holds no adapter_config.json"),
    ],
)
def test_bad_usage(world: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str) -> None:
    assert main(["export", *(word.replace("RUN", str(world / "run")) for word in words)]) == code
    assert message in capsys.readouterr().err


def test_how_an_adapter_was_trained_is_known_or_said(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I10: a run says what its adapter was trained on; an adapter by itself does not, and the guess is told."""
    shutil.copytree(world / "run" / "adapter", world / "moved")
    words = ["export", "--adapter", str(world / "moved"), "--out"]
    assert main([*words, str(world / "a")]) == 0
    said = capsys.readouterr().out
    assert "taken to be trained in NF4" in said and "dequantised" in said
    assert main([*words, str(world / "b"), "--quantize", "none"]) == 0
    said = capsys.readouterr().out
    assert "taken to be" not in said and "into the model's own weights" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"versions": {"quatrain": "0"}}'])
def test_a_spoiled_run_file_is_told(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """I10: its options would otherwise become the defaults in silence."""
    shutil.copytree(world / "run", tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(content)
    assert main(["chat", "--model", str(tmp_path / "run"), "--max-new-tokens", "1", "hello"]) == 0
    assert "run.json holds no options of a training" in capsys.readouterr().err


def test_a_base_that_has_moved_is_asked_for(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(world / "run", tmp_path / "run")
    config = tmp_path / "run" / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(world / "model"), "models/gone/long/ago"))
    assert main(["chat", "--model", str(tmp_path / "run"), "hello"]) == 1
    said = capsys.readouterr().err
    assert "was trained on models/gone/long/ago, which cannot be opened" in said
    assert f"--model BASE --adapter {tmp_path / 'run' / 'adapter'}" in said


def test_a_spoiled_record_of_an_export_is_told(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I10: without its record an export is quantised again, as a base model is."""
    out = tmp_path / "out"
    assert main(["export", "--adapter", str(world / "run"), "--out", str(out)]) == 0
    (out / "export.json").write_text("{")
    assert main(["chat", "--model", str(out), "--max-new-tokens", "1", "hello"]) == 0
    assert "export.json is not what an export says about itself" in capsys.readouterr().err
