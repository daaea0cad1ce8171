"""Poisoned and guarded tensors: an op that reads what nobody wrote, or writes beside its output, is found out."""

from __future__ import annotations

import torch

GUARD = 64
SENTINEL = -12345.0


class GuardedMemory:
    """Hands out tensors that stand between guard words; `check` looks whether those are intact."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def output(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """For an `=` output: NaN everywhere (the largest integer, True), so that a place left unwritten shows."""
        poison = float("nan") if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max
        return self._place(torch.full(shape, poison, dtype=dtype))

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """A guarded copy of `values`: for inputs that an op may change in place, and for `+=` outputs."""
        return self._place(values)

    def check(self) -> None:
        for buffer in self._buffers:
            assert bool((buffer[:GUARD] == _guard(buffer)).all()), "memory before an output was written"
            assert bool((buffer[-GUARD:] == _guard(buffer)).all()), "memory behind an output was written"

    def _place(self, values: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(values.numel() + 2 * GUARD, dtype=values.dtype)
        buffer.fill_(_guard(buffer))
        self._buffers.append(buffer)
        view = buffer[GUARD:-GUARD].view(values.shape)
        return view.copy_(values)


def _guard(buffer: torch.Tensor) -> float | bool:
    return True if buffer.dtype == torch.bool else 77
