"""Writing that a crash cannot spoil: stage, fsync, manifest last, rename.

A folder made by `staged_folder` is either absent, or complete and exactly what was written: its `manifest.json` (sizes
and SHA-256 of every other file) is the last file written before the rename that makes the folder appear.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from quatrain.data.disk import sha256_of
from quatrain.errors import CheckpointError

MANIFEST = "manifest.json"


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; when the block ends well it becomes `target`, replacing what was there.

    When the block raises, the staging folder is removed and `target` is untouched. A link stays, the folder that it
    points to is replaced. The folder that is replaced is moved aside first and deleted last; `recover` puts it back
    after a crash between the two renames.

    Raises CheckpointError when `target` is a file, and when the file system refuses (no space, no permission).
    """
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"cannot write {target}: it is a file, want a folder", hint="choose another name")
    recover(target)
    staging, previous = _staging(target), _previous(target)
    try:
        _remove(staging)
        staging.mkdir(parents=True)
        yield staging
        write_manifest(staging)
        if target.exists():
            target.rename(previous)
        staging.rename(target)
        fsync_folder(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors writes by itself, and has its own error for a full disk
        shutil.rmtree(staging, ignore_errors=True)
        recover(target)
        raise CheckpointError(
            f"cannot write {target}: {getattr(error, 'strerror', None) or error}",
            hint="free some space or choose another place; what was saved before is unharmed",
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        recover(target)
        raise
    _remove(previous)


def recover(target: Path) -> None:
    """Finish or undo a replacement of `target` that a crash cut short."""
    previous = _previous(target)
    if not previous.exists():
        return
    if target.exists():
        _remove(previous)
    else:
        previous.rename(target)


def write_manifest(folder: Path) -> None:
    """Fsync every file below `folder`, then write the manifest that lists them, then fsync the folder."""
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        _fsync_file(path)
    write_file(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1).encode())


def verify_folder(folder: Path) -> None:
    """Compare a folder with its manifest. CheckpointError names the first file that is missing or differs."""
    manifest = folder / MANIFEST
    try:
        listed = json.loads(manifest.read_text())["files"]
        wanted = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is incomplete: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} cannot be read: {error}") from error
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is incomplete: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {size}")
        if sha256_of(path) != digest:
            raise CheckpointError(f"{path} is not what was written: its SHA-256 differs from the manifest's")


def write_file(path: Path, content: bytes) -> None:
    """Replace one file in a single move: readers see the old content or the new, never a part."""
    staging = path.with_name(f".{path.name}.partial")
    with open(staging, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")
