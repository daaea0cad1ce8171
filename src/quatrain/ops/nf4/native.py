"""NF4 by the native library: quantising a whole tensor and checking it, bit for bit the reference's.

There is no kernel for fp16: such a source is widened piece by piece, which is exact and stays in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from quatrain.ops import native
from quatrain.ops.library import Context
from quatrain.ops.nf4 import BLOCK, NESTED_BLOCK, Nf4Tensor
from quatrain.ops.nf4.reference import (
    check_weight,
    error_ratio,
    nested_bins,
    nested_code_book,
    nested_offset,
    not_finite,
)

_PIECE = 16 * NESTED_BLOCK * BLOCK  # fp16 values at a time


def quantize(context: Context, weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
    """`weight` [N, K] (fp32, bf16 or fp16, any strides) in NF4, with nested statistics if `double_quant`.

    Raises KernelError as the reference does.
    """
    check_weight(weight)
    n = weight.numel()
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-n // BLOCK), dtype=torch.float32)
    for start, values in _pieces(weight):
        if not native.quantize(context, codes[start // 2 :], absmax[start // BLOCK :], values):
            raise not_finite()
    shape = (weight.shape[0], weight.shape[1])
    if not double_quant:
        return Nf4Tensor(shape, codes, absmax=absmax)
    offset = nested_offset(absmax)
    absmax_codes = torch.empty(absmax.numel(), dtype=torch.uint8)
    absmax2 = torch.empty(-(-absmax.numel() // NESTED_BLOCK), dtype=torch.float32)
    context.call(
        "qt_nf4_nested", native.pointer(absmax_codes), native.pointer(absmax2), native.pointer(absmax), float(offset),
        native.pointer(nested_bins()), absmax.numel(),
    )  # fmt: skip
    return Nf4Tensor(shape, codes, absmax_codes=absmax_codes, absmax2=absmax2, offset=offset, code2=nested_code_book())


def relative_error(context: Context, w: Nf4Tensor, weight: torch.Tensor) -> float:
    """||dequantised w - weight|| / ||weight||, 0 where both are zero and infinite where only `weight` is."""
    error = norm = 0.0
    for start, values in _pieces(weight):
        sums = (ctypes.c_double * 2)()
        native.squared_error(context, sums, _part(w, start, values.numel()), values)
        error, norm = error + sums[0], norm + sums[1]
    return error_ratio(error, norm)


def _pieces(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(start, values [1, n]) over all of `weight`, in a type that there are kernels for. A widened piece lasts
    until the next one is asked for."""
    values = weight.detach().contiguous().view(1, -1)
    if values.dtype in native.DTYPES:
        yield 0, values
        return
    scratch = torch.empty(min(_PIECE, values.numel()), dtype=torch.float32)
    for start in range(0, values.numel(), _PIECE):
        piece = values[:, start : start + _PIECE]
        yield start, scratch[: piece.numel()].view(1, -1).copy_(piece)


def _part(w: Nf4Tensor, start: int, count: int) -> Nf4Tensor:
    """Elements start .. start + count of `w` as a tensor of one row; `start` is the first of a nested group."""
    block, group = start // BLOCK, start // (BLOCK * NESTED_BLOCK)
    return Nf4Tensor(
        (1, count),
        w.codes[start // 2 :],
        absmax=None if w.absmax is None else w.absmax[block:],
        absmax_codes=None if w.absmax_codes is None else w.absmax_codes[block:],
        absmax2=None if w.absmax2 is None else w.absmax2[group:],
        offset=w.offset,
        code2=w.code2,
    )
