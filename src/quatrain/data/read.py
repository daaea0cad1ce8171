"""Data files to records: JSON Lines, a JSON array, CSV or Parquet, each also gzipped.

The format is read off the content, since names lie. Values stay what the file says: text is never taken for a number
or a date. A broken record is reported with its line and the next one is read; a fault after which the rest of the file
cannot be trusted (a cut archive, a broken array) raises.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from quatrain.data.json_array import SPACE, ArrayReader
from quatrain.data.outcome import Record, RowError, Skipped, without_fill
from quatrain.data.paths import SUPPORTED
from quatrain.data.tokenizer import replace_surrogates
from quatrain.errors import DataError

_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
_ARROW = b"\xff\xff\xff\xff"  # a stream of record batches, as `datasets` saves them
_LFS = b"version https://git-lfs"
_BOM, _UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_SNIFF_BYTES = 1 << 16
_LARGEST_OBJECT = 1 << 26
_UNPACK_BYTES = 1 << 20
_TABLE_ROWS = 128  # turned into Python values at once
_LONGEST_FIELD = 2**31 - 1  # csv's own limit is 128 KiB


def read_records(path: Path, file_format: str = "auto") -> Iterator[Record | Skipped]:
    """The records of one file in order, and a `Skipped` for each one that is broken.

    Raises DataError if the file cannot be read, is empty, is of no supported format, or is damaged beyond one record.
    """
    try:
        chosen = _sniff(path) if file_format == "auto" else file_format
        yield from _READERS[chosen](path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip data is damaged or cut short ({error})", hint="fetch the file again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed if it is gzip (by content)."""
    return gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb")  # type: ignore[return-value]


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == _GZIP


def _sniff(path: Path) -> str:
    with _open(path) as file:
        head = file.read(_SNIFF_BYTES)
        while head.isspace():
            head = file.read(_SNIFF_BYTES)
    if head.startswith(_PARQUET):
        return "parquet"
    if head.startswith(_ARROW):
        return "arrow"
    if head.startswith(_LFS):
        raise DataError(f"{path}: is a Git LFS pointer, not the data", hint="fetch the data with: git lfs pull")
    if head.startswith(_UTF16):
        raise DataError(f"{path}: is UTF-16", hint="save it as UTF-8")
    text = head.removeprefix(_BOM).lstrip()
    if not text:
        raise DataError(f"{path}: is empty")
    if text.startswith(b"["):
        return "json"
    if text.startswith(b"{"):
        first_line, _, rest = text.partition(b"\n")
        return "json" if rest and not _is_object(first_line) and _is_one_object(path) else "jsonl"
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".csv", ".tsv")) and not head.startswith(_ZIP) and b"\0" not in head:
        return "csv"
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith(".json"):
        return "json"
    raise DataError(
        f"{path}: not a format that can be read; supported: {SUPPORTED}",
        hint="set the format option if it is one of these under another name",
    )


def _is_one_object(path: Path) -> bool:
    """Whether the whole file is a single, pretty-printed object of a size that one may have."""
    with _open(path) as file:
        text = file.read(_LARGEST_OBJECT + 1)
    return len(text) <= _LARGEST_OBJECT and _is_object(text)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# JSON


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key comes twice: one of its values would be lost. Keys are shown to people, so a lone
    surrogate in one becomes U+FFFD here; in values that is done where they become text."""
    found = {replace_surrogates(name): value for name, value in pairs}
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError("duplicate key", f"the key {twice!r} comes twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise RowError("not JSON", f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def loads(text: str) -> Any:
    """The value of a JSON text; a key that comes twice and NaN are refused (RowError). Raises ValueError for others."""
    return _DECODER.decode(text)


def _parse(text: str) -> dict[str, Any]:
    """One JSON object. Raises RowError with the column."""
    try:
        value = loads(text)
    except json.JSONDecodeError as error:
        hint = "want a whole row on each line, or all rows in one array" if text.strip() in ("{", "[") else None
        raise RowError("not JSON", f"not JSON at column {error.colno}: {error.msg}", hint=hint) from error
    except RecursionError as error:
        raise RowError("not JSON", "nested too deeply") from error
    except ValueError as error:  # an integer with thousands of digits
        raise RowError("not JSON", f"not JSON: {error}") from error
    return _object(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError("not an object", f"a row must be an object with named fields, got {type(value).__name__}")
    return value


def _read_jsonl(path: Path) -> Iterator[Record | Skipped]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            source = f"{path}:{number}"
            try:
                text = _decode(line.removeprefix(_BOM) if number == 1 else line).rstrip("\r\n")
                if text.strip(SPACE):
                    yield Record(_parse(text), source)
            except RowError as error:
                yield error.at(source)


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"not UTF-8 at byte {error.start + 1} of the line") from error


def _read_json(path: Path) -> Iterator[Record | Skipped]:
    """The elements of one array (or a single object), each with the line it starts on."""
    with _open(path) as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        for line, value in ArrayReader(file, path, _DECODER).elements():
            try:
                yield Record(_object(value), f"{path}:{line}")
            except RowError as error:
                yield error.at(f"{path}:{line}")


# Tables


def _read_csv(path: Path) -> Iterator[Record | Skipped]:
    """Rows by the header's names; every value is text, exactly as written."""
    csv.field_size_limit(_LONGEST_FIELD)
    with _open(path) as file:
        lines = (_csv_line(path, number, line) for number, line in enumerate(file, start=1))
        first, header_line = next(((at, line) for at, line in enumerate(lines, start=1) if line.strip()), (1, ""))
        delimiter = max(",\t;", key=header_line.count)
        rows = csv.reader(_prepend(header_line, lines), delimiter=delimiter, strict=True)
        begin = first
        try:
            header = next(rows)
            _refuse_twins(header, f"{path}:{first}")
            begin = first + rows.line_num
            for row in rows:
                source, begin = f"{path}:{begin}", first + rows.line_num
                if len(row) == len(header):
                    yield Record(dict(zip(header, row, strict=True)), source)
                elif row:
                    detail = f"{len(row)} values for {len(header)} columns"
                    yield Skipped(source, "wrong number of values", detail)
        except csv.Error as error:
            if "new-line character" in str(error):  # csv's own words are about how Python opens a file
                raise DataError(
                    f"{path}:{begin}: a carriage return (CR) stands alone and outside of quotes, want lines that end "
                    "with LF or CRLF",
                    hint=r"put a value with a CR in quotes; where CR ends the lines: tr '\r' '\n' < FILE > NEW",
                ) from None
            raise DataError(f"{path}:{begin}: broken CSV: {error}") from error


def _refuse_twins(names: list[str], where: str) -> None:
    """Raises DataError for a column name that comes twice: one of its values would be lost."""
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise DataError(f"{where}: the column name {twin!r} comes twice: {', '.join(names)}")


def _csv_line(path: Path, number: int, line: bytes) -> str:
    try:
        return (line.removeprefix(_BOM) if number == 1 else line).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line") from error


def _prepend(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _read_parquet(path: Path) -> Iterator[Record | Skipped]:
    def batches(source: Any) -> Any:
        import pyarrow.parquet as parquet

        file = parquet.ParquetFile(source)
        for group in range(file.num_row_groups):  # asked for all of them, pyarrow keeps what it has read
            yield from file.iter_batches(batch_size=_TABLE_ROWS, row_groups=[group])

    return _table_rows(path, "Parquet", batches)


def _read_arrow(path: Path) -> Iterator[Record | Skipped]:
    def batches(source: Any) -> Any:
        import pyarrow.ipc as ipc

        for batch in ipc.open_stream(source):
            yield from (batch.slice(at, _TABLE_ROWS) for at in range(0, batch.num_rows, _TABLE_ROWS))

    return _table_rows(path, "Arrow", batches)


def _table_rows(path: Path, kind: str, batches: Callable[[Any], Any]) -> Iterator[Record | Skipped]:
    """The rows of the record batches that `batches` finds in a file."""
    try:
        import pyarrow as arrow
    except ImportError as error:
        hint = "install it with: pip install 'quatrain[parquet]'"
        raise DataError(f"{path}: reading {kind} needs pyarrow, which is not installed", hint=hint) from error
    with _seekable(path) as source:
        number = 0
        try:
            for batch in batches(source):
                _refuse_twins(batch.schema.names, str(path))
                for values in batch.to_pylist():
                    number += 1
                    yield Record({name: without_fill(value) for name, value in values.items()}, f"{path}:{number}")
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: broken {kind} file after row {number}: {error}") from error


@contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes. Parquet is read from its end, so a gzipped file is decompressed to a temporary one first."""
    if not _is_gzip(path):
        with open(path, "rb") as file:
            yield file
        return
    with gzip.open(path, "rb") as packed, TemporaryFile() as unpacked:
        while piece := packed.read(_UNPACK_BYTES):
            try:
                unpacked.write(piece)
            except OSError as error:
                hint = "free some space, or let TMPDIR name a folder on a larger disk"
                raise DataError(f"{path}: cannot be decompressed: {error.strerror or error}", hint=hint) from error
        unpacked.seek(0)
        yield unpacked


_READERS = {
    "jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "parquet": _read_parquet, "arrow": _read_arrow
}  # fmt: skip
