"""Rows into packs by token budget.

A pack is a list of whole rows; attention is isolated per row, so what shares a pack does not matter to the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from quatrain.data.row import Row
from quatrain.errors import DataError


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
