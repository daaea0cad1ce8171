"""Tokenised rows in one flat file: written as they come, mapped when they are read.

A `Row` is made when it is asked for, so data larger than memory can be trained on; orders and batches are worked out
from `lengths` alone. Token ids are int32, and one that is not learned is stored as its complement (`~id`, below zero):
ids and labels in four bytes a token. The file:

    tokens int32 [T], padded to 8 bytes | ends int64 [n] | lines int64 [n] | supervised int32 [n] | JSON | footer
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from quatrain.data.row import IGNORE, Row
from quatrain.errors import DataError

_MAGIC = b"QUATROWS"
_FOOTER = struct.Struct("<8sQQQ32s")  # magic, T, n, bytes of JSON, SHA-256 of all before it
_FLUSH = 1 << 16  # tokens
_HASH_PIECE = 1 << 24  # bytes
_NO_LINE = -1


class RowWriter:
    """Appends rows to `file`, which must be empty. Holds 20 bytes a row in memory, and no tokens to speak of."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sha = file, hashlib.sha256()
        self._tokens, self._written = array("i"), 0
        self._ends, self._lines, self._supervised = array("q"), array("q"), array("i")
        self._names: list[str] = []
        self._name_ends: list[int] = []  # rows up to the last one of each name

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, row: Row) -> None:
        """Add a row. `row.labels` must agree with its ids, as `Row` says (ValueError)."""
        tokens = [token if label == token else ~token for token, label in zip(row.input_ids, row.labels, strict=True)]
        if any(token < 0 and label != IGNORE for token, label in zip(tokens, row.labels, strict=True)):
            raise ValueError(f"{row.source}: a label that is neither its token nor {IGNORE}")
        self._tokens.extend(tokens)
        self._ends.append(self._written + len(self._tokens))
        self._supervised.append(row.num_supervised)
        self._place(row.source)
        if len(self._tokens) >= _FLUSH:
            self._flush()

    def finish(self, info: dict[str, Any]) -> None:
        """Write what follows the tokens; `info` (JSON values) comes back as `RowStore.info`."""
        self._flush()
        text = json.dumps({"names": self._names, "name_ends": self._name_ends, "info": info}).encode()
        self._write(bytes(-4 * self._written % 8))
        for part in (self._ends, self._lines, self._supervised):
            self._write(memoryview(part).cast("B"))
        self._write(text)
        footer = _FOOTER.pack(_MAGIC, self._written, len(self), len(text), bytes(32))[:-32]
        self._write(footer)
        self._file.write(self._sha.digest())
        self._file.flush()

    def _place(self, source: str) -> None:
        name, _, line = source.rpartition(":")
        number = int(line) if name and line.isdecimal() else _NO_LINE
        self._lines.append(number)
        name = source if number == _NO_LINE else name
        if not self._names or self._names[-1] != name:
            self._names.append(name)
            self._name_ends.append(0)
        self._name_ends[-1] = len(self)

    def _flush(self) -> None:
        self._write(memoryview(self._tokens).cast("B"))
        self._written += len(self._tokens)
        self._tokens = array("i")

    def _write(self, piece: bytes | memoryview) -> None:
        self._sha.update(piece)
        self._file.write(piece)


class RowStore:
    """What a `RowWriter` wrote, in `buffer` (a map of the file). `content` is a SHA-256 over tokens and lengths.

    Raises DataError unless every byte is what was written; that reads all of it once.
    """

    def __init__(self, buffer: bytes | mmap.mmap) -> None:
        view = memoryview(buffer)
        tokens, rows, text_at, digest = _parts(view)
        ends_at, lines_at, supervised_at = text_at - 20 * rows, text_at - 12 * rows, text_at - 4 * rows
        sha = hashlib.sha256()
        _update(sha, view[:lines_at])
        self.content = sha.hexdigest()
        _update(sha, view[lines_at:-32])
        if sha.digest() != digest:
            raise DataError("not what was written: the SHA-256 differs")
        self.tokens = np.frombuffer(buffer, np.int32, tokens)
        self.ends = np.frombuffer(buffer, np.int64, rows, ends_at)
        self.lines = np.frombuffer(buffer, np.int64, rows, lines_at)
        self.supervised = np.frombuffer(buffer, np.int32, rows, supervised_at)
        named = json.loads(bytes(view[text_at : -_FOOTER.size]))
        self.info: dict[str, Any] = named["info"]
        self._names, self._name_ends = named["names"], named["name_ends"]

    @classmethod
    def map(cls, file: IO[bytes]) -> RowStore:
        """The rows in an open file, which may be closed or deleted afterwards. Raises as the constructor."""
        return cls(_mapped(file))

    def row(self, index: int) -> Row:
        begin = int(self.ends[index - 1]) if index else 0
        stored = self.tokens[begin : int(self.ends[index])]
        learned = stored >= 0
        ids, labels = np.where(learned, stored, ~stored), np.where(learned, stored, IGNORE)
        return Row(tuple(ids.tolist()), tuple(labels.tolist()), self.source(index))

    def source(self, index: int) -> str:
        """Where a row comes from: "file:line"."""
        name, line = self._names[bisect_right(self._name_ends, index)], int(self.lines[index])
        return name if line == _NO_LINE else f"{name}:{line}"


class Rows(Sequence[Row]):
    """Rows of a store: all of them, or those of `index` (int64 [n]) in its order."""

    def __init__(self, store: RowStore, index: NDArray[np.int64] | None = None) -> None:
        self._store, self._index = store, index

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Rows:
        """Rows that are at hand, in memory."""
        file = io.BytesIO()
        writer = RowWriter(file)
        for row in rows:
            writer.append(row)
        writer.finish({})
        return cls(RowStore(file.getvalue()))

    def __len__(self) -> int:
        return len(self._store.ends) if self._index is None else len(self._index)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        at = range(len(self))[index]
        return self._store.row(at if self._index is None else int(self._index[at]))

    def select(self, index: NDArray[np.int64]) -> Rows:
        """The rows at the places `index`, in that order; nothing is copied."""
        return Rows(self._store, index if self._index is None else self._index[index])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [n]."""
        return self._chosen(np.diff(self._store.ends, prepend=0))

    @cached_property
    def supervised(self) -> NDArray[np.int32]:
        """Supervised tokens of each row (`Row.num_supervised`), int32 [n]."""
        return self._chosen(self._store.supervised)

    def digest(self) -> str:
        """SHA-256 over the token ids and labels of the rows in order. Where they come from has no part in it."""
        digest = hashlib.sha256(self._store.content.encode())
        if self._index is not None:
            digest.update(self._index.tobytes())
        return digest.hexdigest()

    def _chosen(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self._index is None else values[self._index]


def read_info(file: IO[bytes]) -> dict[str, Any]:
    """What `RowWriter.finish` was given, without a look at the rows. Raises DataError for another kind of file."""
    view = memoryview(_mapped(file))
    return dict(json.loads(bytes(view[_parts(view)[2] : -_FOOTER.size]))["info"])


def _mapped(file: IO[bytes]) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise DataError("the file is empty") from error


def _parts(view: memoryview) -> tuple[int, int, int, bytes]:
    """(tokens, rows, where the JSON begins, SHA-256) of a file of rows, from its footer and size."""
    magic, tokens, rows, text_size, digest = (
        _FOOTER.unpack(view[-_FOOTER.size :]) if len(view) >= _FOOTER.size else (b"", 0, 0, 0, b"")
    )
    text_at = 4 * tokens + -4 * tokens % 8 + 20 * rows
    if magic != _MAGIC or text_at + text_size + _FOOTER.size != len(view):
        raise DataError("not a file of rows, or cut short")
    return tokens, rows, text_at, digest


def _update(sha: Any, view: memoryview) -> None:
    for at in range(0, len(view), _HASH_PIECE):
        sha.update(view[at : at + _HASH_PIECE])
