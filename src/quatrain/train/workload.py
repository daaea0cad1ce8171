"""How much a run computes: tokens, and FLOPs by part of a step. Counted on the rows themselves, before anything runs.

Legend: N and K a linear's output and input features, r rank, Hq query heads, D head_dim, H hidden, V vocabulary.
Only products are counted, as the profiler counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quatrain.config import InstructConfig
from quatrain.data.rows import Rows
from quatrain.engine.layout import adapter_ranks
from quatrain.model.spec import LINEARS, ModelSpec

Window = int | None


@dataclass(frozen=True)
class Load:
    """What rows hold: `supervised` tokens have a loss; `pairs` are the keys that all queries see, by sliding window."""

    rows: float
    tokens: float
    supervised: float
    pairs: dict[Window, float]

    @classmethod
    def of(cls, rows: Rows, windows: Iterable[Window]) -> Load:
        pairs = {window: float(_pairs(rows.lengths, window).sum()) for window in set(windows)}
        return cls(len(rows), int(rows.lengths.sum()), int(rows.supervised.sum()), pairs)

    def times(self, factor: float) -> Load:
        pairs = {window: number * factor for window, number in self.pairs.items()}
        return Load(self.rows * factor, self.tokens * factor, self.supervised * factor, pairs)


@dataclass(frozen=True)
class Flops:
    """By part. `recompute` is what `checkpoint` saves memory with."""

    forward: float
    recompute: float
    backward: float
    head: float

    @property
    def total(self) -> float:
        return self.forward + self.recompute + self.backward + self.head


def training_flops(load: Load, spec: ModelSpec, config: InstructConfig, first_kept: int) -> Flops:
    """Of training on `load` when the blocks below `first_kept` are recomputed. 2 N K a token and product; an adapter
    takes 2 r (N + K) forward and twice that backward."""
    forward = recompute = backward = 0.0
    for layer, ranks in enumerate(adapter_ranks(spec, config)[0]):
        products = {name: 2.0 * n * k for name in LINEARS for n, k in (spec.linear_shape(name),)}
        adapters = {name: 2.0 * rank * sum(spec.linear_shape(name)) for name, rank in ranks.items()}
        # 2 D for each pair, head and product: two of them forward, five backward.
        attention = 2.0 * load.pairs[spec.windows[layer]] * spec.num_heads * spec.head_dim
        forward += load.tokens * (sum(products.values()) + sum(adapters.values())) + 2 * attention
        backward += load.tokens * (sum(products.values()) + 2 * sum(adapters.values())) + 5 * attention
        if layer < first_kept:  # all but the last product, of which the adapter's own down projection is needed
            rank = ranks.get("down_proj", 0)
            less = products["down_proj"] + 2.0 * rank * spec.linear_shape("down_proj")[0]
            recompute += load.tokens * (sum(products.values()) + sum(adapters.values()) - less) + 2 * attention
    return Flops(forward, recompute, backward, 4.0 * load.supervised * spec.hidden_size * spec.vocab_size)


def evaluation_flops(load: Load, spec: ModelSpec, config: InstructConfig) -> float:
    """Of one evaluation: the forward, and the head without its gradient."""
    flops = training_flops(load, spec, config, 0)
    return flops.forward + flops.head / 2


def _pairs(lengths: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
    """Of each row, the keys that all its queries see."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return lengths * seen - seen * (seen - 1) // 2
