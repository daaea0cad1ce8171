"""A whole measurement: what it is of, its parts, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from quatrain.bench.kernels import BOUNDS, Timed, measure_kernels, table
from quatrain.bench.shapes import open_model, row_length
from quatrain.bench.steps import Request, measure_apart, row
from quatrain.checkpoint.source import ModelSource
from quatrain.config import InstructConfig
from quatrain.engine.setup import resolve_compute_dtype
from quatrain.errors import ConfigError
from quatrain.ops.select import Backend, select_backend
from quatrain.profile.limits import Limits, Work, best_rate, memory_traffic

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Bench:
    """`model` or random weights in `shape`; kernels on `tokens` tokens and steps of each of `lengths`, in rows of at
    most `row`. `engine` are options of `InstructConfig`. Making one checks dtype and lengths (ConfigError).

    `flops` by dtype and `bandwidth` are the best rates seen so far: a machine that others share is slow at times, and
    its limits are looked at again after each kernel and each step. Percents belong to the limits at the end."""

    model: str
    shape: str | None
    tokens: int
    lengths: tuple[int, ...]
    row: int
    repeats: int
    engine: dict[str, Any] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict, init=False)
    bandwidth: float = field(default=0.0, init=False)
    timed: list[Timed] = field(default_factory=list, init=False)
    steps: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.dtype not in BOUNDS:
            raise ConfigError(f"compute_dtype: bench measures bf16 and fp32, got {self.dtype}")
        for tokens in (self.tokens, *self.lengths):
            row_length(tokens, self.row)

    @property
    def dtype(self) -> torch.dtype:
        return resolve_compute_dtype(InstructConfig(**self.engine))

    @cached_property
    def source(self) -> ModelSource:
        return open_model(self.model, self.shape)

    @cached_property
    def backend(self) -> Backend:
        kernels = InstructConfig(**self.engine).kernels
        return select_backend("cpu", self.dtype, kernels, torch.get_num_threads())

    @cached_property
    def _works(self) -> tuple[dict[str, Work], tuple[Work, Work]]:
        return {name: self.backend.peak_product(dtype) for name, dtype in DTYPES.items()}, memory_traffic()

    @property
    def limits(self) -> Limits:
        return Limits(self.flops[self.dtype_name], self.bandwidth)

    def look_at_limits(self, repeats: int = 3) -> None:
        products, traffic = self._works
        for name, product in products.items():
            self.flops[name] = max(self.flops.get(name, 0.0), best_rate(product, repeats))
        self.bandwidth = max(self.bandwidth, *(best_rate(work, repeats) for work in traffic))

    def measure_kernels(self) -> Iterator[str]:
        """Fills `timed`; the name of each kernel as it is done. Raises KernelError at the gate."""
        for timed in measure_kernels(
            self.source.spec, tokens=self.tokens, row=row_length(self.tokens, self.row),
            rank=InstructConfig(**self.engine).lora_rank, dtype=self.dtype, backend=self.backend, repeats=self.repeats,
        ):  # fmt: skip
            self.timed.append(timed)
            self.look_at_limits()
            yield timed.span.op

    def measure_steps(self) -> Iterator[dict[str, Any]]:
        """Fills `steps`; each one's row as it is done."""
        for tokens in self.lengths:
            request = Request(
                self.model, self.shape, tokens, row_length(tokens, self.row), torch.get_num_threads(), self.repeats,
                self.engine,
            )  # fmt: skip
            self.steps.append(measure_apart(request))
            self.look_at_limits()
            yield row(self.steps[-1], self.limits)

    def report(self) -> dict[str, Any]:
        """What was measured and what came out, as JSON values."""
        return {
            "model": self.source.name,
            "tokens": self.tokens,
            "row": self.row,
            "repeats": self.repeats,
            "threads": torch.get_num_threads(),
            "dtype": self.dtype_name,
            "kernels": self.backend.name,
            "engine": self.engine,
            "limits": {"flops_per_second": self.flops, "bytes_per_second": self.bandwidth},
            "rows": table(self.timed, self.limits),
            "steps": [row(step, self.limits) for step in self.steps],
        }

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
