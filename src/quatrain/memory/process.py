"""What the operating system says about this process and this machine. Bytes; Linux first, other systems by what they
offer."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_LARGE, _LARGEST = 1 << 20, 32 << 20


@contextmanager
def large_frees_returned() -> Iterator[None]:
    """While it lasts, glibc gives memory of a megabyte and more back to the system when it is freed.

    By itself it raises that threshold, up to 32 MB, with what is freed: loading a model then leaves holes between the
    tensors that stay (0 to 0.4 GB for 0.5 B parameters, by chance), which no plan can know. Afterwards the threshold is
    32 MB. Does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)


def resident_bytes() -> int:
    """Resident memory of this process now; 0 where the system does not tell."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most this process was ever resident; 0 where the system does not tell."""
    peak = _status("VmHWM")
    if peak or sys.platform == "win32":
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def available_bytes() -> int:
    """Memory that a process could still take without swapping; 0 where the system does not tell."""
    fields = _fields(Path("/proc/meminfo"))
    available = fields.get("MemAvailable", 0)
    if not available and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    return min(available, _cgroup_room()) if available else 0


def _cgroup_room() -> int:
    """What a container's memory limit leaves; practically infinite where there is no limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.is_file() and used.is_file()):
        return 1 << 62
    text = limit.read_text().strip()
    return 1 << 62 if text == "max" else max(0, int(text) - int(used.read_text()))


def _status(name: str) -> int:
    return _fields(Path("/proc/self/status")).get(name, 0)


def _fields(path: Path) -> dict[str, int]:
    """The "Name:   123 kB" lines of a /proc file, in bytes; nothing where there is no such file."""
    if not path.is_file():
        return {}
    fields = {}
    for line in path.read_text().splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[2] == "kB":
            fields[parts[0].rstrip(":")] = int(parts[1]) * 1024
    return fields
