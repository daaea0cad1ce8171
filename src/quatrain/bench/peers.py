"""Torch's own ops at the work of one kernel: what a user of plain torch would write, in the compute dtype.

Linears multiply by a weight that is already dense, so torch is spared the dequantising. Each function returns the
kernel's outputs in their order (or the first of them): the gate compares them before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quatrain.ops.linear_lora import Linear, Lora

Tensors = tuple[torch.Tensor, ...]
Peer = Callable[[], Tensors]

_HEAD_ROWS = 1024
"""Supervised rows of torch's head at a time: all at once would need gigabytes for a large vocabulary."""


def backward(forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> Peer:
    """The gradients of `forward` by autograd; its graph is made here, outside of what is timed."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def linear_forward(
    x: torch.Tensor, linears: Sequence[Linear], dense: Sequence[torch.Tensor], residual: torch.Tensor | None
) -> Tensors:
    """The outputs, then the adapters' down projections."""
    outs: list[torch.Tensor] = []
    us: list[torch.Tensor] = []
    for linear, weight in zip(linears, dense, strict=True):
        lora = _lora(linear)
        u = x @ lora.A.T
        outs.append(F.linear(x, weight, linear.bias).addmm_(u, lora.B.T, alpha=lora.scale))
        us.append(u)
    if residual is not None:
        outs[0].add_(residual)
    return (*outs, *us)


def linear_backward(
    douts: Sequence[torch.Tensor],
    x: torch.Tensor,
    us: Sequence[torch.Tensor],
    linears: Sequence[Linear],
    dense: Sequence[torch.Tensor],
) -> Tensors:
    """dx, then dA and dB of each adapter."""
    dx, grads = torch.zeros(0), []
    for i, (dout, u, linear, weight) in enumerate(zip(douts, us, linears, dense, strict=True)):
        lora = _lora(linear)
        du = (dout @ lora.B).mul_(lora.scale)
        dx = dout @ weight if i == 0 else dx.addmm_(dout, weight)
        dx.addmm_(du, lora.A)
        grads += [du.T @ x, (dout.T @ u).mul_(lora.scale)]
    return (dx, *grads)


def lora_down(x: torch.Tensor, linear: Linear) -> Tensors:
    return (x @ _lora(linear).A.T,)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int) -> torch.Tensor:
    """q [T, Hq, D], k and v [T, Hk, D], rows of `row` tokens -> [T, Hq, D]."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        by_row = x.view(-1, row, *x.shape[1:]).transpose(1, 2)
        group = q.shape[1] // x.shape[1]
        return by_row.repeat_interleave(group, dim=1) if group > 1 else by_row

    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    return out.transpose(1, 2).flatten(0, 1)


def cached_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token's queries q [1, Hq, D] over keys and values [1, S, Hk, D] -> [1, Hq, D]."""
    k, v = (x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[2], dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(q[:, :, None], k, v)[:, :, 0]


def head_loss(hidden: torch.Tensor, targets: torch.Tensor, head: torch.Tensor) -> Tensors:
    """Losses and the gradient of their sum, every row supervised."""
    losses: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for some, wanted in zip(torch.split(hidden, _HEAD_ROWS), torch.split(targets, _HEAD_ROWS), strict=True):
        leaf = some.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(leaf, head).float(), wanted, reduction="none")
        grads += torch.autograd.grad(loss.sum(), leaf)
        losses.append(loss.detach())
    return torch.cat(losses), torch.cat(grads)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with the first d dimensions of each head rotated; cos and sin [T, 1, d] hold each half twice."""
    d = cos.shape[-1]
    turned, rest = x[..., :d], x[..., d:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def adamw(
    param: torch.Tensor, grad: torch.Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> Peer:
    """One update of a copy of `param` at each call."""
    own = param.clone().requires_grad_()
    own.grad = grad
    optimizer = torch.optim.AdamW([own], lr, betas, eps, decay, fused=True)

    def step() -> Tensors:
        optimizer.step()
        return (own.detach(),)

    return step


def _lora(linear: Linear) -> Lora:
    assert linear.lora is not None
    return linear.lora
