"""Adding up partial sums in a fixed order: the second half of every reduction that several programs share. No atomics,
so equal inputs give equal bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for


@triton.jit
def add_partials_kernel(out, partials, scale, parts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    source = partials + at
    for _ in range(parts):
        total += tl.load(source, mask=at < n, other=0.0)
        source += n
    tl.store(out + at, tl.load(out + at, mask=at < n) + scale * total, mask=at < n)


def add_partials(out: torch.Tensor, partials: torch.Tensor, scale: float = 1.0) -> None:
    """out [...] += scale * the sum of partials [parts, ...] over its first size, both fp32."""
    how = config_for("add_partials", out)
    grid = (triton.cdiv(out.numel(), how["BLOCK"]),)
    add_partials_kernel[grid](out, partials, scale, partials.shape[0], out.numel(), **how)


def cases(arch: str, dtype: str) -> list[Case]:
    how = config("add_partials", arch, dtype)
    return [Case(add_partials_kernel, "*fp32 *fp32 fp32 i32 i32:16", how)] if dtype == "fp32" else []
