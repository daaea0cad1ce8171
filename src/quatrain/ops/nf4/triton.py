"""NF4 on the GPU: a whole tensor dequantised in one launch, nested statistics and offset included; or quantised.

Bit for bit the reference: products and sums are rounded one by one (no contraction to FMA) and the result once. The
nested statistics of a quantised tensor, a 64th of its values, are the reference's own, made on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from quatrain.errors import KernelError
from quatrain.ops.nf4 import BLOCK, Nf4Tensor
from quatrain.ops.nf4.reference import (
    CODE,
    MIDPOINTS,
    check_weight,
    error_ratio,
    nested_code_book,
    nested_offset,
    not_finite,
    quantize_statistics,
)
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
def decode(packed, table, ROWS: tl.constexpr):
    """[ROWS, 32] bytes -> fp32 code values [ROWS, 64], the high nibble first; `table` holds the 16 of them. Gathers go
    through shared memory, where 16 values have 16 banks; look-ups in global memory would be pipelined like loads."""
    packed = packed.to(tl.int32)
    index = tl.reshape(tl.join(packed >> 4, packed & 15), (ROWS * 64,))
    return tl.reshape(tl.gather(table, index, 0), (ROWS, 64))


@triton.jit
def dequantize_kernel(
    out, codes, absmax, absmax_codes, absmax2, offset, code2, table, n, n_bytes, BLOCKS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    scale = block_scale(block, block * 64 < n, absmax, absmax_codes, absmax2, offset, code2)
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    packed = tl.load(codes + byte, mask=byte < n_bytes, other=0)  # half of n would hide that loads may be wide
    values = decode(packed, tl.load(table + tl.arange(0, 16)), BLOCKS)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, (values * scale[:, None]).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def quantize_kernel(codes, absmax, values, midpoints, n, BLOCKS: tl.constexpr):
    """absmax is infinite for a block with a value that is not finite."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(values + at, mask=at < n, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    divisor = tl.maximum(largest, 1e-38)
    partial = (block * 64 + 64 > n) & (block * 64 < n)  # its absmax is stored clamped, and divided by
    scaled = tl.where(
        partial[:, None], tl.div_rn(x, divisor[:, None]), x * tl.div_rn(tl.full((), 1.0, tl.float32), divisor)[:, None]
    )
    scaled = tl.minimum(tl.maximum(scaled, -1.0), 1.0)
    index = tl.zeros((BLOCKS, 64), tl.int32)
    for i in range(15):
        index += (scaled > tl.load(midpoints + i)).to(tl.int32)
    high, low = tl.split(tl.reshape(index, (BLOCKS, 32, 2)))
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes + byte, ((high << 4) | low).to(tl.uint8), mask=byte * 2 < n)
    tl.store(absmax + block, tl.where(partial, divisor, largest), mask=block * 64 < n)


def dequantize(out: torch.Tensor, w: Nf4Tensor) -> None:
    """out = the values of `w`. `out` [N, K] is contiguous; an fp32 product is rounded to its dtype once.

    Raises KernelError if `out` has another shape or is not contiguous."""
    if tuple(out.shape) != w.shape or not out.is_contiguous():
        raise KernelError(f"nf4.dequantize: out: want contiguous {w.shape}, got {tuple(out.shape)} {out.stride()}")
    how = config_for("nf4_dequantize", out)
    grid = (triton.cdiv(w.numel, BLOCK * how["BLOCKS"]),)
    dequantize_kernel[grid](out, *arguments(w), w.numel, w.codes.numel(), **how)


def quantize(weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
    """`weight` [N, K] (fp32, bf16 or fp16) in NF4 on its own device, with nested statistics if `double_quant`. The host
    waits for it. Raises KernelError as the reference does."""
    check_weight(weight)
    values, n = weight.detach().contiguous(), weight.numel()
    codes = torch.empty(-(-n // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(-(-n // BLOCK), dtype=torch.float32, device=weight.device)
    how = config_for("nf4_quantize", values)
    grid = (triton.cdiv(n, BLOCK * how["BLOCKS"]),)
    quantize_kernel[grid](codes, scales, values, torch.tensor(MIDPOINTS, device=weight.device), n, **how)
    on_host = scales.cpu()
    if not torch.isfinite(on_host).all():
        raise not_finite()
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    if not double_quant:
        return Nf4Tensor(shape, codes, absmax=scales)
    offset = nested_offset(on_host)
    absmax_codes, absmax2 = (made.to(device) for made in quantize_statistics(on_host - offset))
    return Nf4Tensor(shape, codes, None, absmax_codes, absmax2, offset.to(device), code_book(device))


def relative_error(w: Nf4Tensor, weight: torch.Tensor) -> float:
    """||dequantised w - weight|| / ||weight||, 0 where both are zero and infinite where only `weight` is. Takes two
    fp32 copies of the weight while it runs; the host waits for it."""
    values, source = torch.empty(w.shape, device=weight.device), weight.float()
    dequantize(values, w)
    error, norm = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (values.sub_(source), source))
    return error_ratio(error**2, norm**2)


def arguments(w: Nf4Tensor) -> tuple[torch.Tensor | None, ...]:
    """What kernels that read NF4 take: codes, absmax, absmax_codes, absmax2, offset, code2, table."""
    return w.codes, w.absmax, w.absmax_codes, w.absmax2, w.offset, w.code2, code_table(w.codes.device)


@functools.cache
def code_table(device: torch.device) -> torch.Tensor:
    """The 16 codes, fp32, on a device. Made once, before anything is captured."""
    return CODE.to(device)


@functools.cache
def code_book(device: torch.device) -> torch.Tensor:
    """The 256 codes of the nested statistics, fp32, on a device: one tensor for all weights."""
    return nested_code_book().to(device)


NESTED = "*u8 - *u8 *fp32 *fp32 *fp32 *fp32"
PLAIN = "*u8 *fp32 - - - - *fp32"
"""`arguments` as words of `Case.types`."""


def cases(arch: str, dtype: str) -> list[Case]:
    how: dict[str, Any] = config("nf4_dequantize", arch, dtype)
    variants = {"nested": NESTED, "plain": PLAIN}
    made = [Case(dequantize_kernel, f"*{dtype} {words} i32:16 i32:16", how, name) for name, words in variants.items()]
    return [*made, Case(quantize_kernel, f"*u8 *fp32 *{dtype} *fp32 i32:16", config("nf4_quantize", arch, dtype))]
