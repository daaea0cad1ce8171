"""`quatrain cache`, and the runs that fill it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_model import write_rows, write_tiny_model

from quatrain.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder, still to be made."""
    return tmp_path / "cache"


@pytest.fixture
def train(tmp_path: Path, folder: Path):
    """Runs one short training with this cache and returns its exit code."""
    write_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 8)

    def run(*more: str) -> int:
        words = [
            "train",
            "--model",
            str(tmp_path / "model"),
            "--data",
            str(tmp_path / "rows.jsonl"),
            "--max-steps",
            "1",
        ]
        words += ["--out", str(tmp_path / "run"), "--overwrite", "--max-seq-len", "64", "--cache-dir", str(folder)]
        return main([*words, *more])

    return run


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    capsys.readouterr()
    assert main(["cache", "--cache-dir", str(folder), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_fills_it_and_the_next_one_repeats_it_bit_for_bit(train, folder, tmp_path, capsys):
    def adapter() -> dict[str, bytes]:
        tensors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    assert train() == 0
    first = adapter()
    model, rows = sorted(listed(folder, capsys)["entries"], key=lambda entry: "model" not in entry["made"])
    assert model["made"]["model"] == str(tmp_path / "model") and model["bytes"] > 10_000
    assert rows["made"]["files"][0][0] == str(tmp_path / "rows.jsonl") and rows["bytes"] > 1000
    assert train() == 0 and adapter() == first
    assert train("--no-cache") == 0 and adapter() == first
    assert len(listed(folder, capsys)["entries"]) == 2


def test_no_cache_leaves_nothing_behind(train, folder, capsys):
    assert train("--no-cache") == 0
    assert not folder.exists() and listed(folder, capsys)["entries"] == []


def test_a_spoiled_entry_is_a_note_of_the_run(train, folder, capsys):
    assert train() == 0
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert train() == 0
    said = capsys.readouterr().out
    assert "its entry for this model is not used and will be written again" in " ".join(said.split())
    assert "its entry for these rows is not used and will be written again" in " ".join(said.split())


@pytest.mark.parametrize("by", ["cache_dir", "$QUATRAIN_CACHE_DIR"])
def test_a_file_is_no_cache_folder(train, folder, capsys, monkeypatch, by):
    folder.write_text("mine")
    if by == "cache_dir":
        assert main(["cache", "--cache-dir", str(folder)]) == 2
    else:
        monkeypatch.setenv("QUATRAIN_CACHE_DIR", str(folder))
        assert main(["cache"]) == 2
    assert f"{by}: {folder} is a file, want a folder" in capsys.readouterr().err
    assert train() == 2 and folder.read_text() == "mine"


def test_list_and_clear_in_words(train, folder, capsys):
    assert train() == 0 and train("--no-double-quant") == 0
    entries = listed(folder, capsys)["entries"]
    assert [path.suffix for path in folder.iterdir()].count(".rows") == 1
    assert main(["cache", "--cache-dir", str(folder)]) == 0
    said = capsys.readouterr().out
    for part in (
        entries[0]["key"][:12],
        "double quantisation",
        "rows of up to 64 tokens",
        "used 20",
        "3 entries",
        str(folder),
        "MB",
    ):
        assert part in said
    assert main(["cache", "--cache-dir", str(folder), "--clear", entries[0]["key"][:12]]) == 0
    assert "1 entry deleted" in capsys.readouterr().out
    assert [entry["key"] for entry in listed(folder, capsys)["entries"]] == [entry["key"] for entry in entries[1:]]
    assert len(listed(folder, capsys, "--clear", "all")["deleted"]) == 2
    assert list(folder.iterdir()) == []


def test_a_foreign_file_is_shown_as_one(folder, capsys):
    folder.mkdir()
    (folder / f"{'0a' * 16}.safetensors").write_bytes(b"hello")
    assert main(["cache", "--cache-dir", str(folder)]) == 0
    assert "not an entry of this version" in capsys.readouterr().out


def test_a_model_folder_given_by_mistake_keeps_its_weights(folder, capsys):
    write_tiny_model(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert listed(folder, capsys, "--clear", "all")["deleted"] == []
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("key", ["nothing", ""])
def test_an_unknown_key_is_refused(folder, key, capsys):
    assert main(["cache", "--cache-dir", str(folder), "--clear", key]) == 2
    assert f"0 entries have a key that starts with {key!r}" in capsys.readouterr().err


def test_check_uses_the_rows_of_train_and_says_what_is_wrong_with_them(train, folder, tmp_path, capsys):
    assert train() == 0
    (rows,) = folder.glob("*.rows")
    before = rows.stat().st_mtime_ns
    words = ["check", "--model", str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), "--max-seq-len", "64"]
    words += ["--cache-dir", str(folder)]
    assert main(words) == 0 and rows.stat().st_mtime_ns > before and len(list(folder.glob("*.rows"))) == 1
    rows.write_bytes(b"")
    capsys.readouterr()
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"cache {folder}: its entry for these rows is not used" in said and "cache cache" not in said
