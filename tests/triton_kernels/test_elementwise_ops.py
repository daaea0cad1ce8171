"""Embedding, RMSNorm, RoPE and SwiGLU: the oracles of tests/ops, collected here again with this folder's fixtures."""

from __future__ import annotations

import pytest
import torch
from ops.memory import GuardedMemory
from ops.test_elementwise_ops import (
    test_embedding_copies_rows,
    test_rms_eps_is_the_one_given,
    test_rms_norm,
    test_rms_norm_in_place_and_frozen,
    test_rope,
    test_rope_pairs_are_split_half,
    test_swiglu,
)

from quatrain.ops.select import Ops

__all__ = [
    "test_embedding_copies_rows",
    "test_rms_eps_is_the_one_given",
    "test_rms_norm",
    "test_rms_norm_in_place_and_frozen",
    "test_rope",
    "test_rope_pairs_are_split_half",
    "test_swiglu",
]


def test_norm_weights_over_several_tiles(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tiles of rows than programs that share the sum."""
    monkeypatch.setattr("quatrain.ops.rmsnorm.triton.NORM_PARTS", 2)
    test_rms_norm(memory, ops, dtype, random, (70, 3), True)
