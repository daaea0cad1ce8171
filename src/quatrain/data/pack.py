"""Rows into packs by token budget.

A pack is a run of whole rows; attention is isolated per row, so what shares a pack does not matter to the numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Fill packs of at most `capacity` tokens in the order given: a row that does not fit begins the next pack.

    `lengths` int64 [n] are the rows'. Pack i holds rows bounds[i] to bounds[i+1]-1 of the result, int64 [packs + 1].
    Rows are neither split, lost nor reordered, so shuffled rows stay shuffled. A row that is longer than a pack has one
    to itself.
    """
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        begin = bounds[-1]
        before = int(ends[begin - 1]) if begin else 0
        bounds.append(max(begin + 1, int(np.searchsorted(ends, before + capacity, side="right"))))
    return np.array(bounds, dtype=np.int64)
