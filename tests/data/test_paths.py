"""Class P5 of docs/cases.md: what users type for a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.toys import write_jsonl

from quatrain.data.paths import resolve_paths
from quatrain.errors import DataError


def refused(*paths: str | Path) -> tuple[str, str]:
    with pytest.raises(DataError) as error:
        resolve_paths(paths)
    return str(error.value), error.value.hint or ""


def test_p5_paths_that_are_not_a_data_file(tmp_path: Path) -> None:
    """P5: a folder, a missing file with its near name, a glob without a match, nothing at all."""
    write_jsonl(tmp_path / "train.jsonl", {})
    problem, hint = refused(tmp_path)
    assert "is a folder" in problem and "train.jsonl" in hint
    problem, hint = refused(tmp_path / "trian.jsonl")
    assert "trian.jsonl: no such file" in problem and f"did you mean {tmp_path / 'train.jsonl'}?" in hint
    assert "the folder" in refused(tmp_path / "nowhere" / "train.jsonl")[1]
    assert "no file matches" in refused(f"{tmp_path}/*.csv")[0]
    assert "path is empty" in refused(" ")[0]
    assert "no data file" in refused()[0]
    assert "not a regular file" in refused("/dev/null")[0]


def test_p5_spaces_home_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: spaces, ~ and globs are understood."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["b 2.jsonl", "a 1.jsonl", "c[3].jsonl"]
    b, a, c = (write_jsonl(tmp_path / name, {}) for name in names)
    assert resolve_paths([b, "~/a 1.jsonl"]) == [b, a]
    assert resolve_paths(["~/* [0-9].jsonl"]) == [a, b]
    assert resolve_paths([c]) == [c]  # a name with brackets is a name first
