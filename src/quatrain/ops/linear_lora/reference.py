"""Linear layers with NF4 weight, bias and LoRA in plain torch: dequantise one weight into scratch, then multiply."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.reference import dropout_mask
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4.reference import dequantize
from quatrain.ops.rows import row_chunks


def linear_lora_forward(
    outs: Sequence[torch.Tensor],
    us: Sequence[torch.Tensor | None],
    x: torch.Tensor,
    linears: Sequence[Linear],
    dropout: Dropout | None,
    scratch: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """outs[i] [T, N_i] = and us[i] [T, r] = (None without an adapter), from x [T, K]. `scratch` is flat and holds the
    largest weight in x's dtype. `residual` [T, N_0], for a group of one, is added to the output."""
    for out, u, linear in zip(outs, us, linears, strict=True):
        weight = dense_weight(linear, scratch, x.dtype)
        if linear.bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(linear.bias, x, weight.T, out=out)
        if linear.lora is not None:
            assert u is not None
            _lora_down(u, x, linear.lora, dropout)
            out.addmm_(u, linear.lora.B.T, alpha=linear.lora.scale)
    if residual is not None:
        outs[0].add_(residual)


def lora_down_forward(
    us: Sequence[torch.Tensor | None], x: torch.Tensor, linears: Sequence[Linear], dropout: Dropout | None
) -> None:
    """us[i] [T, r] = (None without an adapter), from x [T, K]: what a recompute needs of a linear whose output it
    does not."""
    for u, linear in zip(us, linears, strict=True):
        if linear.lora is not None:
            assert u is not None
            _lora_down(u, x, linear.lora, dropout)


def linear_lora_backward(
    dx: torch.Tensor,
    douts: Sequence[torch.Tensor],
    x: torch.Tensor,
    us: Sequence[torch.Tensor | None],
    linears: Sequence[Linear],
    dropout: Dropout | None,
    scratch: torch.Tensor,
) -> None:
    """dx [T, K] = and every adapter's dA, dB +=, from douts[i] [T, N_i] and what the forward read and wrote."""
    for i, (dout, u, linear) in enumerate(zip(douts, us, linears, strict=True)):
        weight = dense_weight(linear, scratch, x.dtype)
        if i == 0:
            torch.mm(dout, weight, out=dx)
        else:
            dx.addmm_(dout, weight)
        if linear.lora is not None:
            assert u is not None
            _lora_backward(dx, dout, x, u, linear.lora, dropout)


def dense_weight(linear: Linear, scratch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in the compute dtype: itself, or dequantised into the head of flat `scratch` (bytes, or in the
    compute dtype)."""
    weight = linear.weight
    if not isinstance(weight, Nf4Tensor):
        return weight
    dense = scratch.view(dtype)[: weight.numel].view(weight.shape)
    dequantize(dense, weight)
    return dense


def _lora_down(u: torch.Tensor, x: torch.Tensor, lora: Lora, dropout: Dropout | None) -> None:
    """u [T, r] = (mask * x) A^T."""
    if dropout is None:
        torch.mm(x, lora.A.T, out=u)
        return
    for rows in row_chunks(x.shape[0]):
        mask = dropout_mask(dropout.keys[rows], lora.index, x.shape[1], dropout.p, x.dtype)
        torch.mm(x[rows] * mask, lora.A.T, out=u[rows])


def _lora_backward(
    dx: torch.Tensor, dout: torch.Tensor, x: torch.Tensor, u: torch.Tensor, lora: Lora, dropout: Dropout | None
) -> None:
    """dx +=, lora.dA +=, lora.dB +=. Products are accumulated in the gradients' dtype, whatever that of x."""
    wide = lora.dA.dtype
    A, B = lora.A.to(wide), lora.B.to(wide)
    for rows in row_chunks(x.shape[0]):
        d, inputs = dout[rows].to(wide), x[rows].to(wide)
        du = (d @ B).mul_(lora.scale)
        lora.dB.addmm_(d.T, u[rows].to(wide), alpha=lora.scale)
        if dropout is None:
            lora.dA.addmm_(du.T, inputs)
            dx[rows] += (du @ A).to(dx.dtype)
        else:
            mask = dropout_mask(dropout.keys[rows], lora.index, x.shape[1], dropout.p, wide)
            lora.dA.addmm_(du.T, inputs * mask)
            dx[rows] += (du @ A).mul_(mask).to(dx.dtype)
