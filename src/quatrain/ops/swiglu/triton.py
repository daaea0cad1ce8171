"""SwiGLU's gate on the GPU, each value read before its place is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import contiguous


@triton.jit
def swiglu_forward_kernel(out, gate, up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def swiglu_backward_kernel(dgate, dup, dout, gate, up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    d = tl.load(dout + at, mask=at < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + at, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), mask=at < n)
    tl.store(dup + at, (d * g * s).to(dup.dtype.element_ty), mask=at < n)


def swiglu_forward(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """out [T, I] = silu(gate) * up."""
    contiguous("swiglu_forward", out, gate, up)
    how = config_for("elementwise", gate)
    swiglu_forward_kernel[(triton.cdiv(gate.numel(), how["BLOCK"]),)](out, gate, up, gate.numel(), **how)


def swiglu_backward(
    dgate: torch.Tensor, dup: torch.Tensor, dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> None:
    """dgate, dup [T, I] = from dout, gate, up [T, I]; in place allowed."""
    contiguous("swiglu_backward", dgate, dup, dout, gate, up)
    how = config_for("elementwise", gate)
    grid = (triton.cdiv(gate.numel(), how["BLOCK"]),)
    swiglu_backward_kernel[grid](dgate, dup, dout, gate, up, gate.numel(), **how)


def cases(arch: str, dtype: str) -> list[Case]:
    how, d = config("elementwise", arch, dtype), f"*{dtype}"
    return [
        Case(swiglu_forward_kernel, f"{d} {d} {d} i32:16", how),
        Case(swiglu_backward_kernel, f"{d} {d} {d} {d} {d} i32:16", how),
    ]
