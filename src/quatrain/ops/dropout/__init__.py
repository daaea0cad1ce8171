"""Dropout masks from a counter: no generator state, so every recompute, resume and split of a batch sees the same mask.

    key[t]     = mix(mix(mix(seed ^ mix(step)) ^ mix(row[t] + 1)) ^ mix(position[t] + 2^20))
    bits[t, k] = mix(mix(key[t] ^ mix(index)) ^ mix(k))               index numbers the adapters: each has its own mask
    mask[t, k] = (bits >= p 2^32) / (1 - p)

`step` counts optimizer updates, `row` is the row's place in the optimizer step and `position` the token's place in
its row: none of them depends on how rows are packed into micro-batches. `mix` is the 32-bit integer hash "lowbias32"
(C. Wellons, "Prospecting for hash functions", 2018, public domain).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dropout:
    """Probability `p` in (0, 1) and the keys int64 [T] of the current micro-batch."""

    p: float
    keys: torch.Tensor
