"""From what the user typed to the files that are read."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from quatrain.errors import DataError

SUPPORTED = ".jsonl, .json, .csv, .parquet, each also with .gz"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def resolve_paths(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, in the order given; `~` and globs are expanded (a glob's files in name order).

    Raises DataError for a folder, a missing file (with the near name), a glob without a match, and an empty list.
    """
    if not paths:
        raise DataError("no data file was given")
    return [file for path in paths for file in _resolve(str(path))]


def _resolve(typed: str) -> list[Path]:
    if not typed.strip():
        raise DataError("data path is empty")
    path = Path(typed).expanduser()
    if path.is_dir():
        inside = [file.name for file in sorted(path.iterdir()) if _looks_like_data(file)]
        hint = f"it holds {', '.join(inside[:5])}; name the files, or use {typed.rstrip('/')}/*" if inside else None
        raise DataError(f"{typed}: is a folder, want a data file", hint=hint or f"supported: {SUPPORTED}")
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"{typed}: is not a regular file, so it cannot be read twice", hint="write it to a file first")
    if glob.has_magic(str(path)):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise DataError(f"{typed}: no file matches")
        return found
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else None
    if not path.parent.is_dir():
        hint = f"the folder {path.parent} does not exist"
    raise DataError(f"{typed}: no such file", hint=hint)


def _looks_like_data(file: Path) -> bool:
    return file.is_file() and file.name.removesuffix(".gz").endswith(_SUFFIXES)
