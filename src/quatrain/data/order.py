"""Who comes when: the split, the share of each source and the order of rows, each from its own named generator.

A generator is a function of (seed, purpose, epoch) alone: nothing else that draws random numbers can move it, and
resuming needs no generator state. Philox is counter-based and gives the same numbers on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quatrain.errors import DataError

Places = NDArray[np.int64]  # places of rows, int64 [n]


def generator(seed: int, purpose: str, epoch: int = 0) -> np.random.Generator:
    """The generator of one purpose ("split", "order", ...) in one epoch."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def permutation(n: int, seed: int, purpose: str, epoch: int = 0) -> Places:
    """The numbers 0 to n-1 in the order of one named generator."""
    # Sorting random keys, not Generator.permutation: NumPy does not promise that stream across its versions.
    keys = generator(seed, purpose, epoch).bit_generator.random_raw(n)
    return np.argsort(keys, kind="stable")


def split(n: int, fraction: float, seed: int) -> tuple[Places, Places]:
    """The places of `n` rows as (training, validation): `fraction` of the rows, rounded, but at least one, is held out.
    Both keep their order.

    Raises DataError if the training part would be empty.
    """
    held = max(1, round(n * fraction))
    if held >= n:
        raise DataError(f"val_split {fraction} of {n} rows leaves nothing to train on", hint="add rows")
    is_held = np.zeros(n, dtype=bool)
    is_held[permutation(n, seed, "split")[:held]] = True
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


@dataclass(frozen=True)
class Share:
    """Some consecutive training rows, and how many times an epoch takes them."""

    rows: int
    weight: float = 1.0

    @property
    def taken(self) -> int:
        """Rows of an epoch: weight * rows, rounded, but at least one."""
        return max(1, round(self.weight * self.rows)) if self.rows else 0


def epoch_order(shares: Sequence[Share], seed: int, epoch: int) -> Places:
    """The rows of an epoch (counted from 0) in their order, as places among the training rows.

    Weight 1 takes every row of a share once. For a weight of 2.3 each row comes twice, and 0.3 of them once more: a
    window over the rows, shuffled once, that moves on from epoch to epoch, so that none comes more often than others.
    """
    begin, chosen = 0, []
    for number, share in enumerate(shares):
        whole, part = divmod(share.taken, share.rows) if share.rows else (0, 0)
        chosen += [np.arange(begin, begin + share.rows, dtype=np.int64)] * whole
        if part:
            window = (epoch * part + np.arange(part)) % share.rows
            chosen.append(begin + np.sort(permutation(share.rows, seed, f"share {number}")[window]))
        begin += share.rows
    places = np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
    return places[permutation(len(places), seed, "order", epoch)]
