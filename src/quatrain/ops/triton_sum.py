"""Adding up partial sums in a fixed order: the second half of every reduction that several programs share. No atomics,
so equal inputs give equal bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for


@triton.jit
def add_partials_kernel(first, second, partials, parts, split, n, BLOCK: tl.constexpr):
    """The first `split` of n sums are added to `first`, the others to `second`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    source = partials + at
    for _ in range(parts):
        total += tl.load(source, mask=at < n, other=0.0)
        source += n
    mask = at < split
    tl.store(first + at, tl.load(first + at, mask=mask, other=0.0) + total, mask=mask)
    if second is not None:
        mask = (at >= split) & (at < n)
        tl.store(second + at - split, tl.load(second + at - split, mask=mask, other=0.0) + total, mask=mask)


def add_partials(partials: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
    """first += and second += the sum of fp32 partials [parts, n] over the parts; the n values are those of `first` and
    behind them those of `second`."""
    how = config_for("add_partials", partials)
    parts, n = partials.shape
    assert n == first.numel() + (0 if second is None else second.numel())
    grid = (triton.cdiv(n, how["BLOCK"]),)
    add_partials_kernel[grid](first, second, partials, parts, first.numel(), n, **how)


def cases(arch: str, dtype: str) -> list[Case]:
    how = config("add_partials", arch, dtype)
    if dtype != "fp32":
        return []
    return [
        Case(add_partials_kernel, "*fp32 *fp32 *fp32 i32 i32:16 i32:16", how, "two"),
        Case(add_partials_kernel, "*fp32 - *fp32 i32 i32:16 i32:16", how, "one"),
    ]
