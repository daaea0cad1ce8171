"""Rows into micro-batches by token budget, and how many steps that makes.

A pack is a list of whole rows; attention is isolated per row, so what shares a pack does not matter to the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from quatrain.data.row import Row
from quatrain.errors import DataError

T = TypeVar("T")


def pack(rows: Sequence[Row], capacity: int) -> list[list[Row]]:
    """Fill packs of at most `capacity` tokens in the order given: a row that does not fit begins the next pack.

    Rows are neither split, lost nor reordered, so shuffled rows stay shuffled. Raises DataError for a row that is
    longer than a pack.
    """
    packs: list[list[Row]] = []
    room = 0
    for row in rows:
        if len(row) > capacity:
            raise DataError(
                f"{row.source or 'a row'}: {len(row)} tokens do not fit a pack of {capacity}",
                hint="raise micro_batch_tokens or lower max_seq_len",
            )
        if len(row) > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(row)
        room -= len(row)
    return packs


def groups(items: Sequence[T], size: int) -> list[list[T]]:
    """`items` in consecutive groups of `size`; the last one may be smaller."""
    return [list(items[begin : begin + size]) for begin in range(0, len(items), size)]


def steps_per_epoch(num_micro_batches: int, accumulation: int) -> int:
    """Optimizer steps of an epoch: the last group of micro-batches may be partial, and counts."""
    return -(-num_micro_batches // accumulation)


def total_steps(num_rows: int, micro_batch: int, accumulation: int, epochs: int) -> int:
    """Optimizer steps of a run over `num_rows` used rows (or packs) in micro-batches of `micro_batch` of them."""
    return steps_per_epoch(-(-num_rows // micro_batch), accumulation) * epochs
