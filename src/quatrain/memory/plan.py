"""The memory plan: every byte of a run by name, before the first weight is read.

Two kinds of entries: `Slot`s are tensors that the arena hands out, exactly as listed; `Held` are bytes that live
elsewhere (frozen weights, the Python process, an op's own temporaries) and are counted the same. Slots that are never
alive together may lie in one another's memory: `overlay`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quatrain.errors import PlanError

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """A tensor of the arena: memory of its own, or, at byte `offset`, part of the slot `within`."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    within: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes with the padding to the arena's alignment."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return (size + ALIGN - 1) // ALIGN * ALIGN


def overlay(group: str, name: str, *alternatives: Sequence[Slot]) -> list[Slot]:
    """One slot as large as the largest of `alternatives`, and their slots within it. Those of one alternative lie one
    after the other; alternatives share bytes, so that no two may be in use at once."""
    placed, size = [], 0
    for slots in alternatives:
        end = 0
        for slot in slots:
            if slot.within:  # an overlay inside this one
                placed.append(slot)
            else:
                placed.append(replace(slot, within=name, offset=end))
                end += slot.nbytes
        size = max(size, end)
    return [Slot(group, name, (size,), torch.uint8), *placed]


@dataclass(frozen=True)
class Held:
    """Bytes outside the arena."""

    group: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """`host` is what a run on another device holds in the host's memory; it is no part of the total."""

    slots: tuple[Slot, ...]
    held: tuple[Held, ...]
    host: tuple[Held, ...] = ()

    @property
    def entries(self) -> tuple[Slot | Held, ...]:
        """Everything that has memory of its own."""
        return (*self.held, *(slot for slot in self.slots if not slot.within))

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def host_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.host)

    def groups(self) -> dict[str, int]:
        """Bytes by group, in the order of first mention."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            totals[entry.group] = totals.get(entry.group, 0) + entry.nbytes
        return totals

    def as_json(self) -> dict[str, object]:
        """For `run.json` and machines: total, groups, and every entry by name."""
        entries = [{"group": e.group, "name": e.name, "bytes": e.nbytes} for e in self.entries]
        host = [{"group": e.group, "name": e.name, "bytes": e.nbytes} for e in self.host]
        more = {"host_bytes": self.host_bytes, "host_entries": host} if host else {}
        return {"total_bytes": self.total_bytes, "groups": self.groups(), "entries": entries, **more}

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
