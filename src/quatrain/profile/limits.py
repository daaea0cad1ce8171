"""What this machine can do: matrix product and memory rates, measured, for the profiler's percent column."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Limits:
    flops_per_second: float
    bytes_per_second: float


def measure(dtype: torch.dtype, size: int = 1024, repeats: int = 9) -> Limits:
    """Medians over `repeats`: a [size, size] matrix product in `dtype`, and a copy of 64 MB (read plus write). Takes
    about a second on a laptop."""
    a, b, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    source = torch.empty(64_000_000, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)
    product = _median_seconds(lambda: torch.mm(a, b, out=out), repeats)
    copy = _median_seconds(lambda: target.copy_(source), repeats)
    return Limits(2 * size**3 / product, 2 * source.numel() / copy)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)
