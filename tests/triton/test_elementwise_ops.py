"""Embedding, RMSNorm, RoPE and SwiGLU: the oracles of tests/ops, collected here again with this folder's fixtures."""

from ops.test_elementwise_ops import (
    test_embedding_copies_rows,
    test_rms_eps_is_the_one_given,
    test_rms_norm,
    test_rms_norm_in_place_and_frozen,
    test_rope,
    test_rope_pairs_are_split_half,
    test_swiglu,
)

__all__ = [
    "test_embedding_copies_rows",
    "test_rms_eps_is_the_one_given",
    "test_rms_norm",
    "test_rms_norm_in_place_and_frozen",
    "test_rope",
    "test_rope_pairs_are_split_half",
    "test_swiglu",
]
