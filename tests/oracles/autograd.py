"""Independent fp64 formulations of every op, for torch autograd to differentiate. They share nothing with `src/`.

Each is written in the shortest form that is obviously the definition, not the form that is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in fp64, as an autograd leaf."""
    return tensor.detach().to(torch.float64).clone().requires_grad_()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, angles: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    """x [T, heads, D]: pairs (i, i + d/2) of its first d dimensions, as complex numbers, turned by angles [T, d/2]."""
    half = angles.shape[1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.full_like(angles, scaling), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float, window: int | None
) -> torch.Tensor:
    """q [T, Hq, D], k and v [T, Hk, D]: one row, one head at a time, with the mask written out."""
    group = q.shape[1] // k.shape[1]
    rows, start = [], 0
    for length in lengths:
        row = slice(start, start + length)
        visible = torch.tensor(
            [[j <= i and (window is None or i - j < window) for j in range(length)] for i in range(length)]
        )
        heads = []
        for h in range(q.shape[1]):
            scores = q[row, h] @ k[row, h // group].T * scale
            heads.append(scores.where(visible, torch.tensor(-torch.inf).double()).softmax(-1) @ v[row, h // group])
        rows.append(torch.stack(heads, dim=1))
        start += length
    return torch.cat(rows)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def linear_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: tuple[torch.Tensor, torch.Tensor, float] | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """W x + b + s B A (mask * x), the adapter merged by associativity where there is no mask."""
    out = x @ weight.T
    if bias is not None:
        out = out + bias
    if adapter is not None:
        a, b, scale = adapter
        out = out + (x if mask is None else x * mask) @ (scale * b @ a).T
    return out
