"""What the process says about itself, and how it gives memory back."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOLES = """
import sys, torch
from contextlib import nullcontext
from quatrain.memory.process import large_frees_returned, resident_bytes
torch.ones(7 << 20)  # freed at once: from now on glibc takes less than that from its heap
before, kept = resident_bytes(), []
with large_frees_returned() if sys.argv[1] == "returned" else nullcontext():
    for i in range(30):  # each too large for the hole that the one before has left
        block = torch.ones((8 << 18) + (i << 14))
        kept.append(torch.ones(1 << 18))
        del block
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's malloc")
def test_what_loading_frees_leaves_no_holes() -> None:
    """30 tensors of 1 MiB stay; 8 MiB each between them go. Without the context most of those 240 MiB stay too."""
    grown = {}
    for how in ("returned", "kept"):
        done = subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, text=True, check=True)
        grown[how] = int(done.stdout)
    assert grown["returned"] < 50 << 20, grown
    if grown["kept"] < 100 << 20:
        pytest.skip(f"this C library leaves no holes by itself: {grown}")
