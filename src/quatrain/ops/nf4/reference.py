"""NF4 in torch: quantise, nested statistics, dequantise. Bit for bit bitsandbytes 0.50's on its CPU backend.

What "bit for bit" pins down, beyond the formula in `__init__`:

- The arithmetic is fp32, whatever the source: a bf16 or fp16 weight is widened first, which is exact.
- A full block is multiplied by the reciprocal 1 / absmax; the last, partial block is divided by its absmax. An absmax
  below 1e-38 counts as 1e-38 in that; the partial block also stores it so.
- A value on the midpoint of two codes takes the lower one. A missing last element (n odd) is the code of 0.
- `offset` is `absmax.mean()` as torch computes it. The 8-bit code of v = (absmax - offset) / absmax2 comes from a
  table of 65536 bins over [-1, 1], so it can be the second nearest code close to a midpoint.

Both directions work in chunks of values that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from quatrain.errors import KernelError
from quatrain.ops.nf4 import BLOCK, NESTED_BLOCK, Nf4Tensor

# The 16 codes of NF4 (QLoRA, appendix E). 7 is zero.
CODE = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=torch.float32,
)
_ZERO_CODE = 7
MIDPOINTS = ((CODE[:-1] + CODE[1:]) / 2).tolist()
_TINY = 1e-38
_CHUNK = 16384  # values at a time: in the cache, and too few for torch to split each small step over threads
_BINS = 65536
NOT_FINITE_HINT = "the model is damaged or was saved after it diverged"


def quantize(weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
    """`weight` [N, K] (fp32, bf16 or fp16, any strides) in NF4, with nested statistics if `double_quant`.

    Raises KernelError for another rank or dtype, an empty tensor, or a value that is not finite.
    """
    check_weight(weight)
    values = weight.detach().reshape(-1)
    absmax = _block_absmax(values)
    if not torch.isfinite(absmax).all():
        raise not_finite()
    shape, codes = (weight.shape[0], weight.shape[1]), _codes(values, absmax)
    if not double_quant:
        return Nf4Tensor(shape, codes, absmax=absmax)
    offset = nested_offset(absmax)
    absmax_codes, absmax2 = quantize_statistics(absmax - offset)
    return Nf4Tensor(shape, codes, absmax_codes=absmax_codes, absmax2=absmax2, offset=offset, code2=nested_code_book())


def check_weight(weight: torch.Tensor) -> None:
    """Raises KernelError unless `weight` is a matrix with elements in fp32, bf16 or fp16."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise KernelError(f"nf4.quantize: weight: want a matrix with elements, got shape {tuple(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelError(f"nf4.quantize: weight: want float32, bfloat16 or float16, got {weight.dtype}")


def not_finite() -> KernelError:
    return KernelError("nf4.quantize: weight: want finite values, got NaN or infinity", hint=NOT_FINITE_HINT)


def nested_offset(absmax: torch.Tensor) -> torch.Tensor:
    """The mean of the block scales. Raises KernelError where it overflows.

    The mean of many depends on how many threads torch uses; one thread gives the same bits everywhere."""
    offset = absmax.mean()
    if not torch.isfinite(offset):
        raise KernelError("nf4.quantize: weight: values are too large for nested statistics (the mean overflows)")
    return offset


def dequantize(out: torch.Tensor, w: Nf4Tensor) -> None:
    """out = the values of `w`. `out` [N, K] is contiguous, of any float dtype; an fp32 product is rounded to it once.

    Raises KernelError if `out` has another shape or is not contiguous.
    """
    if tuple(out.shape) != w.shape or not out.is_contiguous():
        raise KernelError(f"nf4.dequantize: out: want contiguous {w.shape}, got {tuple(out.shape)} {out.stride()}")
    flat = out.view(-1)
    for start, stop, codes, absmax in _chunks(w):
        _scale(flat[start:stop], codes, absmax)


def relative_error(w: Nf4Tensor, weight: torch.Tensor) -> float:
    """||dequantised w - weight|| / ||weight||, 0 where both are zero and infinite where only `weight` is."""
    flat = weight.reshape(-1)
    scratch = torch.empty(min(_CHUNK, w.numel), dtype=torch.float32)
    error = norm = 0.0
    for start, stop, codes, absmax in _chunks(w):
        values, source = scratch[: stop - start], flat[start:stop].float()
        _scale(values, codes, absmax)
        norm += _sum_of_squares(source)
        error += _sum_of_squares(values.sub_(source))
    return error_ratio(error, norm)


def error_ratio(error: float, norm: float) -> float:
    """The relative error from the two sums of squares."""
    return (error / norm) ** 0.5 if norm else (0.0 if error < _TINY else float("inf"))


def _sum_of_squares(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _chunks(w: Nf4Tensor) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(start, stop, code values fp32 [stop - start or one more], absmax from start's block on), over all of `w`.

    The code values are scratch: the next chunk overwrites them.
    """
    absmax, n = block_absmax(w), w.numel
    size = (min(_CHUNK, n) + 1) // 2
    index = torch.empty(size, dtype=torch.int32)
    pairs = torch.empty(size, dtype=torch.float64)  # each element is two fp32 values
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        count = (stop - start + 1) // 2
        index[:count].copy_(w.codes[start // 2 : start // 2 + count])
        torch.index_select(_code_pairs(), 0, index[:count], out=pairs[:count])
        yield start, stop, pairs[:count].view(torch.float32), absmax[start // BLOCK :]


def block_absmax(w: Nf4Tensor) -> torch.Tensor:
    """The block scales of `w`, fp32 [ceil(n / 64)], nested statistics undone."""
    if w.absmax is not None:
        return w.absmax
    assert w.absmax_codes is not None and w.absmax2 is not None and w.offset is not None and w.code2 is not None
    absmax = w.code2[w.absmax_codes.int()]
    full = absmax.numel() // NESTED_BLOCK
    absmax[: full * NESTED_BLOCK].view(full, NESTED_BLOCK).mul_(w.absmax2[:full, None])
    if full < w.absmax2.numel():
        absmax[full * NESTED_BLOCK :].mul_(w.absmax2[full])
    return absmax.add_(w.offset)


@cache
def nested_code_book() -> torch.Tensor:
    """The 256 sorted values of the signed dynamic 8-bit type, fp32. One tensor, shared by all weights.

    Source: Dettmers 2015 (arXiv:1511.04561). Decade e in -6 .. 0 holds 2^(e+6) values of each sign: the midpoints of as
    many equal steps from 0.1 to 1, times 10^e. To these 254 come 0 and 1.
    """
    book = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + 6) + 1, dtype=torch.float32)
        positive = (10.0**exponent * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        book += positive + [-value for value in positive]
    return torch.tensor(sorted(book), dtype=torch.float32)


@cache
def nested_bins() -> torch.Tensor:
    """uint8 [65536]: the nearest code of each bin's centre."""
    book = nested_code_book()
    centres = torch.arange(_BINS, dtype=torch.float32) / (_BINS - 1) * 2.0 - 1.0
    return torch.bucketize(centres, (book[:-1] + book[1:]) / 2).to(torch.uint8)


@cache
def _code_pairs() -> torch.Tensor:
    """The two values of each possible byte, high nibble first: fp32 [256, 2], seen as 256 eight-byte elements."""
    byte = torch.arange(256)
    return torch.stack([CODE[byte >> 4], CODE[byte & 15]], dim=1).view(torch.float64).view(-1)


def _block_absmax(values: torch.Tensor) -> torch.Tensor:
    """fp32 [ceil(n / 64)]: the largest magnitude of each block."""
    full = values.numel() // BLOCK
    absmax = torch.empty(-(-values.numel() // BLOCK), dtype=torch.float32)
    step = _CHUNK // BLOCK
    for start in range(0, full, step):
        stop = min(start + step, full)
        absmax[start:stop] = values[start * BLOCK : stop * BLOCK].view(-1, BLOCK).abs().amax(dim=1)
    if full < absmax.numel():
        absmax[full] = values[full * BLOCK :].abs().amax().float().clamp(min=_TINY)
    return absmax


def _codes(values: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """uint8 [ceil(n / 2)]: the packed codes of the scaled values."""
    n = values.numel()
    full = n // BLOCK * BLOCK
    packed = torch.empty((n + 1) // 2, dtype=torch.uint8)
    reciprocal = 1.0 / absmax.clamp(min=_TINY)
    for start in range(0, full, _CHUNK):
        stop = min(start + _CHUNK, full)
        blocks = values[start:stop].float().view(-1, BLOCK)
        scaled = (blocks * reciprocal[start // BLOCK : stop // BLOCK, None]).clamp_(-1, 1)
        packed[start // 2 : stop // 2] = _pack(_nearest(scaled.view(-1)))
    if full < n:
        tail = _nearest((values[full:].float() / absmax[-1]).clamp_(-1, 1))
        if n % 2:
            tail = torch.cat([tail, tail.new_full((1,), _ZERO_CODE)])
        packed[full // 2 :] = _pack(tail)
    return packed


def _nearest(scaled: torch.Tensor) -> torch.Tensor:
    """uint8: the index of the nearest code, the lower one on a tie: how many midpoints lie below the value."""
    index = torch.zeros(scaled.shape, dtype=torch.uint8)
    for midpoint in MIDPOINTS:
        index += scaled > midpoint
    return index


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return (codes[0::2] << 4) | codes[1::2]


def quantize_statistics(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit codes [blocks] of the centred absmax and the scale [ceil(blocks / 256)] of each group of 256."""
    blocks = centred.numel()
    groups = torch.nn.functional.pad(centred, (0, -blocks % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax2 = groups.abs().amax(dim=1)
    scaled = (groups * (1.0 / absmax2)[:, None]).clamp_(-1, 1)
    # A group of zeros gives 0 / 0; any code stands for zero there, and bitsandbytes writes 0.
    codes = nested_bins()[((scaled + 1.0) * 0.5 * (_BINS - 1) + 0.5).nan_to_num(0.0).int()]
    return codes.view(-1)[:blocks].clone(), absmax2


def _scale(out: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor) -> None:
    """out[i] = codes[i] * absmax[i // 64], in fp32, rounded to out's dtype."""
    n = out.numel()
    full = n // BLOCK
    body = full * BLOCK
    torch.mul(
        codes[:body].view(full, BLOCK),
        absmax[:full, None],
        out=out[:body].view(full, BLOCK),
    )
    if body < n:
        torch.mul(codes[body:n], absmax[full], out=out[body:])
