"""Tokenise once: the rows of data files on disk, mapped by every later start.

One entry is one file of rows (`quatrain.data.rows`) with the report on them, `<key>.rows`. The key is a hash of
everything that decides the rows: the files' contents, the tokenizer, the template's text, the options, the versions. So
rows of an edited file, template or option have another key; old ones are never trained on. Times and sizes of files
have no part in it. Whoever reads an entry verifies the whole of it.

The cache never fails a run: what goes wrong becomes a line in `notices`, and the files are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import quatrain
from quatrain.data.disk import PARTIAL, Entry, delete_entries, entries_in
from quatrain.data.rows import RowStore, read_info
from quatrain.errors import DataError

FORMAT = 2
SUFFIX = ".rows"


@dataclass(frozen=True)
class MadeOf:
    """What an entry of rows is made of: `files` as (name, hash of the content), and whatever else decides the rows."""

    files: list[list[str]]
    settings: dict[str, Any]
    version: str = quatrain.__version__
    format: int = FORMAT

    @property
    def key(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class RowCache:
    """The entries of rows in `folder`, which need not exist yet; None keeps nothing."""

    folder: Path | None
    notices: list[str] = field(default_factory=list)

    def read(self, made: MadeOf) -> RowStore | None:
        """The rows, mapped; None where there is no such entry, or none that can be trusted."""
        if self.folder is None:
            return None
        path = self.folder / (made.key + SUFFIX)
        try:
            if not path.is_file():
                return None
            with path.open("rb") as file:
                store = RowStore.map(file)
            if store.info["made"] != asdict(made):
                raise DataError(f"{path.name} holds something else")
        except (OSError, DataError, ValueError, LookupError, TypeError) as error:
            self._note(f"its entry for these rows is not used and will be written again: {error}")
            return None
        with suppress(OSError):  # in a cache that others own, the time of the last use goes unrecorded
            os.utime(path)
        return store

    @contextmanager
    def scratch(self) -> Iterator[IO[bytes]]:
        """An empty file to write rows to, gone when the block ends unless `keep` has been called."""
        file = self._partial()
        if file is None:
            with TemporaryFile() as temporary:
                yield temporary
            return
        try:
            with file:
                yield file
        finally:
            with suppress(OSError):  # it has become an entry
                os.unlink(file.name)

    def keep(self, file: IO[bytes], made: MadeOf) -> None:
        """Make the rows in `file` (from `scratch`) the entry of `made`. It may take half of what the disk has left: a
        run needs the disk as well."""
        if self.folder is None or not isinstance(file.name, str):
            return
        try:
            size, free = os.stat(file.name).st_size, shutil.disk_usage(self.folder).free
            if size > free:  # what is free now was more by `size` before
                self._note(f"the rows ({size / 1e6:.0f} MB) are not kept: the disk has {free / 1e6:.0f} MB left")
                return
            os.replace(file.name, self.folder / (made.key + SUFFIX))
        except OSError as error:
            self._note(f"the rows are not kept: {error.strerror or error}")

    def entries(self) -> list[Entry]:
        """Every entry of rows, the last used first. Raises OSError when the folder cannot be read."""
        return entries_in(self.folder, SUFFIX, _describe) if self.folder is not None else []

    def clear(self, key: str | None = None) -> list[Entry]:
        """Deletes the entries whose key starts with `key`, or all of them and what unfinished writes have left.

        Returns what was deleted. Raises OSError when the system refuses."""
        gone = [entry for entry in self.entries() if key is None or entry.key.startswith(key)]
        if self.folder is not None:
            delete_entries(self.folder, gone, unfinished=key is None)
        return gone

    def _partial(self) -> IO[bytes] | None:
        if self.folder is None:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return (self.folder / f".{uuid.uuid4().hex}{PARTIAL}").open("x+b")
        except OSError as error:
            self._note(f"rows are not kept: {error.strerror or error}")
            return None

    def _note(self, text: str) -> None:
        self.notices.append(f"cache {self.folder}: {text}")


def _describe(path: Path) -> MadeOf | None:
    try:
        with path.open("rb") as file:
            return MadeOf(**read_info(file)["made"])
    except (OSError, DataError, ValueError, LookupError, TypeError):
        return None
