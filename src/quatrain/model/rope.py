"""Rotary embedding frequencies: how fast each pair of dimensions turns, for every scaling that a supported model uses.

Pair i of a head's first `rotary_dim` dimensions turns by position * inv_freq[i] (RoFormer, Su et al. 2021,
arXiv:2104.09864). Long-context scalings change inv_freq, and YaRN also the length of the rotated vectors. All of it is
fp32, in the order of operations of Hugging Face transformers, so that angles at high positions agree.
"""

from __future__ import annotations

import math

import torch

from quatrain.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, length: int) -> tuple[torch.Tensor, float]:
    """(inv_freq fp32 [rotary_dim / 2], the factor on cos and sin) for a row of `length` tokens.

    `length` matters for the kind `dynamic` only: rows of other lengths then turn at other speeds.
    """
    scaling = 1.0
    if rope.kind == "dynamic":
        inv_freq = _base_frequencies(_dynamic_theta(rope, length), rope.rotary_dim)
    elif rope.kind == "yarn":
        inv_freq, scaling = _yarn(rope), yarn_attention_factor(rope)
    else:
        inv_freq = _base_frequencies(rope.theta, rope.rotary_dim)
        if rope.kind == "linear":
            inv_freq /= rope.factor
        elif rope.kind == "llama3":
            inv_freq = _llama3(rope, inv_freq)
    if rope.freq_factors is not None:
        inv_freq /= torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inv_freq, scaling


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _base_frequencies(theta: float, dim: int) -> torch.Tensor:
    frequencies: torch.Tensor = 1.0 / (theta ** _exponents(dim))
    return frequencies


def _dynamic_theta(rope: RopeSpec, length: int) -> float:
    """NTK-aware scaling: theta grows once the row is longer than the model was trained for."""
    stretch = rope.factor * max(length, rope.original_max_position) / rope.original_max_position - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_slowed = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    slowed = torch.where(wavelength > shortest_slowed, inv_freq / rope.factor, inv_freq)
    between = (wavelength >= longest_kept) & (wavelength <= shortest_slowed)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeSpec) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.2: interpolate slow pairs, keep fast ones, ramp between."""
    period = rope.theta ** _exponents(rope.rotary_dim)
    kept, interpolated = 1.0 / period, 1.0 / (rope.factor * period)
    low, high = _pair_after_rotations(rope, rope.beta_fast), _pair_after_rotations(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + kept * keep


def _pair_after_rotations(rope: RopeSpec, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times within the original context."""
    turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
    return rope.rotary_dim * turns / (2 * math.log(rope.theta))


def yarn_attention_factor(rope: RopeSpec) -> float:
    """The factor on cos and sin: given, or from `mscale` and `mscale_all_dim`, or 0.1 ln(factor) + 1 (YaRN, eq. 22)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
