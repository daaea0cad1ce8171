"""Who comes when: the split and the order of rows, each from its own named generator.

A generator is a function of (seed, purpose, epoch) alone: nothing else that draws random numbers can move it, and
resuming needs no generator state. Philox is counter-based and gives the same numbers on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from quatrain.errors import DataError

T = TypeVar("T")


def generator(seed: int, purpose: str, epoch: int = 0) -> np.random.Generator:
    """The generator of one purpose ("split", "order", ...) in one epoch."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{epoch}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def permutation(n: int, seed: int, purpose: str, epoch: int = 0) -> list[int]:
    """The numbers 0 to n-1 in the order of one named generator."""
    # Sorting random keys, not Generator.permutation: NumPy does not promise that stream across its versions.
    keys = generator(seed, purpose, epoch).bit_generator.random_raw(n)
    return [int(i) for i in np.argsort(keys, kind="stable")]


def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """The order of `n` rows in an epoch (counted from 0)."""
    return permutation(n, seed, "order", epoch)


def split(rows: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """(training, validation): `fraction` of the rows, rounded, but at least one, is held out. Both keep their order.

    Raises DataError if either part would be empty.
    """
    if fraction == 0:
        return list(rows), []
    held = max(1, round(len(rows) * fraction))
    if held >= len(rows):
        raise DataError(f"val_split {fraction} of {len(rows)} rows leaves nothing to train on", hint="add rows")
    chosen = set(permutation(len(rows), seed, "split")[:held])
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return train, [row for i, row in enumerate(rows) if i in chosen]
