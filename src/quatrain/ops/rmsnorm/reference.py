"""RMSNorm in plain torch."""

from __future__ import annotations

import torch

from quatrain.ops.rows import row_chunks


def rms_norm_forward(out: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out [R, D] =, rstd [R] = (accumulation dtype), from x [R, D] and weight [D]. `out` may be `x`."""
    for rows in row_chunks(x.shape[0]):
        wide = x[rows].to(weight.dtype)
        rstd[rows] = torch.rsqrt(wide.square().mean(-1) + eps)
        out[rows] = wide * rstd[rows, None] * weight


def rms_norm_backward(
    dx: torch.Tensor,
    dweight: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """dx [R, D] = residual + the norm's gradient, dweight [D] += (or None when frozen). `dx` may be `dout` or
    `residual`."""
    for rows in row_chunks(x.shape[0]):
        wide, wide_dout, scale = x[rows].to(weight.dtype), dout[rows].to(weight.dtype), rstd[rows, None]
        if dweight is not None:
            dweight += (wide_dout * wide * scale).sum(0)
        g = wide_dout * weight
        grad = scale * (g - wide * scale.square() * (g * wide).mean(-1, keepdim=True))
        if residual is not None:
            grad += residual[rows]
        dx[rows] = grad
