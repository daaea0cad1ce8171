"""Dropout keys: the reference's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from ops.memory import GuardedMemory

from quatrain.ops.dropout.reference import dropout_keys as reference_keys
from quatrain.ops.dropout.triton import dropout_keys


@pytest.mark.parametrize("tokens", [1, 7, 1500])
@pytest.mark.parametrize(("seed", "step"), [(1, 0), (42, 3), (2**31 + 5, 10_000), (2**40 + 3, 2**33)])
def test_keys_are_bit_equal(memory: GuardedMemory, tokens: int, seed: int, step: int) -> None:
    rows, positions = torch.arange(tokens) // 5, torch.arange(tokens) % 5
    keys, want = memory.output(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64)
    dropout_keys(keys, rows, positions, torch.tensor(step), seed)
    reference_keys(want, rows, positions, torch.tensor(step), seed)
    assert torch.equal(keys, want)
