"""Files by their content, and the cache folder, where quantised models and tokenised rows lie side by side.

An entry is one file, `<key>` and a suffix that says what it holds. It is written under a name of its own and renamed:
readers see all of it or nothing, writers do not meet, and a mapped entry that is replaced or deleted stays readable.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quatrain.config import InstructConfig
from quatrain.errors import ConfigError

ENVIRONMENT = "QUATRAIN_CACHE_DIR"
PARTIAL = ".partial"
_KEY = re.compile("[0-9a-f]{32}")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def cache_folder(option: str | None) -> Path:
    """Where entries are: the option, else $QUATRAIN_CACHE_DIR, else `quatrain` in the user's cache folder (XDG).

    Raises ConfigError when what the option or the variable names is there and is no folder."""
    named = option or os.environ.get(ENVIRONMENT)
    if named:
        folder = Path(named).expanduser()
        if folder.exists() and not folder.is_dir():
            by = "cache_dir" if option else f"${ENVIRONMENT}"
            raise ConfigError(f"{by}: {folder} is a file, want a folder", hint="name another folder, or leave it out")
        return folder
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quatrain"


def configured_folder(config: InstructConfig) -> Path | None:
    """The cache folder of a run; None where nothing is to be kept."""
    return cache_folder(config.cache_dir) if config.cache else None


@dataclass(frozen=True)
class Entry:
    """One file of the cache as `quatrain cache` shows it. `made` (a dataclass) says what it is made of; None: it is not
    one of ours."""

    path: Path
    num_bytes: int
    last_used: float  # seconds since the epoch
    made: Any | None

    @property
    def key(self) -> str:
        return self.path.stem


def entries_in(folder: Path, suffix: str, describe: Callable[[Path], Any | None]) -> list[Entry]:
    """The entries with a suffix, the last used first. Raises OSError when the folder cannot be read.

    A file with another name than a key's is none: it must not be cleared, as when the folder is really a model's."""
    named = [path for path in folder.glob("*" + suffix) if _KEY.fullmatch(path.stem)] if folder.is_dir() else []
    paths = [path for path in named if path.is_file()]
    found = [Entry(path, path.stat().st_size, path.stat().st_mtime, describe(path)) for path in paths]
    return sorted(found, key=lambda entry: -entry.last_used)


def delete_entries(folder: Path, entries: list[Entry], *, unfinished: bool) -> None:
    """Delete these entries, and what `unfinished` writes have left. Raises OSError when the system refuses."""
    left = folder.glob(".*" + PARTIAL) if unfinished and folder.is_dir() else ()
    for path in (*(entry.path for entry in entries), *left):
        path.unlink(missing_ok=True)
