"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch

from quatrain.ops.rows import row_chunks


def rope_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> None:
    """cos, sin [T, d/2] = from positions [T] (integer) and inv_freq [d/2] fp32."""
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    cos.copy_(angles.cos() * scaling)
    sin.copy_(angles.sin() * scaling)


def rope_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x [T, heads, D] in place by the angles of cos, sin [T, d/2]."""
    _rotate(x, cos, sin, 1.0)


def rope_backward(dx: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns the gradient of the rotated x into that of the unrotated one, in place. dx [T, heads, D]."""
    _rotate(dx, cos, sin, -1.0)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> None:
    half = cos.shape[1]
    for rows in row_chunks(x.shape[0]):
        c, s = cos[rows, None, :], sin[rows, None, :] * sign
        a, b = x[rows, :, :half].to(c.dtype), x[rows, :, half : 2 * half].to(c.dtype)
        rotated = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
        x[rows, :, : 2 * half] = rotated
