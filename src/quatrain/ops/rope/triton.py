"""Rotary position embedding on the GPU, in place; the backward is the same kernel with the other sign."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import contiguous


@triton.jit
def rope_kernel(x, cos, sin, sign, R, heads, D, half, ROWS: tl.constexpr, HALF: tl.constexpr):
    """ROWS of the R = T * heads rows of x; a row's angles are those of its token."""
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    inside = (r[:, None] < R) & (i[None, :] < half)
    angle = (r // heads)[:, None] * half + i[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0) * sign
    first = x + r.to(tl.int64)[:, None] * D + i[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(first + half, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


@triton.jit
def rope_tables_kernel(cos, sin, positions, inv_freq, scaling, n, half, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + at // half, mask=at < n, other=0).to(tl.float32)
    angle = (position * tl.load(inv_freq + at % half, mask=at < n, other=0.0)).to(tl.float64)
    # Reduced to [-pi/4, pi/4] in fp64, where the fp32 angle loses nothing; then Taylor series, the next terms of which
    # are below half an ulp of fp32.
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = (angle - quarter * 1.5707963267948966).to(tl.float32)
    z = r * r
    s = r * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z / 362880))))
    c = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 - z / 3628800))))
    turn = quarter.to(tl.int64) & 3
    odd, sine_sign, cosine_sign = (turn & 1) == 1, tl.where(turn >= 2, -scaling, scaling), (turn == 1) | (turn == 2)
    tl.store(sin + at, tl.where(odd, c, s) * sine_sign, mask=at < n)
    tl.store(cos + at, tl.where(odd, s, c) * tl.where(cosine_sign, -scaling, scaling), mask=at < n)


def rope_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> None:
    """cos, sin fp32 [T, d/2] = from positions int64 [T] and inv_freq fp32 [d/2], which is on the device."""
    contiguous("rope_tables", cos, sin, positions, inv_freq)
    how = config_for("elementwise", cos)
    grid = (triton.cdiv(cos.numel(), how["BLOCK"]),)
    rope_tables_kernel[grid](cos, sin, positions, inv_freq, scaling, cos.numel(), cos.shape[1], **how)


def rope_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x [T, heads, D] in place by the angles of cos, sin fp32 [T, d/2]."""
    _rope("rope_forward", x, cos, sin, 1.0)


def rope_backward(dx: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns the gradient of the rotated x into that of the unrotated one, in place. dx [T, heads, D]."""
    _rope("rope_backward", dx, cos, sin, -1.0)


def _rope(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> None:
    contiguous(op, x, cos, sin)
    (tokens, heads, dim), half = x.shape, cos.shape[1]
    how = config_for("rope", x) | {"HALF": triton.next_power_of_2(half)}
    grid = (triton.cdiv(tokens * heads, how["ROWS"]),)
    rope_kernel[grid](x, cos, sin, sign, tokens * heads, heads, dim, half, **how)


def cases(arch: str, dtype: str) -> list[Case]:
    how, tables = config("rope", arch, dtype) | {"HALF": 64}, config("elementwise", arch, dtype)
    made = [Case(rope_kernel, f"*{dtype} *fp32 *fp32 fp32 i32 i32 i32:16 i32:16", how, "D=128")]
    if dtype == "fp32":
        made.append(Case(rope_tables_kernel, "*fp32 *fp32 *i64 *fp32 fp32 i32:16 i32:16", tables))
    return made
