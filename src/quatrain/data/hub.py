"""Data sets of the Hugging Face hub, through the optional package `datasets`.

    hf:owner/name[:config=NAME][:split=NAME][:revision=NAME]          split is "train" unless given

The package downloads the data set once and maps it from its own cache, so rows of any number need little memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quatrain.data.disk import sha256_of
from quatrain.data.outcome import Record, without_fill
from quatrain.errors import DataError

PREFIX = "hf:"
_KEYS = ("config", "split", "revision")
_PART = re.compile(f":({'|'.join(_KEYS)})=")  # a split may hold colons: train[:10%]
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


@dataclass(frozen=True)
class HubRows:
    """The rows of one split of a data set. As text it is what the user typed."""

    typed: str
    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def parse(cls, typed: str) -> HubRows:
        """Raises DataError with the form that is wanted."""
        name, *parts = _PART.split(typed.removeprefix(PREFIX))
        given = dict(zip(parts[0::2], parts[1::2], strict=True))
        if not _NAME.fullmatch(name) or 2 * len(given) < len(parts) or not all(given.values()):
            form = "hf:owner/name, then any of " + ", ".join(f":{key}=NAME" for key in _KEYS)
            raise DataError(f"{typed}: not a data set's name; want {form}, each once")
        return cls(typed, name, **given)

    def __str__(self) -> str:
        return self.typed

    def records(self) -> Iterator[Record]:
        """The rows in order; `source` is "hf:owner/name:row". Raises DataError if the data set cannot be had."""
        for number, values in enumerate(self._data, start=1):
            yield Record({name: without_fill(value) for name, value in values.items()}, f"{self.typed}:{number}")

    def fingerprint(self) -> str | None:
        """What tells this content from any other: hashes of the Arrow files and the part of them that is read. None for
        a data set that is not in files."""
        files = [Path(file["filename"]) for file in self._data.cache_files]
        if not files:
            return None
        return json.dumps([self.config, self.split, self.revision, len(self._data), *map(sha256_of, files)])

    @cached_property
    def _data(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            hint = "install it with: pip install 'quatrain[datasets]'"
            raise DataError(f"{self.typed}: needs the package datasets, which is not installed", hint=hint) from error
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except Exception as error:
            raise DataError(f"{self.typed}: cannot be loaded: {error}") from error
