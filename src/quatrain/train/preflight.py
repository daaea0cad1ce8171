"""What can be known to fail later is tried now: the run folder, the disk."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quatrain.checkpoint.resume import checkpoints_in
from quatrain.config import RunOptions
from quatrain.errors import CheckpointError, ConfigError, PlanError

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
TENSORBOARD = "tensorboard"
TRACKERS_FILE = "trackers.json"
ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
CHECKPOINTS = "checkpoints"
EXPORT_FILE = "export.json"


def check_run_folder(options: RunOptions) -> Path:
    """The run folder's path, after writing, renaming and deleting a probe there. Leaves nothing behind.

    Raises ConfigError when the folder belongs to something else, to an earlier run that is neither resumed nor
    overwritten, or to a run that is going on, CheckpointError when it cannot be written.
    """
    folder = Path(options.out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out: {folder} is a file, want a folder", hint="choose another --out")
    _check_owner(folder, options)
    check_writable(folder)
    if folder.is_dir():
        with claimed(folder):  # what is in use is said now; the run itself claims it before it writes
            pass
    return folder


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The run folder, made if needed, while no other process may train in it. The lock ends with its process, however
    that ends; a system or a file system without locks keeps nobody out. Raises ConfigError when another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # there are no such locks
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"out: another process is training in {folder} right now", hint="wait for it, or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Write, rename and delete a probe in `folder`, and leave nothing behind. Raises CheckpointError."""
    created = _missing_parents(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
    except OSError as error:
        raise CheckpointError(
            f"out: cannot write in {folder}: {error.strerror or error}", hint="choose a folder you may write to"
        ) from error
    finally:
        for path in created:
            if path.is_dir():
                path.rmdir()


def is_run(folder: Path) -> bool:
    """Whether a folder holds a Quatrain run."""
    try:
        return "quatrain" in json.loads((folder / RUN_FILE).read_text())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_adapter(path: Path) -> Path | None:
    """The adapter folder that `path` is or, as a run folder, holds; None where there is none. Raises ConfigError for a
    run that has no adapter yet."""
    for folder in (path, path / ADAPTER):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    if is_run(path):
        raise ConfigError(
            f"{path} is a run without an adapter yet", hint=f"go on with it: quatrain train --resume --out {path}"
        )
    return None


def read_record(folder: Path) -> dict[str, Any] | None:
    """What an export says about itself, or None where there is no export."""
    try:
        record = json.loads((folder / EXPORT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "merged_into" in record else None


def remove_run(folder: Path) -> None:
    """Delete an earlier run's own files, and nothing else that may lie there."""
    for name in (ADAPTER, CHECKPOINTS, TENSORBOARD):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in (METRICS_FILE, REPORT_FILE, TRACKERS_FILE, RUN_FILE):
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run writes: in its folder `checkpoints` that are there at once (masters and moments, fp32) and the
    `adapter` twice while it is replaced; elsewhere, once for each model, the quantised base that is kept."""

    folder: Path
    checkpoint: int
    checkpoints: int
    adapter: int
    cache: int
    free: int

    @property
    def run_bytes(self) -> int:
        return self.checkpoints * self.checkpoint + 2 * self.adapter

    def as_json(self) -> dict[str, int]:
        return {
            "run_bytes": self.run_bytes,
            "checkpoint_bytes": self.checkpoint,
            "checkpoints": self.checkpoints,
            "adapter_bytes": self.adapter,
            "cache_bytes": self.cache,
            "free_bytes": self.free,
        }


def disk_need(folder: Path, trainable_parameters: int, keep: int, cache: int = 0) -> DiskNeed:
    """What a run in `folder` needs: the checkpoints that are kept, two at least, and the one being written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return DiskNeed(folder, 12 * trainable_parameters, max(keep, 2) + 1, 4 * trainable_parameters, cache, free)


def check_disk(folder: Path, trainable_parameters: int, keep: int) -> None:
    """Raise PlanError when what the run folder will hold at once exceeds the free space."""
    need = disk_need(folder, trainable_parameters, keep)
    if need.free < need.run_bytes:
        raise PlanError(
            f"{folder} needs {need.run_bytes / 1e6:,.0f} MB for {keep} checkpoints, the next one and the adapter; "
            f"the disk has {need.free / 1e6:,.0f} MB left",
            hint="free some space, lower --keep-checkpoints, or choose another --out",
        )


def _check_owner(folder: Path, options: RunOptions) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        if options.resume:
            raise ConfigError(f"out: there is no run to resume in {folder}", hint="leave out --resume to start one")
        return
    if not is_run(folder) and not (options.resume and checkpoints_in(folder / CHECKPOINTS)):
        raise ConfigError(
            f"out: {folder} is not empty and holds no Quatrain run", hint="choose a new or empty folder for --out"
        )
    if not (options.resume or options.overwrite):
        raise ConfigError(
            f"out: {folder} already holds a run",
            hint="--resume to go on with it, --overwrite to replace it, or another --out",
        )


def _missing_parents(folder: Path) -> list[Path]:
    """Folders that creating `folder` would create, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _probe(folder: Path) -> None:
    path = folder / f".probe-{uuid.uuid4().hex}"
    renamed = path.with_suffix(".renamed")
    try:
        path.write_bytes(b"probe")
        os.replace(path, renamed)
    finally:
        path.unlink(missing_ok=True)
        renamed.unlink(missing_ok=True)
