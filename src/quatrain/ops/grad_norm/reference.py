"""Gradient norm and clip factor in plain torch, without a host read."""

from __future__ import annotations

import torch


def sum_squares(out: torch.Tensor, grad: torch.Tensor) -> None:
    """out [] = sum of grad^2 over grad [P], accumulated in fp64."""
    out.copy_(torch.linalg.vector_norm(grad, dtype=torch.float64).square())


def clip_scale(
    scale: torch.Tensor,
    norm: torch.Tensor,
    skip: torch.Tensor,
    squares: torch.Tensor,
    loss_sum: torch.Tensor,
    tokens: torch.Tensor,
    max_norm: float | None,
) -> None:
    """scale [] fp64, norm [] fp64, skip [] bool = from squares [slots] fp64, loss_sum [] and tokens [] int64.

    `max_norm` None: no clipping, but the norm is measured and non-finite gradients are still skipped."""
    norm.copy_(squares.sum().sqrt() / tokens)
    skip.copy_(~(torch.isfinite(norm) & torch.isfinite(loss_sum) & (tokens > 0)))
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale.copy_(torch.where(skip, torch.zeros_like(factor), factor / tokens))
