"""Sampling on the GPU: one program a row, which goes over the row's logits a few times and sorts nothing.

Where a sorted list of the tokens would be cut is found bit by bit: logits become integers of the same order (keys), and
for each bit one pass counts the tokens (top_k), or sums the mass (top_p), above a threshold. Logits of 16 bits have 16
or 19 such bits. A list that is cut among equal logits keeps the first of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import DTYPE_NAMES, Case, config, config_for
from quatrain.ops.triton_runtime import contiguous

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of an fp32 number that a logit of this dtype never needs."""


def sample_tokens(
    tokens: torch.Tensor, logits: torch.Tensor, draws: torch.Tensor, lengths: torch.Tensor, sampling: torch.Tensor
) -> None:
    """tokens int64 [B] = from logits [B, V]; 0 for a row without tokens (`lengths` int64 [B]). A row's draw is the one
    behind its last token: draws fp32 [B, S] at lengths - 1. `sampling` fp32 [3] is (temperature, top_k, top_p)."""
    contiguous("sample_tokens", tokens, logits, draws, lengths, sampling)
    rows, vocab = logits.shape
    sample_kernel[(rows,)](
        tokens, logits, draws, lengths, sampling, vocab, draws.shape[1], UNUSED=UNUSED_BITS[logits.dtype],
        **config_for("sample", logits),
    )  # fmt: skip


@triton.jit
def load_keys(row, start, V, UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    """(ids, logits fp32, keys int64) of a block; behind the last token the key is below all others."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < V, other=LOWEST).to(tl.float32) + 0.0  # no -0, which equals 0
    bits = x.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED
    return ids, x, tl.where(ids < V, keys.to(tl.int64), -(2**40))


@triton.jit
def logit_of(key, UNUSED: tl.constexpr):
    """The logit that has this key."""
    bits = (key << UNUSED).to(tl.int32)
    negative = bits >> 31
    return ((bits | (negative & ((1 << UNUSED) - 1))) ^ (negative & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def above(row, V, key, top, scale2, UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    """(number, mass) of the tokens with a greater key."""
    count, mass = tl.full([], 0, tl.int64), 0.0
    for start in range(0, V, BLOCK):
        _, x, keys = load_keys(row, start, V, UNUSED, BLOCK)
        count += tl.sum((keys > key).to(tl.int64), 0)
        mass += tl.sum(tl.where(keys > key, tl.exp2((x - top) * scale2), 0.0), 0)
    return count, mass


@triton.jit
def choose(row, V, draw, top_k, top_p, top, scale2, UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    """A draw among the tokens with keys above `cut` and the first `equals` of those with that key."""
    one, bits = tl.full([], 1, tl.int64), 32 - UNUSED
    least = -(one << (bits - 1))
    cut, equals = least - 1, 0 * one
    if (top_k > 0) & (top_k < V):
        cut = least
        for bit in range(bits):
            higher = cut + (one << (bits - 1 - bit))
            count, _ = above(row, V, higher - 1, top, scale2, UNUSED, BLOCK)
            cut = tl.where(count >= top_k, higher, cut)
        count, _ = above(row, V, cut, top, scale2, UNUSED, BLOCK)
        equals = top_k - count
    _, mass = above(row, V, cut, top, scale2, UNUSED, BLOCK)
    each = tl.exp2((logit_of(cut, UNUSED) - top) * scale2)
    total = mass + tl.where(equals > 0, each * equals.to(tl.float32), 0.0)
    if top_p < 1:
        wanted, bound = top_p * total, least
        for bit in range(bits):
            higher = bound + (one << (bits - 1 - bit))
            _, mass = above(row, V, higher - 1, top, scale2, UNUSED, BLOCK)
            bound = tl.where((higher <= cut) | (mass >= wanted), higher, bound)
        _, mass = above(row, V, bound, top, scale2, UNUSED, BLOCK)
        each = tl.exp2((logit_of(bound, UNUSED) - top) * scale2)
        needed = tl.maximum(tl.ceil((wanted - mass) / each), 1.0).to(tl.int64)
        equals = tl.where(bound == cut, tl.minimum(needed, equals), needed)
        cut, total = bound, mass + each * equals.to(tl.float32)
    found, last, target = one * V, 0 * one, draw * total
    before, equals_before = 0.0, 0 * one
    for start in range(0, V, BLOCK):
        ids, x, keys = load_keys(row, start, V, UNUSED, BLOCK)
        equal = (keys == cut).to(tl.int64)
        kept = (keys > cut) | ((keys == cut) & (equals_before + tl.cumsum(equal, 0) <= equals))
        p = tl.where(kept, tl.exp2((x - top) * scale2), 0.0)
        crossed = kept & (before + tl.cumsum(p, 0) > target)
        found = tl.minimum(found, tl.min(tl.where(crossed, ids, V), 0).to(tl.int64))
        last = tl.maximum(last, tl.max(tl.where(kept, ids, 0), 0).to(tl.int64))
        before += tl.sum(p, 0)
        equals_before += tl.sum(equal, 0)
    return tl.where(found < V, found, last)  # sums in another order may end just below the target


@triton.jit
def sample_kernel(tokens, logits, draws, lengths, sampling, V, S, UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    row, length = logits + b * V, tl.load(lengths + b)
    temperature, top_k, top_p = tl.load(sampling), tl.load(sampling + 1).to(tl.int64), tl.load(sampling + 2)
    top, token = tl.full([], LOWEST, tl.float32), tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK):
        ids, x, _ = load_keys(row, start, V, UNUSED, BLOCK)
        highest = tl.max(x, 0)
        token = tl.where(highest > top, tl.min(tl.where(x == highest, ids, V), 0).to(tl.int64), token)
        top = tl.maximum(top, highest)
    if (temperature > 0) & (length > 0):
        draw = tl.load(draws + b * S + length - 1)
        token = choose(row, V, draw, top_k, top_p, top, LOG2E / temperature, UNUSED, BLOCK)
    tl.store(tokens + b, tl.where(length > 0, token, 0))


def cases(arch: str, dtype: str) -> list[Case]:
    unused = next(bits for kind, bits in UNUSED_BITS.items() if DTYPE_NAMES[str(kind)] == dtype)
    how = config("sample", arch, dtype) | {"UNUSED": unused}
    return [Case(sample_kernel, f"*i64 *{dtype} *fp32 *i64 *fp32 i32:16 i32:16", how)]
