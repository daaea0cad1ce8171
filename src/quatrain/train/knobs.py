"""What each knob would save: a run's memory and work again with one option changed, really laid out.

A saving is what the plan says, so it can be nothing: with `checkpoint=auto` freed memory is used to recompute less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quatrain.config import InstructConfig, TrainOptions
from quatrain.data.rows import Rows
from quatrain.engine.layout import Layout
from quatrain.errors import ConfigError, PlanError
from quatrain.model.adapters import match_targets
from quatrain.model.spec import ATTENTION_LINEARS, ModelSpec
from quatrain.train.batching import Batching
from quatrain.train.workload import Load, training_flops

Lay = Callable[[InstructConfig, int], Layout]
"""The layout of a configuration, for steps of so many micro-batches. Raises PlanError where it does not fit."""


@dataclass(frozen=True)
class Knob:
    """One option with another value. `saved_bytes` of the planned peak (negative: it takes more; None: it does not
    fit), and `work`: FLOPs of training relative to the run's."""

    option: str
    value: Any
    saved_bytes: int | None
    work: float | None
    cost: str

    def as_json(self) -> dict[str, Any]:
        return {"option": self.option, "value": self.value, "saved_bytes": self.saved_bytes, "work": self.work,
                "cost": self.cost}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A run, or a plan without data: then `batching` is None and rows of full length are supposed."""

    spec: ModelSpec
    config: InstructConfig
    layout: Layout
    lay: Lay
    batching: Batching | None = None
    validation: Rows | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row; a micro-batch holds it in any case."""
        if self.batching is None:
            return min(self.config.max_seq_len, self.config.capacity)
        return max(
            int(rows.lengths.max(initial=0)) for rows in (self.batching.rows, self.validation) if rows is not None
        )


@dataclass(frozen=True)
class _Change:
    """An option's other value, what it costs besides work, and the run that it makes."""

    option: str
    value: Any
    cost: str
    config: InstructConfig
    batching: Batching | None


def knobs(it: Setup) -> list[Knob]:
    """Every knob that makes a difference, the largest saving first, what does not fit last."""
    found = [_try(it, change) for change in _changes(it)]
    worth = [knob for knob in found if knob.saved_bytes is None or abs(knob.saved_bytes) >= 1_000_000]
    return sorted(worth, key=lambda knob: (knob.saved_bytes is None, -(knob.saved_bytes or 0)))


def _changes(it: Setup) -> Iterator[_Change]:
    config, layers = it.config, it.spec.num_layers

    def engine(option: str, value: Any, cost: str) -> _Change:
        return _Change(option, value, cost, config.model_copy(update={option: value}), it.batching)

    if it.layout.first_kept < layers:
        yield engine("checkpoint", "block", "same result; every block is computed again on the way back")
    if it.layout.first_kept > 0:
        yield engine("checkpoint", "none", "same result; nothing is computed twice")
    half = max(config.capacity // 2, it.longest, 2)
    if half < config.capacity:
        yield _of_data(it, "micro_batch_tokens", half, "same result; a step is computed in more micro-batches")
    if it.batching is not None:
        yield from _data_changes(it, it.batching)
    if config.lora_rank > 1:
        yield engine("lora_rank", config.lora_rank // 2, "adapters of half the size learn less")
    adapted = {name for _, name in match_targets(it.spec, config.lora_targets)}
    if adapted > set(ATTENTION_LINEARS):
        yield engine("lora_targets", list(ATTENTION_LINEARS), "the MLPs get no adapters")
    if config.quantize == "nf4":
        yield engine("quantize", "none", "the base as it is, not in 4 bits: other results")
    else:
        yield engine("quantize", "nf4", "the base in 4 bits: other results")
    accumulates = it.batching is not None and it.batching.length.most_micro_batches > 1
    if config.clip == "global" and not accumulates:
        yield engine("clip", "layer", "each layer is clipped by its own norm: other results")


def _data_changes(it: Setup, batching: Batching) -> Iterator[_Change]:
    options = batching.options
    if options.batch_tokens is None and options.batch_size > 1:
        half = options.model_copy(update={"batch_size": options.batch_size // 2})
        yield _of_data(it, "batch_size", options.batch_size // 2, "steps of half the rows, twice as many", train=half)
    lengths = np.sort(batching.rows.lengths)
    limit = int(lengths[-(-95 * len(lengths) // 100) - 1])
    if limit < it.longest:
        dropped = int((lengths > limit).sum())
        cost = f"{dropped} rows ({dropped / len(lengths):.0%}) are too long and left out"
        yield _of_data(it, "max_seq_len", limit, cost)


def _of_data(it: Setup, option: str, value: int, cost: str, *, train: TrainOptions | None = None) -> _Change:
    """A change of what a micro-batch holds; the engine's capacity follows."""
    config = it.config.model_copy(update={"max_seq_len": value} if option == "max_seq_len" else {})
    if it.batching is None:
        return _Change(option, value, cost, config.model_copy(update={"micro_batch_tokens": value}), None)
    batching = replace(it.batching, options=train or it.batching.options)
    if option == "micro_batch_tokens":
        batching = replace(batching, micro_batch_tokens=value)
    longest = it.longest
    if option == "max_seq_len":
        batching, longest = _shorter(batching, value), value
    capacity = max(batching.length.largest_micro_batch, longest)
    return _Change(option, value, cost, config.model_copy(update={"micro_batch_tokens": capacity}), batching)


def _shorter(batching: Batching, limit: int) -> Batching:
    """Without the rows of more than `limit` tokens; each share keeps its weight."""
    fits = batching.rows.lengths <= limit
    ends = np.cumsum([share.rows for share in batching.shares])
    counts = [int(part.sum()) for part in np.split(fits, ends[:-1])] if batching.shares else []
    shares = [replace(share, rows=rows) for share, rows in zip(batching.shares, counts, strict=True)]
    return replace(batching, rows=batching.rows.select(np.flatnonzero(fits)), shares=shares)


def _try(it: Setup, change: _Change) -> Knob:
    most = change.batching.length.most_micro_batches if change.batching is not None else 1
    try:
        layout = it.lay(change.config, most)
    except (PlanError, ConfigError):
        return Knob(change.option, change.value, None, None, "does not fit")
    # The process itself grows by a little meanwhile; that is not the knob's doing.
    saved = _without_process(it.layout) - _without_process(layout)
    work = _work(it, change.config, layout, change.batching) / _work(it, it.config, it.layout, it.batching)
    return Knob(change.option, change.value, saved, work, change.cost)


def _without_process(layout: Layout) -> int:
    groups = layout.plan.groups()
    return layout.plan.total_bytes - groups.get("process", 0)


def _work(it: Setup, config: InstructConfig, layout: Layout, batching: Batching | None) -> float:
    """FLOPs of an epoch, or of a token where there is no data."""
    if batching is not None:
        load = Load.of(batching.rows.select(batching.epoch(0).order), it.spec.windows)
    else:
        load = Load(1, 1, 1, dict.fromkeys(it.spec.windows, config.max_seq_len / 2))
    return training_flops(load, it.spec, config, layout.first_kept).total
