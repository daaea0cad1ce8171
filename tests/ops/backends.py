"""The implementations that every oracle of this room judges: the reference ops in three dtypes, and the native ones of
each instruction set in the two that kernels exist for.

Each call of an op gets scratch of exactly the bytes it asks for, poisoned and between guard words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ops.memory import GuardedMemory

from quatrain.ops import library
from quatrain.ops.linear_lora import Linear
from quatrain.ops.native import native_ops
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.select import Ops, reference_ops

REFERENCE = "reference"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
NATIVE = ("fp32", "bf16")


@dataclass(frozen=True)
class Implementation:
    """One column of the table: whose ops, in which compute dtype."""

    backend: str
    dtype: torch.dtype

    @property
    def native(self) -> bool:
        return self.backend != REFERENCE


ALL = {f"{REFERENCE}-{name}": Implementation(REFERENCE, dtype) for name, dtype in DTYPES.items()}
ALL |= {f"{isa}-{name}": Implementation(isa, DTYPES[name]) for isa in library.ISAS for name in NATIVE}
FP32 = {name: one for name, one in ALL.items() if one.dtype == torch.float32}
BACKENDS = {one.backend: one for one in FP32.values()}


def require(backend: str) -> None:
    """Skips the test where the library is absent, or the machine lacks the instruction set."""
    if backend == REFERENCE:
        return
    there, reason = library.available()
    if not there:
        pytest.skip(reason)
    if backend not in library.supported_isas():
        pytest.skip(f"this machine or this build does not have {backend}")


def make_ops(implementation: Implementation, memory: GuardedMemory, threads: int = 2) -> Ops:
    """The ops, with scratch out of `memory`."""
    require(implementation.backend)
    if implementation.native:
        context = GuardedContext(library.context(implementation.backend, threads), memory)
        return native_ops(context, memory.output(1 << 16, dtype=torch.uint8))  # type: ignore[arg-type]
    ops = reference_ops(torch.empty(0, dtype=torch.uint8))
    from quatrain.ops.linear_lora.reference import linear_lora_backward, linear_lora_forward

    return replace(
        ops,
        linear_lora_forward=_with_weight_scratch(linear_lora_forward, memory),
        linear_lora_backward=_with_weight_scratch(linear_lora_backward, memory),
        linear_lora_decode=_with_weight_scratch(linear_lora_forward, memory),
    )


def _with_weight_scratch(op: Callable[..., None], memory: GuardedMemory) -> Callable[..., None]:
    """The reference's linear ops need room for the largest quantised weight of the group."""

    @functools.wraps(op)
    def run(*args: Any, **more: Any) -> None:
        x, linears = args[2], next(a for a in args[3:] if isinstance(a[0], Linear))
        sizes = [layer.weight.numel for layer in linears if isinstance(layer.weight, Nf4Tensor)]
        op(*args, scratch=memory.output(max(sizes, default=0), dtype=x.dtype), **more)

    return run


class GuardedContext:
    """Stands in for `library.Context`: replaces the scratch of every call by one of exactly the size that the op's
    _scratch_bytes twin names."""

    def __init__(self, context: library.Context, memory: GuardedMemory) -> None:
        self._context, self._memory = context, memory
        self.size = context.size

    def call(self, name: str, *args: Any) -> None:
        if name == "qt_sum_squares":
            partials = self._memory.output(self.size("qt_sum_squares_partials", args[2]), dtype=torch.float64)
            self._context.call(name, *args[:-1], partials.data_ptr())
        elif (wanted := self._scratch_bytes(name, args)) is not None:
            scratch = self._memory.output(wanted, dtype=torch.uint8)
            self._context.call(name, *args[:-2], scratch.data_ptr(), wanted)
        else:
            self._context.call(name, *args)

    def _scratch_bytes(self, name: str, args: tuple[Any, ...]) -> int | None:
        """None for an op that takes no scratch. `args` are those of the ABI, less the context."""
        code = args[0]
        if name in ("qt_linear_forward", "qt_lora_down"):
            group, count, tokens, dropout = args[2], args[3], args[-4], args[-3]
            return self.size("qt_linear_forward_scratch_bytes", code, group, count, tokens, dropout)
        if name == "qt_linear_decode":
            return self.size("qt_linear_decode_scratch_bytes", code, args[2], args[3], args[5])
        if name == "qt_attention_cached":
            return self.size("qt_attention_cached_scratch_bytes", code, args[10], args[9])
        if name == "qt_linear_backward":
            return self.size("qt_linear_backward_scratch_bytes", code, *args[3:6])
        if name in ("qt_attention_forward", "qt_attention_backward"):
            cu_seqlens, rows, shape = args[-5:-2]
            longest = max(cu_seqlens[i + 1] - cu_seqlens[i] for i in range(rows))
            return self.size(f"{name}_scratch_bytes", code, shape, longest)
        if name == "qt_head_loss":
            hidden, vocab, chunk = args[9:12]
            return self.size("qt_head_loss_scratch_bytes", code, chunk, hidden, vocab)
        return None
