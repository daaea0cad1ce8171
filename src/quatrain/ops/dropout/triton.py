"""Counter dropout on the GPU: the masks of the reference bit for bit, made where they are used and never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.dropout import Dropout
from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import contiguous


@triton.jit
def mix(x):
    """lowbias32 of uint32 values."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def token_bits(keys, index_mix, tokens):
    """The adapter's share of the hash for the tokens at these rows. `index_mix` is mix(index) as int32."""
    key = tl.load(keys + tokens).to(tl.uint32)
    return mix(key ^ index_mix.to(tl.uint32, bitcast=True))


@triton.jit
def keep(token, feature, threshold):
    """Whether (token, feature) survives: [T, 1] of `token_bits` against [1, K] feature numbers."""
    return mix(token ^ mix(feature.to(tl.uint32))) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def dropout_keys_kernel(keys, row_ids, positions, step, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = mix(mix(tl.load(step).to(tl.uint32)) ^ seed.to(tl.uint32, bitcast=True))
    row = tl.load(row_ids + at, mask=at < n, other=0).to(tl.uint32) + 1
    position = tl.load(positions + at, mask=at < n, other=0).to(tl.uint32) + (1 << 20)
    tl.store(keys + at, mix(mix(base ^ mix(row)) ^ mix(position)).to(tl.int64), mask=at < n)


def dropout_keys(
    keys: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, step: torch.Tensor, seed: int
) -> None:
    """keys int64 [T] = from row_ids, positions int64 [T] and step int64 []."""
    contiguous("dropout_keys", keys, row_ids, positions, step)
    how = config_for("elementwise", keys)
    grid = (triton.cdiv(keys.numel(), how["BLOCK"]),)
    dropout_keys_kernel[grid](keys, row_ids, positions, step, as_int32(seed), keys.numel(), **how)


def mask_arguments(dropout: Dropout | None, index: int) -> tuple[torch.Tensor | None, int, int, float]:
    """(keys, index_mix, threshold, factor on survivors) of an adapter; without dropout no keys and a factor of 1."""
    if dropout is None:
        return None, 0, 0, 1.0
    return dropout.keys, as_int32(_mix(index)), as_int32(int(dropout.p * 2**32)), 1 / (1 - dropout.p)


def as_int32(bits: int) -> int:
    """The low 32 bits as a signed integer, which is what kernels take."""
    bits &= 0xFFFFFFFF
    return bits - (1 << 32 if bits >> 31 else 0)


def _mix(x: int) -> int:
    """`mix` of one host integer."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def cases(arch: str, dtype: str) -> list[Case]:
    how = config("elementwise", arch, "int64")
    return [Case(dropout_keys_kernel, "*i64 *i64 *i64 *i64 i32 i32", how)] if dtype == "fp32" else []
