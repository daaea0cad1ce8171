"""A whole measurement: what it is of, and its three parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from quatrain.bench.kernels import BOUNDS, measure_kernels, table
from quatrain.bench.shapes import open_model, row_length
from quatrain.bench.steps import Request, measure_apart
from quatrain.checkpoint.source import ModelSource
from quatrain.config import InstructConfig
from quatrain.engine.setup import resolve_compute_dtype
from quatrain.errors import ConfigError
from quatrain.ops.select import Backend, select_backend
from quatrain.profile.limits import Limits, measure


@dataclass(frozen=True)
class Bench:
    """`model` or random weights in `shape`; kernels on `tokens` tokens and steps of each of `lengths`, in rows of at
    most `row`. `engine` are options of `InstructConfig`. Making one opens the model and checks every length."""

    model: str
    shape: str | None
    tokens: int
    lengths: tuple[int, ...]
    row: int
    repeats: int
    engine: dict[str, Any] = field(default_factory=dict)

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

    def limits(self) -> dict[str, Limits]:
        """The limits by dtype; memory is measured once more for each, and is one number for both."""
        found = {name: measure(self.backend.peak_product(dtype), repeats=15) for name, dtype in _DTYPES.items()}
        memory = max(limits.bytes_per_second for limits in found.values())
        return {name: Limits(limits.flops_per_second, memory) for name, limits in found.items()}

    def kernels(self, limits: Limits, done: Callable[[str], None]) -> list[dict[str, Any]]:
        """The roofline table. `done` hears each kernel's name."""
        timed = measure_kernels(
            self.source.spec, tokens=self.tokens, row=row_length(self.tokens, self.row),
            rank=InstructConfig(**self.engine).lora_rank, dtype=self.dtype, backend=self.backend,
            repeats=self.repeats, done=done,
        )  # fmt: skip
        return table(timed, limits)

    def steps(self, limits: Limits) -> Iterator[dict[str, Any]]:
        """One row for each length, as soon as it is measured."""
        for tokens in self.lengths:
            yield measure_apart(
                Request(
                    self.model, self.shape, tokens, row_length(tokens, self.row), torch.get_num_threads(),
                    self.repeats, self.engine, limits,
                )
            )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """What was measured, as JSON values."""
        return {
            "model": self.source.name if self.shape else self.model,
            "tokens": self.tokens,
            "row": self.row,
            "repeats": self.repeats,
            "threads": torch.get_num_threads(),
            "dtype": self.dtype_name,
            "kernels": self.backend.name,
            "engine": self.engine,
        }

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in _DTYPES.items() if dtype == self.dtype)


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
