"""Class P5 of docs/cases.md: what users type for a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.toys import write_jsonl

from quatrain.config import DataSource
from quatrain.data.paths import resolve_sources
from quatrain.errors import DataError


def refused(*paths: str | Path) -> tuple[str, str]:
    with pytest.raises(DataError) as error:
        resolve_sources(paths)
    return str(error.value), error.value.hint or ""


def files(*paths: str | Path) -> list[Path]:
    return [file for source in resolve_sources(paths) for file in source.files]


def test_p5_paths_that_are_not_a_data_file(tmp_path: Path) -> None:
    """P5: a folder without data, a missing file with its near name, a glob without a match, nothing at all."""
    write_jsonl(tmp_path / "train.jsonl", {})
    (tmp_path / "empty").mkdir()
    problem, hint = refused(tmp_path / "empty")
    assert "no data file in this folder" in problem and ".parquet" in hint
    problem, hint = refused(tmp_path / "trian.jsonl")
    assert "trian.jsonl: no such file" in problem and f"did you mean {tmp_path / 'train.jsonl'}?" in hint
    assert "the folder" in refused(tmp_path / "nowhere" / "train.jsonl")[1]
    assert "no file matches" in refused(f"{tmp_path}/*.csv")[0]
    assert "path is empty" in refused(" ")[0]
    assert "no data file" in refused()[0]
    assert "not a regular file" in refused("/dev/null")[0]
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    for typed in (tmp_path / "link.jsonl", tmp_path, tmp_path / "*.jsonl"):
        assert f"{tmp_path / 'link.jsonl'}: is a link to gone.jsonl, where no file is" in refused(typed)[0]


def test_p5_spaces_home_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: spaces, ~ and globs are understood."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["b 2.jsonl", "a 1.jsonl", "c[3].jsonl"]
    b, a, c = (write_jsonl(tmp_path / name, {}) for name in names)
    assert files(b, "~/a 1.jsonl") == [b, a]
    assert files("~/* [0-9].jsonl") == [a, b]
    assert files(c) == [c]  # a name with brackets is a name first


def test_p5_a_folder_is_its_data_files(tmp_path: Path) -> None:
    """P5: a folder gives the data files directly inside it in name order; what is not data or hidden is left alone."""
    inside = [write_jsonl(tmp_path / name, {}) for name in ("C.JSONL.GZ", "a.jsonl", "b.csv", "c.json.gz")]
    for name in (".d.jsonl", "README.md", "weights.safetensors"):
        (tmp_path / name).write_text("x")
    (tmp_path / "deeper").mkdir()
    write_jsonl(tmp_path / "deeper" / "e.jsonl", {})
    (source,) = resolve_sources([f"{tmp_path}@0.5"])
    assert (source.name, source.files, source.weight) == (str(tmp_path), inside, 0.5)


def test_weights_stand_behind_an_at_sign(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", {})
    for typed, weight in ((f"{plain}@0.5", 0.5), (f"{plain}@2", 2), (f"{plain}@.25", 0.25), (str(plain), 1)):
        (source,) = resolve_sources([typed])
        assert (source.files, source.weight) == ([plain], weight)
    assert "no such file" in refused(f"{plain}@half")[0]
    assert "weight above 0" in refused(f"{plain}@0")[0] and "weight above 0" in refused(f"{plain}@1001")[0]


def test_a_file_of_that_very_name_is_meant_first(tmp_path: Path) -> None:
    plain, odd = (write_jsonl(tmp_path / name, {}) for name in ("a.jsonl", "a.jsonl@0.5"))
    (source,) = resolve_sources([str(odd)])
    assert (source.files, source.weight) == ([odd], 1)
    weighted, literal = resolve_sources([DataSource(path=str(plain), weight=0.5), DataSource(path=str(odd), weight=2)])
    assert (weighted.files, weighted.weight) == ([plain], 0.5) and (literal.files, literal.weight) == ([odd], 2)
