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
    """q [T, Hq, D], k and v [T, Hk, D]: one query, one head at a time over the keys that it may see."""
    group = q.shape[1] // k.shape[1]
    rows, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            heads = []
            for h in range(q.shape[1]):
                keys, values = k[first : i + 1, h // group], v[first : i + 1, h // group]
                heads.append((keys @ q[i, h] * scale).softmax(0) @ values)
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


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
