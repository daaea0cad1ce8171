"""Files larger than memory: whatever the format, a record and a piece of the file are held, no more."""

from __future__ import annotations

import errno
import gzip
import json
import random
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quatrain.data import json_array, read
from quatrain.data.outcome import Record, Skipped
from quatrain.data.read import read_records
from quatrain.errors import DataError

VALID = [
    '[{"t":"1"},\r\n{"t":"é€😀"},\n\n {"t":"\\u00e9 \\ud83d\\ude00 \\" \\\\"},{"n":-1.5e-3,"l":[true,null,{}]}\n]\n',
    " [ ] ",
    '[{"a":{"b":[[["]}"]]]}} , 123456, "text", -7, true, [1], null,\n{"z":0}]',
    '\n\n{"only":\n "one"}\n',
]
BROKEN = [
    *("[", '[{"a":1}', '[{"a":1},', '{"a":1', '[{"a":"never ends}]', "[\n " + "[" * 100_000),
    *('[{"a":1} {"b":2}]', '["a" "b"]', '[{"a":1},,{"b":2}]', '[{"a":1,}]', '[\n{"a":1},\n]', '[{"a":1},\n{"a" 2}]'),
    *('[{"a":1}]\n[2]', '{"a":1}{"b":2}', '[{"a":1}] trailing', "3"),
    *('[{"a":1,"a":2}]', '[{"a":1},{"b":\n NaN}]', '[{"a":1},\n {"a":' + "9" * 5000 + "}]", '[{"a":tru}]', '[{"a":-}]'),
    *('[{"a":"x\ny"}]', '[{"a":"\\x"},{"b":2}]', '[{"a":"\\u12g4"}]'),
]


def _read(path: Path) -> tuple[list[Any], str]:
    """What comes out of a file, as (values and places, the fault that ended it)."""
    found: list[Any] = []
    try:
        for record in read_records(path, "json"):
            found.append((record.source, record.values if isinstance(record, Record) else record.detail))
    except DataError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("text", [*VALID, *BROKEN])
def test_where_the_pieces_of_an_array_are_cut_makes_no_difference(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode())
    whole = _read(path)
    if text in VALID:
        value = json.loads(text)
        values = value if isinstance(value, list) else [value]
        assert not whole[1] and [got for _, got in whole[0] if isinstance(got, dict)] == [
            want for want in values if isinstance(want, dict)
        ]
        assert len(whole[0]) == len(values)
    else:
        assert str(path) in whole[1]
    for piece in (1, 2, 3, 7, 64):
        monkeypatch.setattr(json_array, "_PIECE", piece)
        assert _read(path) == whole, piece


def test_lines_and_columns_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "_PIECE", 5)
    path = tmp_path / "rows.json"
    path.write_text('[{"a":"one"}, 5,\n\n   {"a":"two"},\n   {"a" "three"}\n]')
    first, number, second = islice(read_records(path, "json"), 3)
    assert isinstance(first, Record) and first.source == f"{path}:1"
    assert isinstance(number, Skipped) and number.source == f"{path}:1" and "got int" in number.detail
    assert isinstance(second, Record) and second.source == f"{path}:3"
    with pytest.raises(DataError, match=rf"{path}:4: column 9: not JSON"):
        list(read_records(path, "json"))


def test_bytes_that_are_not_utf8_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    text = '[{"a":"é"},\n{"b":"'.encode()
    path.write_bytes(text + b'\xff"}]')
    for piece in (1, 2, 9, len(text), 1 << 20):
        monkeypatch.setattr(json_array, "_PIECE", piece)
        with pytest.raises(DataError, match=rf"{path}:2: not UTF-8 at byte {len(text) + 1} of the file"):
            list(read_records(path, "json"))
    path.write_bytes(text + b"\xe2\x82")  # a character that the end cuts
    with pytest.raises(DataError, match=rf"{path}:2: not UTF-8 at byte {len(text) + 1} of the file"):
        list(read_records(path, "json"))


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_array_is_not_held(tmp_path: Path, packed: bool) -> None:
    rows = 4000
    content = json.dumps([{"instruction": f"{i}", "output": "x" * 4000} for i in range(rows)], indent=1).encode()
    path = tmp_path / "rows.json"
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    peak, found = _peak_of(path)
    assert found == rows
    assert peak < len(content) / 3  # the window: at most a piece and what is kept of the last, decoded and not: 4 MB


def test_gzipped_parquet_is_not_held(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows, rng = 2000, random.Random(0)
    table = arrow.Table.from_pylist([{"instruction": f"{i}", "output": rng.randbytes(4000).hex()} for i in range(rows)])
    plain = tmp_path / "plain"
    parquet.write_table(table, plain, compression="none", use_dictionary=False, row_group_size=100)
    path = tmp_path / "rows.parquet"
    path.write_bytes(gzip.compress(plain.read_bytes(), 1))
    peak, found = _peak_of(path)
    assert found == rows
    assert peak < plain.stat().st_size / 3  # 16 MB; Python holds a few rows and a piece of 1 MiB


def test_a_full_disk_is_named_while_parquet_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A temporary file on a disk that is full."""

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "rows.parquet"
    path.write_bytes(gzip.compress(b"PAR1" + random.Random(0).randbytes(1 << 16)))
    monkeypatch.setattr(read, "TemporaryFile", Full)
    with pytest.raises(DataError, match="cannot be decompressed: No space left") as error:
        list(read_records(path))
    assert "TMPDIR" in str(error.value.hint)


def _peak_of(path: Path) -> tuple[int, int]:
    """(most bytes that Python held while the file was read, records)."""
    tracemalloc.start()
    try:
        found = sum(isinstance(record, Record) for record in read_records(path))
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()
