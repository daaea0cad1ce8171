"""Classes A3 to A9 of docs/cases.md, A6 aside: files to records."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from data.toys import byte_level, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.outcome import Record, Skipped
from quatrain.data.pipeline import prepare
from quatrain.data.read import read_records
from quatrain.errors import DataError

TWO = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": 'd, "quoted"\nand more'}]


def records(path: Path, form: str = "auto") -> list[dict[str, Any]]:
    found = list(read_records(path, form))
    assert all(isinstance(record, Record) for record in found), found
    return [record.values for record in found if isinstance(record, Record)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'{"t":"1"}\r\n{"t":"2"}\r\n{"t":"3"}\r\n{"t":"x\\r\\ny"}'),
        ("rows.json", b'[{"t":"1"},\r\n{"t":"2"},\r\n{"t":"3"},\r\n{"t":"x\\r\\ny"}\r\n]'),
        ("rows.csv", b't\r\n1\r\n2\r\n3\r\n"x\r\ny"'),
    ],
)
def test_a3_line_ends(tmp_path: Path, name: str, content: bytes) -> None:
    """A3: the line ends of Windows end lines; an escaped or quoted one inside a text is data."""
    path = tmp_path / name
    path.write_bytes(content)
    assert [row["t"] for row in records(path)] == ["1", "2", "3", "x\r\ny"]


def test_a4_blank_truncated_and_doubled_lines(tmp_path: Path) -> None:
    """A4: blank lines are no records; a broken line is named with its column, and stops the run unless told to skip."""
    path = tmp_path / "rows.jsonl"
    good = '{"instruction":"a","output":"b"}'
    doubled = '{"instruction":"b","output":"c"}{"instruction":"d","output":"e"}'
    path.write_text(f'{good}\n\n   \n{{"instruction":"a","output":\n{doubled}\n')
    first, cut, twice = read_records(path)
    assert isinstance(first, Record) and first.source == f"{path}:1"
    assert isinstance(cut, Skipped) and cut.source == f"{path}:4" and "column 29" in cut.detail
    assert isinstance(twice, Skipped) and twice.source == f"{path}:5" and "column 33" in twice.detail
    with pytest.raises(DataError) as error:
        prepare([path], DataOptions(), byte_level())
    assert f"{path}:4" in str(error.value) and f"{path}:5" in str(error.value)
    report = prepare([path], DataOptions(on_bad_row="skip"), byte_level()).report
    assert (report.read, report.used, report.skipped) == (3, 1, {"not JSON": 2})


def test_a5_names_that_lie(tmp_path: Path) -> None:
    """A5: the content decides between lines and an array, not the name; a trailing comma is called one."""
    lines = write_jsonl(tmp_path / "rows.json", *TWO)
    array = tmp_path / "rows.jsonl"
    array.write_text(
        '[\n  {"instruction":"a",\n   "output":"b"},\n\n  {"instruction":"c",\n   "output":"d"\n  }\n]\n',
        encoding="utf-8",
    )
    assert records(lines) == TWO
    first, second = read_records(array)
    assert (first.source, second.source) == (f"{array}:2", f"{array}:5")
    array.write_text('[{"instruction":"a","output":"b"},\n {"instruction":"c","output":"d"},]')
    with pytest.raises(DataError, match=rf"{array}:2: column 34: trailing comma"):
        list(read_records(array))


def test_a_single_pretty_printed_object_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    path.write_text('\n{\n  "instruction": "a",\n  "output": "b"\n}\n')
    (record,) = read_records(path)
    assert isinstance(record, Record) and record.source == f"{path}:2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a":1}', "cut short"),
        ('[{"a":1},\n{"a":2, ', ":2: column 9: cut short"),
        ('[{"a":"b', "column 7: cut short"),
        ('[{"a":1} {"b":2}]', "want a comma"),
        ('[{"a":1}]\n[2]', "after the end"),
        ('[{"a":1,}]', "trailing comma"),
        ('[{"a":1},\n{"a" 2}]', ":2: column 6: not JSON"),
        ('[{"a":1,"a":2}]', "'a' comes twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_arrays_are_refused_with_their_place(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=problem):
        list(read_records(path))


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"a":"\xff"}', "byte 7"),
        (b'{"a":1,"a":2}', "'a' comes twice"),
        (b'{"a":NaN}', "NaN"),
        (b'["a"]', "got list"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_lines_are_named_and_the_next_one_is_read(tmp_path: Path, line: bytes, detail: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":"0"}\n' + line + b'\n{"a":"2"}\n')
    _, broken, good = read_records(path)
    assert isinstance(broken, Skipped) and broken.source == f"{path}:2" and detail in broken.detail
    assert isinstance(good, Record) and good.source == f"{path}:3"


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def _csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    import csv

    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a7_every_format_gives_the_same_ids(tmp_path: Path) -> None:
    """A7: JSONL, JSON, CSV and Parquet, plain and gzipped, give identical ids and labels."""
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(TWO, indent=2))
    files = [
        write_jsonl(tmp_path / "rows.jsonl", *TWO),
        array,
        _csv(tmp_path / "rows.csv", TWO),
        _parquet(tmp_path / "rows.parquet", TWO),
    ]
    for file in list(files):
        packed = file.with_name(file.name + ".gz")
        packed.write_bytes(gzip.compress(file.read_bytes()))
        files.append(packed)
        renamed = file.with_name(f"plain-{file.name}.data")  # gzip is seen by content as well
        renamed.write_bytes(packed.read_bytes())
        files += [renamed] if not file.name.endswith(".csv") else []
    results = [prepare([file], DataOptions(), byte_level()).train for file in files]
    assert len(results) == 11
    for rows in results:
        assert [row.input_ids for row in rows] == [row.input_ids for row in results[0]]
        assert [row.labels for row in rows] == [row.labels for row in results[0]]


def test_a7_other_formats_are_refused_with_the_supported_list(tmp_path: Path) -> None:
    """A7: a spreadsheet is refused with its name and the supported list."""
    path = tmp_path / "rows.xlsx"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match=r"rows\.xlsx.*\.jsonl, \.json, \.csv, \.parquet"):
        list(read_records(path))


@pytest.mark.parametrize("keep", [1, 2, 15, -5])
def test_a7_a_cut_gzip_is_never_zero_rows(tmp_path: Path, keep: int) -> None:
    """A7: a gzip file that ends early is an error with its name, however little is left."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(TWO[0]).encode() * 3)[:keep])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        prepare([path], DataOptions(on_bad_row="skip"), byte_level())


def test_a_cut_parquet_is_an_error(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", TWO)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"rows\.parquet: broken Parquet"):
        list(read_records(path))


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Of two columns of one name, pyarrow gives the last one's values."""
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    import pyarrow.parquet as parquet

    columns = [arrow.array(["a"]), arrow.array(["b"]), arrow.array(["c"])]
    parquet.write_table(arrow.Table.from_arrays(columns, names=["instruction", "output", "output"]), path)
    with pytest.raises(DataError, match=r"rows\.parquet: the column name 'output' comes twice: instruction"):
        list(read_records(path))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _parquet(tmp_path / "rows.parquet", TWO)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError) as error:
        list(read_records(path))
    assert "quatrain[parquet]" in str(error.value.hint)


def test_a9_text_stays_text(tmp_path: Path) -> None:
    """A9: what looks like a date, a number or a keyword is text, in every format, leading zeros included."""
    rows = [{"output": text} for text in ("2024-01-02T03:04:05", "not a date", "007", "1e5", "true", "null", "")]
    for path in (
        write_jsonl(tmp_path / "rows.jsonl", *rows),
        _csv(tmp_path / "rows.csv", [{**row, "id": "x"} for row in rows]),
        _parquet(tmp_path / "rows.parquet", rows),
    ):
        assert [row["output"] for row in records(path)] == [row["output"] for row in rows]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,,\n1,2,3\n", "the column name '' comes twice"),
        ('a,b\n1,"x\n', "rows.csv:2: broken CSV"),
        ("", "is empty"),
        ("a,b\r1,2\r", "rows.csv:1: a carriage return .* stands alone"),
        ("a,b\n1,2\n3\r,4\n", "rows.csv:3: a carriage return .* stands alone"),
    ],
)
def test_broken_csv(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text, newline="")
    with pytest.raises(DataError, match=problem):
        list(read_records(path))


def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n \na,b\n1,2\n3\n")
    row, short = read_records(path)
    assert isinstance(row, Record) and (row.values, row.source) == ({"a": "1", "b": "2"}, f"{path}:4")
    assert isinstance(short, Skipped) and short.source == f"{path}:5"


def test_csv_lines_are_those_where_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfa;b\r\n"x\ny";1\r\n2\r\n\r\n3;4\r\n')
    two_lines, short, last = read_records(path)
    assert isinstance(two_lines, Record) and (two_lines.source, two_lines.values) == (
        f"{path}:2",
        {"a": "x\ny", "b": "1"},
    )
    assert isinstance(short, Skipped) and (short.source, short.detail) == (f"{path}:4", "1 values for 2 columns")
    assert isinstance(last, Record) and last.source == f"{path}:6"


def test_a_long_field_of_csv_is_read(tmp_path: Path) -> None:
    path = _csv(tmp_path / "rows.csv", [{"instruction": "a", "output": "b" * 200_000}])  # csv's own limit is 128 KiB
    assert records(path) == [{"instruction": "a", "output": "b" * 200_000}]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is empty"):
        list(read_records(path))


def test_rows_over_several_lines_say_what_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, indent=1) + "\n" for row in TWO))
    first = next(read_records(path))
    assert isinstance(first, Skipped) and "want a whole row on each line" in first.detail


def test_white_space_at_the_start_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("\n" * 100_000 + '[{"a":"b"}]')
    assert records(path) == [{"a": "b"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_git_lfs_pointer_is_named_as_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")
    with pytest.raises(DataError, match="is a Git LFS pointer"):
        list(read_records(path))


def test_marks_at_the_start_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":"b"}\n')
    assert records(path) == [{"a": "b"}]
    path.write_text('{"a":"b"}\n', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        list(read_records(path))
    path.write_bytes(b'\xef\xbb\xbf[{"a":"\xe9"}]')
    with pytest.raises(DataError, match="byte 11 of the file"):
        list(read_records(path))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        list(read_records(tmp_path / "gone.jsonl"))
