"""Triton's kernels in its interpreter, on the CPU. The oracles are those of tests/ops, with these fixtures.

bf16 is left out: the interpreter multiplies its raw bits. In fp32 and fp16 the kernels do the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops.memory import GuardedMemory

from quatrain.ops.select import Ops

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
def ops(memory: GuardedMemory) -> Ops:
    """The Triton ops."""
    return make_ops(memory)


@pytest.fixture
def fp32_ops(memory: GuardedMemory) -> Ops:
    """The same, for oracles that are about fp32."""
    return make_ops(memory)


def make_ops(memory: GuardedMemory) -> Ops:
    from quatrain.ops.triton_backend import triton_ops

    return triton_ops(memory.output(4 << 20, dtype=torch.uint8))


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)
