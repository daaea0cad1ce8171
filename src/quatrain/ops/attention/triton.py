"""Causal grouped-query attention on CUDA: tiles of queries against tiles of keys, no scores in memory.

Tiles are cut from the stream, not from rows, so that the grid depends on nothing but sizes: a tile reads the bounds of
its own tokens, walks the keys (queries) between the first and the last that any of them sees, and masks inside. A tile
of inert tokens has nothing to walk. dK and dV of a key tile add up over the query heads of its group inside one
program: no atomics, the same bits every time. Which keys share a tile depends on what a row is packed with, and with
it the last bits of a row's numbers.

Scores are kept in units of log 2, whose exponential is one instruction.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from quatrain.ops.attention import RowBounds
from quatrain.ops.triton_configs import Case, Config, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import attention_statistics

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(-3.0e38)
UNLIMITED = 1 << 30
"""The window of attention without one: no stream is as long."""


def attention_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: RowBounds,
    scale: float,
    window: int | None,
) -> None:
    """out [T, Hq, D] =, lse fp32 [T, Hq] =, from q [T, Hq, D], k, v [T, Hk, D]."""
    contiguous("attention_forward", out, lse, q, k, v, rows.start, rows.end)
    tokens, heads, _ = q.shape
    how = _how("forward", q, k)
    attention_forward_kernel[(heads, triton.cdiv(tokens, how["BLOCK_M"]))](
        out, lse, q, k, v, rows.start, rows.end, tokens, window or UNLIMITED, scale * LOG2E.value, **how
    )


def attention_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: RowBounds,
    scale: float,
    window: int | None,
    scratch: torch.Tensor,
) -> None:
    """dq [T, Hq, D] =, dk, dv [T, Hk, D] = from dout [T, Hq, D] and what the forward read and wrote. `dq` may be
    `dout`. `scratch` holds `triton_sizes.attention_statistics` twice."""
    contiguous("attention_backward", dq, dk, dv, dout, out, lse, q, k, v, rows.start, rows.end)
    tokens, heads, _ = q.shape
    window, scale2 = window or UNLIMITED, scale * LOG2E.value
    delta, lse2 = carve("attention_backward", scratch, *2 * [attention_statistics(tokens, heads)])
    how = _how("statistics", q, k)
    attention_statistics_kernel[(heads, triton.cdiv(tokens, how["BLOCK_M"]))](
        delta, lse2, dout, out, lse, tokens, **how
    )
    how = _how("dkdv", q, k)
    attention_dkdv_kernel[(k.shape[1], triton.cdiv(tokens, how["BLOCK_N"]))](
        dk, dv, dout, delta, lse2, q, k, v, rows.end, tokens, window, scale, scale2, **how
    )
    how = _how("dq", q, k)  # last, for it may write over dout
    attention_dq_kernel[(heads, triton.cdiv(tokens, how["BLOCK_M"]))](
        dq, dout, delta, lse2, q, k, v, rows.start, rows.end, tokens, window, scale, scale2, **how
    )


def _how(name: str, q: torch.Tensor, k: torch.Tensor) -> Config:
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    return config_for(key(name, dim), q) | shape(heads, kv_heads, dim)


def key(name: str, dim: int) -> str:
    """A kernel's row in the table: blocks go by the width of the head."""
    return f"attention_{name}/{max(64, triton.next_power_of_2(dim))}"


def shape(heads: int, kv_heads: int, dim: int) -> Config:
    """What the kernels know of a model. A tile spans the whole head, widened to a power of two that a product takes."""
    width = max(16, triton.next_power_of_2(dim))
    return {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "BLOCK_D": width}


def cases(arch: str, dtype: str) -> list[Case]:
    made, t = [], f"*{dtype}"
    kernels = {
        "forward": (attention_forward_kernel, f"{t} *fp32 {t} {t} {t} *i32 *i32 i32:16 i32:16 fp32"),
        "statistics": (attention_statistics_kernel, f"*fp32 *fp32 {t} {t} *fp32 i32:16"),
        "dkdv": (attention_dkdv_kernel, f"{t} {t} {t} *fp32 *fp32 {t} {t} {t} *i32 i32:16 i32:16 fp32 fp32"),
        "dq": (attention_dq_kernel, f"{t} {t} *fp32 *fp32 {t} {t} {t} *i32 *i32 i32:16 i32:16 fp32 fp32"),
    }
    for heads, kv_heads, dim in ((9, 3, 64), (32, 32, 96), (32, 8, 128), (16, 2, 256)):
        for name, (kernel, types) in kernels.items():
            how = config(key(name, dim), arch, dtype) | shape(heads, kv_heads, dim)
            made.append(Case(kernel, types, how, f"{heads}/{kv_heads} heads of {dim}"))
    return made


@triton.jit
def attention_forward_kernel(
    out, lse, q, k, v, row_start, row_end, tokens, window, scale2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out, lse of BLOCK_M queries of one head: softmax over the keys so far, rescaled when a larger score comes."""
    head, m = tl.program_id(0), tl.program_id(1) * BLOCK_M
    kv_head = head // (HEADS // KV_HEADS)
    i = m + tl.arange(0, BLOCK_M)
    first = _first_keys(i, row_start, row_end, tokens, window)
    live = first <= i
    stop = tl.max(tl.where(live, i + 1, 0))
    queries = load_tile(q, m, stop, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, WIDEN)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(tl.min(first), stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        keys = load_tile(k, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        scores = tl.dot(queries, keys.T, input_precision="ieee") * scale2
        visible = (j[None, :] >= first[:, None]) & (j[None, :] <= i[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top, total = new_top, total * shrink + tl.sum(p, 1)
        values = load_tile(v, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    total = tl.where(live, total, 1.0)
    store_tile(out, acc / total[:, None], m, tokens, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)
    natural = tl.where(live, (top + tl.log2(total)) * LN2, 0.0)
    tl.store(lse + i * HEADS + head, natural, mask=i < tokens)


@triton.jit
def attention_statistics_kernel(
    delta, lse2, dout, out, lse, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta and lse2 [Hq, T] of BLOCK_M queries of one head: rowsum(dout * out), and lse in units of log 2."""
    head, m = tl.program_id(0), tl.program_id(1) * BLOCK_M
    i = m + tl.arange(0, BLOCK_M)
    d = load_tile(dout, m, tokens, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    o = load_tile(out, m, tokens, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    natural = tl.load(lse + i * HEADS + head, mask=i < tokens, other=0.0)
    at = head * tokens + i
    tl.store(delta + at, tl.sum(d * o, 1), mask=i < tokens)
    tl.store(lse2 + at, natural * LOG2E, mask=i < tokens)


@triton.jit
def attention_dkdv_kernel(
    dk, dv, dout, delta, lse2, q, k, v, row_end, tokens, window, scale, scale2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_N keys of one key head. Scores are transposed, [keys, queries], as the products want them."""
    kv_head, n = tl.program_id(0), tl.program_id(1) * BLOCK_N
    j = n + tl.arange(0, BLOCK_N)
    end = tl.load(row_end + j, mask=j < tokens, other=0)
    last = tl.where(j < end, tl.minimum(end, j + window), 0)  # queries j <= i < last see key j
    stop = tl.max(last)
    keys = load_tile(k, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
    values = load_tile(v, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
    dkeys = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + g
        for m in range(n, stop, BLOCK_M):
            i = m + tl.arange(0, BLOCK_M)
            at = head * tokens + i
            queries = load_tile(q, m, stop, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, WIDEN)
            scores = tl.dot(keys, queries.T, input_precision="ieee") * scale2
            visible = (i[None, :] >= j[:, None]) & (i[None, :] < last[:, None])
            p = tl.where(visible, tl.exp2(scores - tl.load(lse2 + at, mask=i < stop, other=0.0)[None, :]), 0.0)
            d = load_tile(dout, m, stop, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, WIDEN)
            dvalues = tl.dot(p.to(d.dtype), d, dvalues, input_precision="ieee")
            dp = tl.dot(values, d.T, input_precision="ieee")
            ds = p * (dp - tl.load(delta + at, mask=i < stop, other=0.0)[None, :])
            dkeys = tl.dot(ds.to(queries.dtype), queries, dkeys, input_precision="ieee")
    store_tile(dk, dkeys * scale, n, tokens, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_tile(dv, dvalues, n, tokens, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D)


@triton.jit
def attention_dq_kernel(
    dq, dout, delta, lse2, q, k, v, row_start, row_end, tokens, window, scale, scale2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; the only program that reads this part of dout, and dq may lie on it."""
    head, m = tl.program_id(0), tl.program_id(1) * BLOCK_M
    kv_head = head // (HEADS // KV_HEADS)
    i = m + tl.arange(0, BLOCK_M)
    first = _first_keys(i, row_start, row_end, tokens, window)
    stop = tl.max(tl.where(first <= i, i + 1, 0))
    queries = load_tile(q, m, stop, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, WIDEN)
    d = load_tile(dout, m, stop, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D, WIDEN)
    at = head * tokens + i
    row_lse2 = tl.load(lse2 + at, mask=i < stop, other=0.0)
    row_delta = tl.load(delta + at, mask=i < stop, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(tl.min(first), stop, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        keys = load_tile(k, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        values = load_tile(v, n, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D, WIDEN)
        scores = tl.dot(queries, keys.T, input_precision="ieee") * scale2
        visible = (j[None, :] >= first[:, None]) & (j[None, :] <= i[:, None])
        p = tl.where(visible, tl.exp2(scores - row_lse2[:, None]), 0.0)
        dp = tl.dot(d, values.T, input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")
    store_tile(dq, acc * scale, m, tokens, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _first_keys(i, row_start, row_end, tokens, window):
    """The first key that each query i sees (the last is i itself); i + 1 where it sees none."""
    start = tl.load(row_start + i, mask=i < tokens, other=0)
    end = tl.load(row_end + i, mask=i < tokens, other=0)
    return tl.where(i < end, tl.maximum(start, i - window + 1), i + 1)


@triton.jit
def load_tile(
    x, first, stop, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x[first : first + ROWS, head] of x [T, HEADS, HEAD_DIM], zero from row `stop` on and beyond the head. WIDEN: in
    fp32, for a GPU whose products have no other operands."""
    at, inside = _tile(first, stop, head, HEADS, HEAD_DIM, ROWS, BLOCK_D)
    values = tl.load(x + at, mask=inside, other=0.0)
    return values.to(tl.float32) if WIDEN else values


@triton.jit
def store_tile(
    x, values, first, stop, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The same place in x = values, in x's dtype."""
    at, inside = _tile(first, stop, head, HEADS, HEAD_DIM, ROWS, BLOCK_D)
    tl.store(x + at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    first, stop, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    row, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    start = first * tl.full([], HEADS * HEAD_DIM, tl.int64) + head * HEAD_DIM
    at = start + (row * (HEADS * HEAD_DIM) + dim)
    return at, (row < stop - first) & (dim < HEAD_DIM)
