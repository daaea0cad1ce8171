from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops import backends
from ops.backends import Implementation
from ops.memory import GuardedMemory

from quatrain.ops.select import Ops


@pytest.fixture
def memory() -> Iterator[GuardedMemory]:
    """Poisoned, guarded tensors; the guards are checked when the test ends."""
    guarded = GuardedMemory()
    yield guarded
    guarded.check()


@pytest.fixture(params=backends.ALL.values(), ids=backends.ALL)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Whose ops, in which compute dtype."""
    return request.param


@pytest.fixture
def dtype(implementation: Implementation) -> torch.dtype:
    """The compute dtype of `ops`."""
    return implementation.dtype


@pytest.fixture
def ops(implementation: Implementation, memory: GuardedMemory) -> Ops:
    """The ops under test."""
    return backends.make_ops(implementation, memory)


@pytest.fixture(params=backends.BACKENDS.values(), ids=backends.BACKENDS)
def fp32_ops(request: pytest.FixtureRequest, memory: GuardedMemory) -> Ops:
    """The ops of every implementation, in fp32."""
    return backends.make_ops(request.param, memory)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)
