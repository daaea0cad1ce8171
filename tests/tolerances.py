"""The one table of tolerances. Every bound of the suite is one of these four families, with the reason it holds.

exact        The same operations in the same order on the same values (copies, packing, codes, recompute): 0.
elementwise  A fixed short chain of roundings a value: each op errs by at most half an ulp of its result, eps/2
             relative; a chain of `ops` of them by ops * eps / 2, and `exp`, `sqrt` count for two (within 1 ulp).
reduction    A sum of n products whose signs vary: rounding errors add like a random walk, so the error relative to the
             norm of the terms is about eps * sqrt(n) / 2; c = 4 covers the tail and the dependence on order.
quantised    NF4's codes are at most 0.304 apart on [-1, 1] (-1 to -0.696), so a value errs by at most 0.152 absmax.
"""

from __future__ import annotations

import math

import torch

EXACT = 0.0
QUANTISED_NF4 = 0.152
"""Half of NF4's widest gap, relative to the block's absmax."""

ENGINE_FP32 = 1e-5
"""A whole step in fp32 against the fp64 oracle, norm-wise: about 50 ops in a row (3 layers, forward and back), each a
reduction over at most 150 terms: eps * sqrt(150) * sqrt(50) is 1e-5."""

ENGINE_FP64 = 1e-10
"""The same in fp64 is 2e-14; gradients that nearly cancel lose up to four digits of it."""

ENGINE_BF16 = 0.055
"""The same in bf16, where each of the 50 ops stores its result with a rounding of eps / 2: a random walk of sqrt(50)
such steps is 0.028; twice that covers the worst tensor."""

OPTIMIZER = 1e-6
"""Three AdamW updates in fp32, relative to the parameter's norm: about 10 roundings an update, 30 * eps / 2 = 2e-6
of its size, and an update is at most lr, far below the parameter."""


def elementwise(dtype: torch.dtype, ops: int) -> float:
    """Relative bound for a chain of `ops` roundings in `dtype`."""
    return ops * torch.finfo(dtype).eps / 2


def reduction(dtype: torch.dtype, n: int, c: float = 4.0) -> float:
    """Bound relative to the norm of the result's terms for a sum of `n` of them in `dtype`."""
    return c * torch.finfo(dtype).eps * math.sqrt(max(n, 1))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and gradients for a compute dtype."""
    return torch.promote_types(dtype, torch.float32)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float, what: str = "") -> None:
    """||got - want|| <= bound * ||want|| in fp64, and no single value further off than eight times its fair share."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    error, size = got - want, want.norm()
    assert float(error.norm()) <= bound * float(size), (
        f"{what}: relative error {float(error.norm() / size):.2e} > {bound:.2e}"
    )
    share = 8 * bound * max(float(size) / max(want.numel(), 1) ** 0.5, 0.0)
    spread = error.abs() - 8 * bound * want.abs()
    assert want.numel() == 0 or float(spread.max()) <= share, (
        f"{what}: one value is off by {float(error.abs().max()):.2e}"
    )
