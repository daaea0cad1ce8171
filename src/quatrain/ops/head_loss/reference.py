"""Output head and cross-entropy in plain torch."""

from __future__ import annotations

import torch

from quatrain.ops.rows import row_chunks


def head_loss(
    losses: torch.Tensor,
    dhidden: torch.Tensor | None,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    head: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """losses [R] = (accumulation dtype), dhidden [T, H] = (None: losses only), from hidden [T, H], rows, targets [R]
    int64 and head [V, H]. `logits` [c, V] is scratch in the accumulation dtype; its first size is the chunk."""
    if dhidden is not None:
        dhidden.zero_()
    for chunk in row_chunks(rows.shape[0], logits.shape[0]):
        at, wanted = rows[chunk], targets[chunk]
        scores = logits[: at.shape[0]]
        gathered = hidden[at]
        if gathered.dtype == scores.dtype:
            torch.mm(gathered, head.T, out=scores)
        else:
            scores.copy_(gathered @ head.T)
        wanted_score = scores.gather(1, wanted[:, None])
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        losses[chunk] = (total.log() + top - wanted_score)[:, 0]
        if dhidden is not None:
            scores.div_(total)
            scores.scatter_add_(1, wanted[:, None], scores.new_full((at.shape[0], 1), -1.0))
            dhidden[at] = scores.to(head.dtype) @ head
