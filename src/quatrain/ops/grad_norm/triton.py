"""Gradient norm and clip factor on the GPU, in fp64 and without a host read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import SQUARES_PARTS


@triton.jit
def sum_squares_kernel(partials, grad, n, blocks, BLOCK: tl.constexpr):
    """partials [programs] fp64 = the sum of squares over `blocks` blocks each."""
    first = tl.program_id(0).to(tl.int64) * blocks * BLOCK
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(blocks):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float64)
        total += g * g
    tl.store(partials + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def total_kernel(out, partials, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out, tl.sum(tl.load(partials + at, mask=at < n, other=0.0), axis=0))


@triton.jit
def clip_scale_kernel(
    scale, norm, skip, squares, loss_sum, tokens, slots, max_norm: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float64)
    for first in range(0, slots, SIZE):
        total += tl.load(squares + first + at, mask=first + at < slots, other=0.0)
    count = tl.load(tokens).to(tl.float64)
    mean = tl.sqrt(tl.sum(total, axis=0)) / count
    loss = tl.load(loss_sum)
    bad = (mean - mean != 0) | (loss - loss != 0)  # infinity or NaN, such as a norm divided by no tokens
    factor = 1 / count
    if max_norm is not None:
        factor = tl.where(mean + 1e-6 > max_norm, max_norm / (mean + 1e-6) / count, factor)
    tl.store(norm, mean)
    tl.store(skip, bad)
    tl.store(scale, tl.where(bad, 0.0, factor))


def sum_squares(out: torch.Tensor, grad: torch.Tensor, scratch: torch.Tensor) -> None:
    """out fp64 [] = sum of grad^2 over grad fp32 [P], accumulated in fp64. `scratch` holds
    `triton_sizes.squares_partials`."""
    contiguous("sum_squares", out, grad)
    how = config_for("sum_squares", grad)
    blocks = triton.cdiv(grad.numel(), how["BLOCK"])
    each = triton.cdiv(blocks, SQUARES_PARTS)
    programs = triton.cdiv(blocks, each)
    (partials,) = carve("sum_squares", scratch, ((programs,), torch.float64))
    sum_squares_kernel[(programs,)](partials, grad, grad.numel(), each, **how)
    total_kernel[(1,)](out, partials, programs, SIZE=SQUARES_PARTS, num_warps=4, enable_fp_fusion=True)


def clip_scale(
    scale: torch.Tensor,
    norm: torch.Tensor,
    skip: torch.Tensor,
    squares: torch.Tensor,
    loss_sum: torch.Tensor,
    tokens: torch.Tensor,
    max_norm: float | None,
) -> None:
    """scale [] fp64, norm [] fp64, skip [] bool = from squares [slots] fp64, loss_sum [] fp64 and tokens [] int64."""
    contiguous("clip_scale", scale, norm, skip, squares, loss_sum, tokens)
    clip_scale_kernel[(1,)](
        scale, norm, skip, squares, loss_sum, tokens, squares.numel(), max_norm, SIZE=128, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def cases(arch: str, dtype: str) -> list[Case]:
    if dtype != "fp32":
        return []
    one = {"num_warps": 4, "enable_fp_fusion": True}
    clip = "*fp64 *fp64 *i1 *fp64 *fp64 *i64 i32"
    return [
        Case(sum_squares_kernel, "*fp64 *fp32 i32:16 i32", config("sum_squares", arch, dtype)),
        Case(total_kernel, "*fp64 *fp64 i32", one | {"SIZE": SQUARES_PARTS}),
        Case(clip_scale_kernel, clip, one | {"max_norm": 1.0, "SIZE": 128}, "clipped"),
        Case(clip_scale_kernel, clip, one | {"max_norm": None, "SIZE": 128}, "unclipped"),
    ]
