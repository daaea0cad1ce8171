"""Triton's kernels in its interpreter, on the CPU. The oracles are those of tests/ops, with these fixtures.

bf16 is left out: the interpreter multiplies its raw bits. In fp32 and fp16 the kernels do the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops.memory import GuardedMemory

pytest.importorskip("triton.language", reason="triton is not installed")


@pytest.fixture
def memory() -> Iterator[GuardedMemory]:
    """Poisoned, guarded tensors; the guards are checked when the test ends."""
    guarded = GuardedMemory()
    yield guarded
    guarded.check()


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The compute dtype."""
    return request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)
