"""Attention of one new token a row over its cache, on CUDA: parts of a fixed length side by side, then their sum in
order.

The grid depends on the size of the cache alone; a part that a row has not reached, or that its window has left behind,
ends at once. The query heads of a group are the rows of one tile. A row's numbers depend on itself alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.attention.triton import LOG2E, LOWEST, UNLIMITED, key, load_tile, shape
from quatrain.ops.triton_configs import Case, Config, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import CACHE_PART, cached_attention_parts


def cached_attention_forward(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    scratch: torch.Tensor,
) -> None:
    """keys, values [B, S, Hk, D] at slot lengths[b] - 1 = k, v [B, Hk, D]; then out [B, Hq, D] =, from q [B, Hq, D].

    `lengths` is int64 [B]; a row of length 0 gets zeros. `scratch` holds `triton_sizes.cached_attention_parts`. Slots
    that a row does not see may hold anything."""
    contiguous("cached_attention_forward", out, q, k, v, keys, values, lengths)
    rows, heads, dim = q.shape
    slots, kv_heads = keys.shape[1:3]
    put = config_for("cache_put", q)
    cache_put_kernel[(rows,)](
        keys, values, k, v, lengths, slots, kv_heads * dim, BLOCK=triton.next_power_of_2(kv_heads * dim), **put
    )
    parts = triton.cdiv(slots, CACHE_PART)
    partials = carve("cached_attention_forward", scratch, *cached_attention_parts(rows, heads, slots, dim))
    window, how = window or UNLIMITED, _how(config_for(key("cached", dim), q), heads, kv_heads, dim)
    cached_part_kernel[(kv_heads, parts, rows)](
        *partials, q, keys, values, lengths, slots, window, scale * LOG2E.value, **how
    )
    add = config_for("attention_cached_add", q)
    cached_add_kernel[(heads, rows)](
        out, *partials, lengths, parts, window, dim, PART=CACHE_PART, BLOCK_D=how["BLOCK_D"], **add
    )


def _how(how: Config, heads: int, kv_heads: int, dim: int) -> Config:
    group = max(16, triton.next_power_of_2(heads // kv_heads))
    return how | shape(heads, kv_heads, dim) | {"BLOCK_G": group, "PART": CACHE_PART}


@triton.jit
def cache_put_kernel(keys, values, k, v, lengths, slots, SIZE, BLOCK: tl.constexpr):
    """keys, values [B, S, SIZE] at slot lengths[b] - 1 = k, v [B, SIZE]."""
    b, columns = tl.program_id(0), tl.arange(0, BLOCK)
    at = tl.load(lengths + b) - 1
    mask = columns < tl.where(at >= 0, SIZE, 0)
    to = (b * tl.full([], 1, tl.int64) * slots + at) * SIZE + columns
    tl.store(keys + to, tl.load(k + b * SIZE + columns, mask=mask), mask=mask)
    tl.store(values + to, tl.load(v + b * SIZE + columns, mask=mask), mask=mask)


@triton.jit
def cached_part_kernel(
    accs, tops, totals, q, keys, values, lengths, slots, window, scale2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """accs [B, Hq, parts, D], tops and totals [B, Hq, parts] (fp32, log 2) of a part, for one key head's heads."""
    kv_head, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b).to(tl.int32)
    first = tl.maximum(length - window, part * PART)
    stop = tl.minimum(length, part * PART + PART)
    if first >= stop:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    head = b * HEADS + kv_head * group
    queries = load_tile(q, head, head + group, 0, 1, HEAD_DIM, BLOCK_G, BLOCK_D, WIDEN)
    cache = b * tl.full([], KV_HEADS * HEAD_DIM, tl.int64) * slots
    top = tl.full([BLOCK_G], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for n in range(first, stop, BLOCK_N):
        seen = n + tl.arange(0, BLOCK_N) < stop
        k = load_tile(keys + cache, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        scores = tl.where(seen[None, :], tl.dot(queries, k.T, input_precision="ieee") * scale2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top, total = new_top, total * shrink + tl.sum(p, 1)
        v = load_tile(values + cache, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    at = (head + g).to(tl.int64) * tl.num_programs(1) + part
    tl.store(tops + at, top, mask=g < group)
    tl.store(totals + at, total, mask=g < group)
    inside = (g < group)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(accs + at[:, None] * HEAD_DIM + d[None, :], acc, mask=inside)


@triton.jit
def cached_add_kernel(
    out, accs, tops, totals, lengths, parts, window, D, PART: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """out of one row and head: the parts that its query sees, in order."""
    b, d = tl.program_id(1), tl.arange(0, BLOCK_D)
    head = b * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths + b).to(tl.int32)
    top, total = tl.full([], LOWEST, tl.float32), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(tl.maximum(length - window, 0) // PART, tl.cdiv(length, PART)):
        at = head.to(tl.int64) * parts + part
        part_top = tl.load(tops + at)
        new_top = tl.maximum(top, part_top)
        shrink, part_shrink = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        acc = acc * shrink + tl.load(accs + at * D + d, mask=d < D, other=0.0) * part_shrink
        total = total * shrink + tl.load(totals + at) * part_shrink
        top = new_top
    acc = acc / tl.where(length > 0, total, 1.0)
    tl.store(out + head.to(tl.int64) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def cases(arch: str, dtype: str) -> list[Case]:
    made, t, p = [], f"*{dtype}", "*fp32 *fp32 *fp32"
    for heads, kv_heads, dim in ((9, 3, 64), (32, 32, 96), (32, 8, 128), (16, 2, 256)):
        how = _how(config(key("cached", dim), arch, dtype), heads, kv_heads, dim)
        what = f"{heads}/{kv_heads} heads of {dim}"
        made.append(Case(cached_part_kernel, f"{p} {t} {t} {t} *i64 i32:16 i32:16 fp32", how, what))
        put = config("cache_put", arch, dtype) | {"BLOCK": triton.next_power_of_2(kv_heads * dim)}
        made.append(Case(cache_put_kernel, f"{t} {t} {t} {t} *i64 i32:16 i32:16", put, what))
        how = config("attention_cached_add", arch, dtype) | {"PART": CACHE_PART, "BLOCK_D": how["BLOCK_D"]}
        made.append(Case(cached_add_kernel, f"{t} {p} *i64 i32 i32:16 i32:16", how, what))
    return made
