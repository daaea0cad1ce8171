from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops.memory import GuardedMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture
def memory() -> Iterator[GuardedMemory]:
    """Poisoned, guarded tensors; the guards are checked when the test ends."""
    guarded = GuardedMemory()
    yield guarded
    guarded.check()


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The compute dtypes."""
    return request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)
