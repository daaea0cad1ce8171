"""Attention of one new token a row over the keys and values of its past, for generation.

Legend: B rows, S slots of the cache, Hq query heads, Hk key/value heads, D head_dim.

Row b has seen lengths[b] tokens, the new one included; its query sees the last `window` of them (None: all). Formula
and precision are those of the causal attention, whose last row of queries this is.
"""

from __future__ import annotations

import torch


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
) -> None:
    """keys, values [B, S, Hk, D] at slot lengths[b] - 1 = k, v [B, Hk, D]; then out [B, Hq, D] =, from q [B, Hq, D].

    `lengths` is int64 [B]. What stands in slots that a row does not see does not matter."""
    rows, heads, dim = q.shape
    kv_heads, wide = keys.shape[2], torch.promote_types(q.dtype, torch.float32)
    places = torch.arange(rows)
    keys[places, lengths - 1], values[places, lengths - 1] = k, v
    stop = int(lengths.max())
    start = 0 if window is None else max(0, int(lengths.min()) - window)
    slots, seen = torch.arange(start, stop, device=q.device), lengths[:, None]
    hidden = slots >= seen if window is None else (slots >= seen) | (slots < seen - window)
    past_k = keys[:, start:stop].to(wide).permute(0, 2, 3, 1)  # [B, Hk, D, S]
    past_v = values[:, start:stop].to(wide).masked_fill(hidden[:, :, None, None], 0.0).transpose(1, 2)  # [B, Hk, S, D]
    scores = (q.to(wide).view(rows, kv_heads, heads // kv_heads, dim) @ past_k).mul_(scale)
    probabilities = scores.masked_fill_(hidden[:, None, None, :], float("-inf")).softmax(-1)
    out.copy_((probabilities @ past_v).view(rows, heads, dim))
