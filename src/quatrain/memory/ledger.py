"""One GPU, several processes: a file in which each writes how much of the device it will take, so that together they
never plan more than there is.

Entries belong to processes; one whose process is gone (its number may have been given to another since) no longer
counts. All changes happen under a file lock and replace the file as a whole.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from quatrain.errors import PlanError


@dataclass(frozen=True)
class Entry:
    """`nbytes` that process `pid`, started at `started` (see `process_start`), has reserved; `number` is its own."""

    pid: int
    started: str
    nbytes: int
    what: str
    number: int = 0


class Ledger:
    """Reservations on one device of `total` bytes, kept in `path`."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path, total

    def reserve(self, nbytes: int, what: str = "") -> int:
        """Adds a reservation of this process; returns its number. Raises PlanError, and changes nothing, when all
        others leave less."""
        with self._locked() as entries:
            taken = sum(entry.nbytes for entry in entries)
            if taken + nbytes > self.total:
                holders = ", ".join(f"process {e.pid} {e.nbytes / 1e6:.0f} MB ({e.what})" for e in entries)
                raise PlanError(
                    f"the run needs {nbytes / 1e6:.0f} MB of the GPU and {(self.total - taken) / 1e6:.0f} of its "
                    f"{self.total / 1e6:.0f} MB are not reserved; {holders or 'no other process holds any'}",
                    hint="wait until one of them is done, or give --memory-budget what is left",
                )
            pid = os.getpid()
            number = 1 + max((entry.number for entry in entries if entry.pid == pid), default=0)
            self._write([*entries, Entry(pid, process_start(pid), nbytes, what, number)])
            return number

    def release(self, number: int) -> None:
        """Ends a reservation of this process."""
        with self._locked() as entries:
            self._write([entry for entry in entries if (entry.pid, entry.number) != (os.getpid(), number)])

    def reserved(self) -> int:
        """Bytes that living processes have reserved, this one included."""
        with self._locked() as entries:
            return sum(entry.nbytes for entry in entries)

    def reserved_by_others(self) -> int:
        """Bytes that other living processes have reserved."""
        with self._locked() as entries:
            return sum(entry.nbytes for entry in entries if entry.pid != os.getpid())

    @contextmanager
    def _locked(self) -> Iterator[list[Entry]]:
        """The entries of living processes, while nobody else may read or write them."""
        import fcntl  # not on Windows, where nothing calls this

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield [entry for entry in self._read() if process_start(entry.pid) == entry.started]

    def _read(self) -> list[Entry]:
        """All entries; none where the file is missing or is not one of ours: a ledger is no reason to stop a run."""
        try:
            return [Entry(**entry) for entry in json.loads(self.path.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def _write(self, entries: list[Entry]) -> None:
        staged = self.path.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps([asdict(entry) for entry in entries]))
        os.replace(staged, self.path)


def process_start(pid: int) -> str:
    """When a living process started, in the system's own ticks: with the number it names one process. Empty when there
    is none, or only what its parent has not collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def ledger_path(device: str) -> Path:
    """Where the ledger of a device (its UUID) is: the same for all processes of this user."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"quatrain-{os.getuid()}" / f"{device}.json"
