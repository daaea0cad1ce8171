"""The memory plan: every byte of a run by name, before the first weight is read.

Two kinds of entries: `Slot`s are tensors that the arena hands out, exactly as listed; `Held` are bytes that live
elsewhere (frozen weights, the Python process, an op's own temporaries) and are counted the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quatrain.errors import PlanError

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """A tensor of the arena."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes with the padding to the arena's alignment."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return (size + ALIGN - 1) // ALIGN * ALIGN


@dataclass(frozen=True)
class Held:
    """Bytes outside the arena."""

    group: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    slots: tuple[Slot, ...]
    held: tuple[Held, ...]

    @property
    def entries(self) -> tuple[Slot | Held, ...]:
        return self.held + self.slots

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def groups(self) -> dict[str, int]:
        """Bytes by group, in the order of first mention."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            totals[entry.group] = totals.get(entry.group, 0) + entry.nbytes
        return totals

    def as_json(self) -> dict[str, object]:
        """For `run.json` and machines: total, groups, and every entry by name."""
        entries = [{"group": e.group, "name": e.name, "bytes": e.nbytes} for e in self.entries]
        return {"total_bytes": self.total_bytes, "groups": self.groups(), "entries": entries}

    def require(self, budget: int) -> None:
        """Raises PlanError, with the largest groups, when the plan is over `budget` bytes."""
        if self.total_bytes <= budget:
            return
        largest = sorted(self.groups().items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in largest)
        raise PlanError(
            f"the run needs {self.total_bytes / 1e6:.0f} MB and the budget is {budget / 1e6:.0f} MB (largest: {parts})",
            hint="try --checkpoint block, a smaller --micro-batch-tokens or --max-seq-len, or a smaller model",
        )
