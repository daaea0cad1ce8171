"""What this machine can do: product and memory rates, measured, for the profiler's percent column."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], float]
"""Does some work and returns how much it was: FLOPs or bytes."""

_FLOATS = 32_000_000
"""Of each array of the memory measurement: 128 MB, so that no cache holds the three."""

_SETTLED = 0.02  # seconds


@dataclass(frozen=True)
class Limits:
    flops_per_second: float
    bytes_per_second: float


def matrix_product(dtype: torch.dtype, size: int = 1024, device: str = "cpu") -> Work:
    """Torch's product of two [size, size] matrices: the limit where there are no kernels that know theirs."""
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

    def work() -> float:
        torch.mm(a, b, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        return 2.0 * size**3

    return work


def memory_traffic(floats: int = _FLOATS) -> tuple[Work, Work]:
    """A copy, b = a, and a triad, c = a + s b, over fp32 arrays (0.4 GB as long as the two are kept); bytes read plus
    bytes written."""
    a, b, c = (torch.ones(floats) for _ in range(3))

    def copy() -> float:
        b.copy_(a)
        return 2.0 * a.nbytes

    def triad() -> float:
        torch.add(a, b, alpha=0.5, out=c)
        return 3.0 * a.nbytes

    return copy, triad


def settle(work: Callable[[], object]) -> None:
    """Does some work, at least once, until the threads that do it are awake and on a core each (a woken one begins on
    its waker's), and those of others have ended their spin: both take some milliseconds."""
    until = time.perf_counter() + _SETTLED
    work()
    while time.perf_counter() < until:
        work()


def best_rate(work: Work, repeats: int) -> float:
    """The highest rate of `repeats` calls, once the threads have settled. A limit is what is possible, so the best
    counts and not the median."""
    settle(work)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - start))
    return best
