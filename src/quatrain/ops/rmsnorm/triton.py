"""RMSNorm on the GPU: a tile of rows a program, each row in one piece; dweight by partial sums in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, Config, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import NORM_PARTS, Part
from quatrain.ops.triton_sum import add_partials

TILE = 4096
"""Values of a tile; a row that is longer has a tile of its own."""


@triton.jit
def rms_norm_forward_kernel(out, rstd, x, weight, eps, R, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (r[:, None] < R) & (d[None, :] < D)
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(wide * wide, axis=1) / D + eps)
    tl.store(rstd + r, scale, mask=r < R)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(out + at, (wide * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dx, partials, dout, x, rstd, weight, residual, R, D, tiles, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """`tiles` tiles of rows one after the other; partials [programs, D] = this program's part of dweight (or None)."""
    d = tl.arange(0, BLOCK_D)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    for tile in range(tiles):
        r = (tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < R) & (d[None, :] < D)
        at = r.to(tl.int64)[:, None] * D + d[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + r, mask=r < R, other=0.0)[:, None]
        grad = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        if partials is not None:
            dweight += tl.sum(grad * wide * scale, axis=0)
        g = grad * w[None, :]
        grad = scale * (g - wide * scale * scale * (tl.sum(g * wide, axis=1) / D)[:, None])
        if residual is not None:
            grad += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)
    if partials is not None:
        tl.store(partials + tl.program_id(0).to(tl.int64) * D + d, dweight, mask=d < D)


def rms_norm_forward(out: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out [R, D] =, rstd fp32 [R] =, from x [R, D] and weight fp32 [D]. `out` may be `x`."""
    contiguous("rms_norm_forward", out, rstd, x, weight)
    r, d = x.shape
    how = config_for("rms_norm", x) | _tile(d)
    rms_norm_forward_kernel[(triton.cdiv(r, how["ROWS"]),)](out, rstd, x, weight, eps, r, d, **how)


def rms_norm_backward(
    dx: torch.Tensor,
    dweight: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """dx [R, D] = residual + the norm's gradient, dweight fp32 [D] += (or None when frozen). `dx` may be `dout` or
    `residual`. `scratch` holds `triton_sizes.norm_partials`."""
    contiguous("rms_norm_backward", dx, dweight, dout, x, rstd, weight, residual)
    r, d = x.shape
    how = config_for("rms_norm", x) | _tile(d)
    tiles = triton.cdiv(r, how["ROWS"])
    each = triton.cdiv(tiles, NORM_PARTS) if dweight is not None else 1
    grid = (triton.cdiv(tiles, each),)
    part: Part = ((grid[0], d), torch.float32)
    partials = None if dweight is None else carve("rms_norm_backward", scratch, part)[0]
    rms_norm_backward_kernel[grid](dx, partials, dout, x, rstd, weight, residual, r, d, each, **how)
    if dweight is not None and partials is not None:
        add_partials(partials, dweight)


def _tile(features: int) -> Config:
    """A tile of whole rows, and warps enough that a thread holds at most 32 of its values."""
    block = int(triton.next_power_of_2(features))
    rows = max(1, min(16, TILE // block))
    return {"ROWS": rows, "BLOCK_D": block, "num_warps": max(4, min(16, rows * block // 1024))}


def cases(arch: str, dtype: str) -> list[Case]:
    made = []
    for d in (64, 576, 4096, 8192):
        how = config("rms_norm", arch, dtype) | _tile(d)
        t = f"*{dtype}"
        made.append(Case(rms_norm_forward_kernel, f"{t} *fp32 {t} *fp32 fp32 i32 i32:16", how, f"D={d}"))
        for name, partials, residual in (("frozen", "-", t), ("trained", "*fp32", "-")):
            words = f"{t} {partials} {t} {t} *fp32 *fp32 {residual} i32 i32:16 i32"
            made.append(Case(rms_norm_backward_kernel, words, how, f"D={d} {name}"))
    return made
