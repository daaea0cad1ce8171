"""NF4 on the GPU: a whole tensor dequantised in one launch, nested statistics and offset included.

Bit for bit the reference: products and sums are rounded one by one (no contraction to FMA) and the result once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quatrain.errors import KernelError
from quatrain.ops.nf4 import BLOCK, Nf4Tensor
from quatrain.ops.nf4.reference import CODE
from quatrain.ops.triton_configs import Case, config, config_for


@triton.jit
def block_scale(block, mask, absmax, absmax_codes, absmax2, offset, code2):
    """fp32 scales of the blocks numbered `block`."""
    if absmax is not None:
        scale = tl.load(absmax + block, mask=mask, other=0.0)
    else:
        code = tl.load(absmax_codes + block, mask=mask, other=0).to(tl.int32)
        scale = tl.load(code2 + code) * tl.load(absmax2 + block // 256, mask=mask, other=0.0) + tl.load(offset)
    return scale


@triton.jit
def unpack(packed, table):
    """[..., c] bytes -> fp32 code values [..., c, 2], the high nibble first. The table is one cache line: its look-ups
    cost less than sixteen selects."""
    packed = packed.to(tl.int32)
    return tl.join(tl.load(table + (packed >> 4)), tl.load(table + (packed & 15)))


@triton.jit
def dequantize_kernel(
    out, codes, absmax, absmax_codes, absmax2, offset, code2, table, n, BLOCKS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    scale = block_scale(block, block * 64 < n, absmax, absmax_codes, absmax2, offset, code2)
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.reshape(unpack(tl.load(codes + byte, mask=byte * 2 < n, other=0), table), (BLOCKS, 64))
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, (values * scale[:, None]).to(out.dtype.element_ty), mask=at < n)


def dequantize(out: torch.Tensor, w: Nf4Tensor) -> None:
    """out = the values of `w`. `out` [N, K] is contiguous; an fp32 product is rounded to its dtype once.

    Raises KernelError if `out` has another shape or is not contiguous."""
    if tuple(out.shape) != w.shape or not out.is_contiguous():
        raise KernelError(f"nf4.dequantize: out: want contiguous {w.shape}, got {tuple(out.shape)} {out.stride()}")
    how = config_for("nf4_dequantize", out)
    grid = (triton.cdiv(w.numel, BLOCK * how["BLOCKS"]),)
    dequantize_kernel[grid](out, *arguments(w), w.numel, **how)


def arguments(w: Nf4Tensor) -> tuple[torch.Tensor | None, ...]:
    """What kernels that read NF4 take: codes, absmax, absmax_codes, absmax2, offset, code2, table."""
    return w.codes, w.absmax, w.absmax_codes, w.absmax2, w.offset, w.code2, code_table(w.codes.device)


@functools.cache
def code_table(device: torch.device) -> torch.Tensor:
    """The 16 codes, fp32, on a device. Made once, before anything is captured."""
    return CODE.to(device)


NESTED = "*u8 - *u8 *fp32 *fp32 *fp32 *fp32"
PLAIN = "*u8 *fp32 - - - - *fp32"
"""`arguments` as words of `Case.types`."""


def cases(arch: str, dtype: str) -> list[Case]:
    how: dict[str, Any] = config("nf4_dequantize", arch, dtype)
    variants = {"nested": NESTED, "plain": PLAIN}
    return [Case(dequantize_kernel, f"*{dtype} {words} i32:16", how, name) for name, words in variants.items()]
