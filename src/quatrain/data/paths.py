"""From what the user typed to the files that are read.

An entry of `data` is a file, a folder (all its data files), a glob, or a data set of the Hugging Face hub
(`hf:owner/name`, see `quatrain.data.hub`). Behind an `@` stands its weight: `a.jsonl@0.5`. A file that really has such
a name is meant first; the mapping form of YAML, `{path: ..., weight: ...}`, leaves no doubt.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quatrain.config import MOST_WEIGHT, DataSource
from quatrain.data.hub import PREFIX, HubRows
from quatrain.errors import DataError

SUPPORTED = ".jsonl, .json, .csv, .parquet, each also with .gz"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_WEIGHT = re.compile(r"(?s:(.+))@(\d+(?:\.\d*)?|\.\d+)")


@dataclass(frozen=True)
class Source:
    """One entry of `data`: its files in order, and how many times an epoch takes its rows."""

    name: str
    files: list[Path | HubRows]
    weight: float = 1.0


def resolve_sources(entries: Sequence[str | Path | DataSource]) -> list[Source]:
    """What `entries` name, in the order given; `~` and globs are expanded (files of a glob or folder in name order).

    Raises DataError for a missing file (with the near name), a folder or glob without a data file, a weight that cannot
    be, and an empty list.
    """
    if not entries:
        raise DataError("no data file was given")
    return [_source(entry) for entry in entries]


def _source(entry: str | Path | DataSource) -> Source:
    if isinstance(entry, DataSource):
        return Source(entry.path, _resolve(entry.path), entry.weight)
    typed, weight = _without_weight(str(entry))
    if not 0 < weight <= MOST_WEIGHT:
        hint = "leave the entry out to have none of its rows" if not weight else None
        raise DataError(f"{entry}: want a weight above 0 and of at most {MOST_WEIGHT}, got {weight:g}", hint=hint)
    return Source(typed, _resolve(typed), weight)


def _without_weight(typed: str) -> tuple[str, float]:
    found = _WEIGHT.fullmatch(typed)
    if found is None or Path(typed).expanduser().exists():
        return typed, 1.0
    return found[1], float(found[2])


def _resolve(typed: str) -> list[Path | HubRows]:
    if not typed.strip():
        raise DataError("data path is empty")
    path = Path(typed).expanduser()
    if path.is_dir():
        return list(_files_of(path))
    if path.is_file():
        return [path]
    if typed.startswith(PREFIX):
        return [HubRows.parse(typed)]
    if path.exists():
        raise DataError(f"{typed}: is not a regular file, so it cannot be read twice", hint="write it to a file first")
    if glob.has_magic(str(path)):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        found = [file for file in found if file.is_file() or _leads_nowhere(file)]
        if not found:
            raise DataError(f"{typed}: no file matches")
        _refuse_broken_links(found)
        return list(found)
    _refuse_broken_links([path])
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else None
    if not path.parent.is_dir():
        hint = f"the folder {path.parent} does not exist"
    raise DataError(f"{typed}: no such file", hint=hint)


def _files_of(folder: Path) -> list[Path]:
    """The data files directly inside a folder, in name order. A folder that `datasets` saved holds Arrow files, and
    JSON beside them that is not data."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(inner.name for inner in folder.iterdir() if inner.is_dir()))
        raise DataError(f"{folder}: holds several splits", hint=f"name one: {folder}/ followed by one of {splits}")
    saved = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    suffixes = (".arrow",) if saved else _SUFFIXES
    entries = (file for file in folder.iterdir() if file.is_file() or _leads_nowhere(file))
    names = sorted(file for file in entries if not file.name.startswith("."))
    found = [file for file in names if file.name.lower().removesuffix(".gz").endswith(suffixes)]
    _refuse_broken_links(found)
    if not found:
        raise DataError(f"{folder}: no data file in this folder", hint=f"supported: {SUPPORTED}")
    return found


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _refuse_broken_links(paths: Sequence[Path]) -> None:
    for path in paths:
        if _leads_nowhere(path):
            raise DataError(f"{path}: is a link to {path.readlink()}, where no file is", hint="mend or delete the link")
