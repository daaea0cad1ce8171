"""The arena: one allocation that hands out exactly the slots of a plan.

Untouched pages of the allocation cost nothing on systems that commit lazily, so a short batch stays cheap. Under test
(`poison=True`) every slot starts as NaN (0xAA for integers) and stands between guard words, so that a read of unwritten
memory or a stray write shows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence

import torch

from quatrain.memory.plan import Slot

GUARD_BYTES = 64
HUGE_PAGE = 2 << 20
GUARD = 0x5C
POISON_INT = 0xAA

poison_by_default = False
"""Set by the test suite."""


class Arena:
    """Named tensors in one block of memory."""

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device | str = "cpu",
        poison: bool | None = None,
        inside: torch.Tensor | None = None,
    ) -> None:
        """In memory of its own, or `inside` a uint8 tensor that is large enough (`bytes_of`)."""
        self.poisoned = poison_by_default if poison is None else poison
        self.nbytes = bytes_of(slots)
        guard = GUARD_BYTES if self.poisoned else 0
        size = self._bytes_with_guards(slots)
        self._block = _allocate(size, torch.device(device)) if inside is None else inside[:size]
        if self.poisoned:
            self._block.fill_(GUARD)
        self._tensors: dict[str, torch.Tensor] = {}
        self._guards: list[tuple[str, torch.Tensor]] = []
        offset = 0
        for slot in slots:
            if slot.name in self._tensors:
                raise ValueError(f"two slots are named {slot.name!r}")
            size = math.prod(slot.shape) * slot.dtype.itemsize
            if slot.within:
                part = self._tensors[slot.within].view(torch.uint8)[slot.offset : slot.offset + size]
                self._tensors[slot.name] = part.view(slot.dtype).view(slot.shape)
                continue
            self._guards.append((slot.name, self._block[offset : offset + guard]))
            offset += guard
            self._tensors[slot.name] = self._block[offset : offset + size].view(slot.dtype).view(slot.shape)
            self._poison(self._tensors[slot.name])
            offset += slot.nbytes
        self._guards.append(("the end", self._block[offset : offset + guard]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of a slot. KeyError for a name that is not in the plan."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def could_lend(self, slots: Sequence[Slot]) -> bool:
        """Whether other slots fit in the same memory."""
        return self._bytes_with_guards(slots) <= self._block.numel()

    def lend(self, slots: Sequence[Slot]) -> Arena:
        """Other slots in the same memory, for as long as nobody uses this arena's; then comes `take_back`."""
        return Arena(slots, poison=self.poisoned, inside=self._block)

    def take_back(self) -> None:
        """After `lend`. Nothing is left of what was in the slots; under test they are poison again."""
        if self.poisoned:
            for _, guard in self._guards:
                guard.fill_(GUARD)
            self.release(self._tensors.values())

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that nobody may read these slots before they are written again; under test they turn to poison."""
        if self.poisoned:
            for tensor in tensors:
                self._poison(tensor)

    def check_guards(self) -> None:
        """Raises AssertionError naming the slots whose neighbouring guard words were overwritten (under test)."""
        broken = [name for name, guard in self._guards if not bool((guard == GUARD).all())]
        if broken:
            raise AssertionError(f"memory was written outside its slot just before: {', '.join(broken)}")

    def _bytes_with_guards(self, slots: Sequence[Slot]) -> int:
        return bytes_of(slots) + (GUARD_BYTES * (len(slots) + 1) if self.poisoned else 0)

    def _poison(self, tensor: torch.Tensor) -> None:
        if not self.poisoned:
            return
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        else:
            tensor.view(torch.uint8).fill_(POISON_INT)


def bytes_of(slots: Sequence[Slot]) -> int:
    """The bytes that slots take in an arena."""
    return sum(slot.nbytes for slot in slots if not slot.within)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes]. On a CPU whose system offers huge pages on request, in those: kernels stream through megabytes at
    a time, and with 4 KB pages they spend up to half of it on address translation (measured, see docs/LOG.md)."""
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages: the memory is as good, only slower
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(pages, dtype=torch.uint8)
