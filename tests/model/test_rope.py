"""Inverse frequencies against transformers, bit for bit, and against hand-computed values."""

from __future__ import annotations

import pytest
import torch

from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import RopeSpec

transformers = pytest.importorskip("transformers", reason="transformers is the oracle")


def oracle(
    scaling: dict, head_dim: int = 64, theta: float = 10000.0, length: int | None = None, max_position: int = 2048
):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    if scaling["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=length)


def assert_same(rope: RopeSpec, scaling: dict, length: int = 1, **kwargs) -> None:
    want, want_scaling = oracle(scaling, head_dim=rope.rotary_dim, theta=rope.theta, length=length, **kwargs)
    got, got_scaling = inverse_frequencies(rope, length)
    assert got.dtype == torch.float32 and torch.equal(got, want) and got_scaling == want_scaling


@pytest.mark.parametrize("theta", [10000.0, 1000000.0, 500000.0])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_default_and_linear(theta, dim):
    assert_same(RopeSpec(theta, dim), {"rope_type": "default"})
    assert_same(RopeSpec(theta, dim, "linear", factor=4.0), {"rope_type": "linear", "factor": 4.0})
    assert_same(RopeSpec(theta, dim, "linear", factor=3.0), {"rope_type": "linear", "factor": 3.0})


@pytest.mark.parametrize("length", [1, 2048, 2049, 5000])
def test_dynamic(length):
    rope = RopeSpec(10000.0, 64, "dynamic", factor=2.0, original_max_position=2048)
    assert_same(rope, {"rope_type": "dynamic", "factor": 2.0}, length)


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3(dim, factor):
    rope = RopeSpec(500000.0, dim, "llama3", factor=factor, original_max_position=8192)
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert_same(rope, {"rope_type": "llama3", "original_max_position_embeddings": 8192, **scaling})


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 1.25},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"truncate": False},
        {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ],
)
def test_yarn(dim, extra):
    rope = RopeSpec(1000000.0, dim, "yarn", factor=4.0, original_max_position=4096, **extra)
    assert_same(rope, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **extra})


def test_j1_llama3_by_hand():
    """J1: the frequencies of Llama 3 as computed by hand."""
    rope = RopeSpec(500000.0, 8, "llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=8192)
    got, _ = inverse_frequencies(rope, 1)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0376060309, 0.0005248462, 0.0000066479]), rtol=1e-5, atol=0)
    plain, _ = inverse_frequencies(RopeSpec(500000.0, 8), 1)
    torch.testing.assert_close(plain, torch.tensor([1, 0.03760603, 0.00141421, 0.00005318]), rtol=1e-4, atol=0)


def test_j2_linear_position_8_turns_like_position_2():
    """J2: linear scaling by 4."""
    linear, plain = (inverse_frequencies(r, 1)[0] for r in (RopeSpec(1e4, 8, "linear", factor=4.0), RopeSpec(1e4, 8)))
    torch.testing.assert_close(8 * linear, 2 * plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("length", "theta"), [(16, 10000.0), (32, 43267.487)])
def test_j4_dynamic_depends_on_the_length_of_the_row(length, theta):
    """J4: dynamic NTK at length 16 and 32 of a model of 16."""
    rope = RopeSpec(10000.0, 8, "dynamic", factor=2.0, original_max_position=16)
    got, _ = inverse_frequencies(rope, length)
    torch.testing.assert_close(got, inverse_frequencies(RopeSpec(theta, 8), 1)[0], rtol=1e-6, atol=0)


def test_j5_partial_rotary_has_as_many_frequencies_as_pairs():
    """J5: four of eight dimensions turn."""
    got, _ = inverse_frequencies(RopeSpec(10000.0, 4), 1)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.01]))


def test_gguf_factors_equal_the_llama3_they_were_made_from():
    llama3 = RopeSpec(500000.0, 64, "llama3", factor=32.0, original_max_position=8192)
    want, plain = inverse_frequencies(llama3, 1)[0], inverse_frequencies(RopeSpec(500000.0, 64), 1)[0]
    factors = tuple((plain / want).tolist())
    got, scaling = inverse_frequencies(RopeSpec(500000.0, 64, freq_factors=factors), 1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert scaling == 1.0
