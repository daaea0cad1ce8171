"""Sampling in torch, fp64."""

from __future__ import annotations

import torch


def sample_tokens(
    tokens: torch.Tensor, logits: torch.Tensor, draws: torch.Tensor, lengths: torch.Tensor, sampling: torch.Tensor
) -> None:
    """tokens int64 [B] = from logits [B, V]; 0 for a row without tokens (`lengths` int64 [B]). A row's draw is the one
    behind its last token: draws fp32 [B, S] at lengths - 1. `sampling` fp32 [3] is (temperature, top_k, top_p)."""
    temperature, top_k, top_p = sampling.tolist()
    for row, length in enumerate(lengths.tolist()):
        draw = float(draws[row, length - 1])
        tokens[row] = _sample(logits[row], draw, temperature, int(top_k), top_p) if length else 0


def _sample(logits: torch.Tensor, draw: float, temperature: float, top_k: int, top_p: float) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scores, order = (logits.double() / temperature).sort(descending=True, stable=True)
    p = scores[: top_k or None].softmax(-1)
    kept = p.cumsum(-1) - p < top_p
    ids, by_id = order[: len(p)][kept].sort()
    sums = p[kept][by_id].cumsum(-1)
    return int(ids[min(int((sums <= draw * sums[-1]).sum()), len(ids) - 1)])
