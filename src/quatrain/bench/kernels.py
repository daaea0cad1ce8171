"""The roofline table: each kernel's median time against the limits of the machine and beside torch's own op.

Before anything is timed every kernel, and torch's op, must agree with the reference op on a small input. Our side and
torch take turns, and a sweep over memory before each call empties the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quatrain.bench.cases import Case, Kernels, World, cases
from quatrain.errors import KernelError
from quatrain.model.spec import ModelSpec
from quatrain.ops.nf4.reference import dequantize
from quatrain.ops.select import Backend, select_backend
from quatrain.profile.limits import Limits, settle
from quatrain.profile.report import rows
from quatrain.profile.spans import Profiler, Span

GATE_TOKENS, GATE_ROW = 96, 48
BOUNDS = {torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps, torch.float32: 1e-4}
"""Of the error's norm relative to the result's. bf16: inputs are equal and sums are fp32, so a result carries a few
roundings of eps / 2; 2 eps allows four that all point the same way. fp32: eps sqrt(n) is 1e-5 for 10,000 terms; ten
times that allows for another order of additions and for what cancels."""


@dataclass(frozen=True)
class Timed:
    """A case's work and our time for it (`span`), and torch's seconds, None where torch has no such op."""

    span: Span
    torch_seconds: float | None


def measure_kernels(
    spec: ModelSpec, *, tokens: int, row: int, rank: int, dtype: torch.dtype, backend: Backend, repeats: int
) -> Iterator[Timed]:
    """Gate, then medians over `repeats`, one kernel after the other. Raises KernelError at the gate."""
    gate(spec, rank, dtype, backend)
    world = World(spec, tokens, row, rank, dtype, backend.quantize)
    kernels, swept = Kernels.bind(backend, world), torch.zeros(2 * cache_bytes() // 4)
    total = torch.zeros((), dtype=torch.float64)
    # Each side sweeps with its own threads, so that they have settled.
    sweeps = (lambda: kernels.ops.sum_squares(total, swept), lambda: swept.add_(1))
    for case in cases(world, backend.dequantize):
        yield _time(case, kernels, backend, repeats, sweeps)


def table(timed: list[Timed], limits: Limits) -> list[dict[str, Any]]:
    """One row a kernel, as JSON values."""
    found = []
    for one, row in zip(timed, rows([one.span for one in timed], limits), strict=True):
        theirs = one.torch_seconds
        found.append(
            {
                "kernel": row["op"],
                "ms": 1e3 * one.span.seconds,
                "gflops": row["gflops"],
                "gbytes": row["gbytes"],
                "percent_of_peak": row["percent_of_limit"],
                "limit": row["limit"],
                "torch_ms": None if theirs is None else 1e3 * theirs,
                "torch_over_ours": None if theirs is None else theirs / one.span.seconds,
            }
        )
    return found


def gate(spec: ModelSpec, rank: int, dtype: torch.dtype, backend: Backend) -> None:
    """Every kernel and torch's op at its work against the reference op, the model's sizes but few tokens. Raises
    KernelError with the first that differs."""
    reference = select_backend("cpu", dtype, "reference")
    world = World(spec, GATE_TOKENS, GATE_ROW, rank, dtype, reference.quantize)
    ours, theirs = Kernels.bind(backend, world), Kernels.bind(reference, world)
    for case in cases(world, dequantize):
        got, want = run_both(case, ours, theirs, backend)
        _require(f"{case.name}, {backend.name}", got, want, BOUNDS[dtype])
        if case.peer is not None:
            peer = case.peer()
            _require(f"{case.name}, torch", peer, want[: len(peer)], BOUNDS[dtype])


def run_both(case: Case, ours: Kernels, theirs: Kernels, backend: Backend) -> tuple[list[torch.Tensor], ...]:
    """The outputs of a case on `ours`, the kernels of `backend`, and on `theirs`, from the same start."""
    start = [tensor.clone() for tensor in case.writes]
    with backend.running():
        got = _outputs(case, ours)
    for tensor, before in zip(case.writes, start, strict=True):
        tensor.copy_(before)
    return got, _outputs(case, theirs)


def relative_errors(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> list[float]:
    """For each output the norm of its error relative to its own; 0 where both are 0."""
    pairs = [(ours.double(), theirs.double()) for ours, theirs in zip(got, want, strict=True)]
    return [0.0 if ours.equal(theirs) else float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


def _outputs(case: Case, kernels: Kernels) -> list[torch.Tensor]:
    made = case.run(kernels)
    return [tensor.clone() for tensor in (case.writes if made is None else made)]


def _require(what: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], bound: float) -> None:
    for number, error in enumerate(relative_errors(got, want)):
        if not error <= bound:  # NaN is no agreement either
            raise KernelError(
                f"{what}: output {number} differs from the reference by {error:.2e} of its norm, "
                f"want at most {bound:.0e}",
                hint="a number without a right result means nothing; please report this with `quatrain doctor`",
            )


def _time(
    case: Case, kernels: Kernels, backend: Backend, repeats: int, sweeps: tuple[Callable[[], object], ...]
) -> Timed:
    span = replace(_count(case, kernels), op=case.name, calls=1)
    ours, theirs = [], []
    for _ in range(repeats + 1):  # the first call of each is not counted
        ours.append(_seconds(lambda: case.run(kernels), sweeps[0], backend.running()))
        if case.peer is not None:
            theirs.append(_seconds(case.peer, sweeps[1], nullcontext()))
    span.seconds = median(ours[1:])
    return Timed(span, median(theirs[1:]) if theirs else None)


def _count(case: Case, kernels: Kernels) -> Span:
    """The work of one call."""
    profiler = Profiler(enabled=True)
    case.run(replace(kernels, ops=profiler.timed(kernels.ops)))
    span = next(iter(profiler.by_op()), Span("", None, case.name))
    return replace(span, bytes=case.nbytes or span.bytes)


def _seconds(run: Callable[[], object], sweep: Callable[[], object], alone: Any) -> float:
    with alone:
        settle(sweep)
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def cache_bytes() -> int:
    """The size of the largest cache; 32 MB where the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=32 << 20)
