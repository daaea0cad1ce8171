"""Causal grouped-query attention in plain torch: a loop over rows, and within a row over blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

SCORE_BYTES = 16 << 20
"""A block of queries is cut so that its score matrix stays near this size."""


def attention_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    scale: float,
    window: int | None,
) -> None:
    """out [T, Hq, D] =, lse [T, Hq] = (accumulation dtype), from q [T, Hq, D], k, v [T, Hk, D]."""
    for start, end in pairwise(cu_seqlens):
        keys, values = _heads_first(k[start:end], lse.dtype), _heads_first(v[start:end], lse.dtype)
        for a, b, lo in query_blocks(end - start, q.shape[1], window):
            block = slice(start + a, start + b)
            scores = _scores(_grouped(q[block], k.shape[1], lse.dtype), keys[:, lo:b], scale, a, b, lo, window)
            block_lse = torch.logsumexp(scores, dim=-1)
            probabilities = torch.softmax(scores, dim=-1)  # exp(scores - lse) would lose digits to a large lse
            lse[block] = _ungrouped(block_lse[..., None], b - a)[..., 0]
            out[block] = _ungrouped(probabilities @ values[:, lo:b], b - a)


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
    cu_seqlens: Sequence[int],
    scale: float,
    window: int | None,
) -> None:
    """dq [T, Hq, D] =, dk, dv [T, Hk, D] = from dout [T, Hq, D] and what the forward read and wrote. `dq` may be
    `dout`."""
    num_kv_heads, wide = k.shape[1], lse.dtype
    for start, end in pairwise(cu_seqlens):
        keys, values = _heads_first(k[start:end], wide), _heads_first(v[start:end], wide)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for a, b, lo in query_blocks(end - start, q.shape[1], window):
            block = slice(start + a, start + b)
            queries, d = _grouped(q[block], num_kv_heads, wide), _grouped(dout[block], num_kv_heads, wide)
            delta = (d * _grouped(out[block], num_kv_heads, wide)).sum(-1, keepdim=True)
            scores = _scores(queries, keys[:, lo:b], scale, a, b, lo, window)
            p = torch.exp(scores.sub_(_grouped(lse[block][..., None], num_kv_heads, wide)))
            dvalues[:, lo:b] += p.mT @ d
            ds = p.mul_((d @ values[:, lo:b].mT).sub_(delta)).mul_(scale)
            dq[block] = _ungrouped(ds @ keys[:, lo:b], b - a)
            dkeys[:, lo:b] += ds.mT @ queries
        dk[start:end] = dkeys.transpose(0, 1)
        dv[start:end] = dvalues.transpose(0, 1)


def query_blocks(length: int, num_heads: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries, first key they can see) for each block of a row. A pure function of the row's
    length, so that a row's numbers do not depend on what it is packed with."""
    rows = max(16, min(256, SCORE_BYTES // (4 * num_heads * max(length, 1))))
    for a in range(0, length, rows):
        yield a, min(a + rows, length), 0 if window is None else max(0, a - window + 1)


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[S, Hk, D] -> contiguous [Hk, S, D]."""
    return x.to(dtype).transpose(0, 1).contiguous()


def _grouped(x: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[c, Hq, D] -> [Hk, G * c, D]: the queries that share a key head, one head after the other."""
    c, heads, d = x.shape
    return x.to(dtype).transpose(0, 1).reshape(num_kv_heads, heads // num_kv_heads * c, d)


def _ungrouped(x: torch.Tensor, c: int) -> torch.Tensor:
    """[Hk, G * c, D] -> [c, Hq, D]."""
    return x.reshape(-1, c, x.shape[-1]).transpose(0, 1)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, a: int, b: int, lo: int, window: int | None
) -> torch.Tensor:
    """Masked scores [Hk, G * (b - a), b - lo] of queries a..b against keys lo..b of one row."""
    scores = (queries @ keys.mT).mul_(scale)
    i = torch.arange(a, b, device=queries.device)[:, None]
    j = torch.arange(lo, b, device=queries.device)[None, :]
    hidden = j > i if window is None else (j > i) | (j <= i - window)
    return scores.view(-1, b - a, b - lo).masked_fill_(hidden, float("-inf")).view_as(scores)
