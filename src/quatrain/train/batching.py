"""Which rows form which optimizer step: one function that both counts the steps of a run and deals them out.

Words: a *row* is one example; a *micro-batch* is the rows that go through the model at once, as one packed stream;
an *optimizer step* is one or more micro-batches and one update, normalised by the supervised tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quatrain.config import TrainOptions
from quatrain.data.order import Places, Share, epoch_order
from quatrain.data.pack import pack
from quatrain.data.row import Row
from quatrain.data.rows import Rows
from quatrain.errors import ConfigError, DataError

MicroBatch = list[Row]
Step = list[MicroBatch]

MOST_EPOCHS = 100_000


@dataclass(frozen=True)
class Epoch:
    """The optimizer steps of one epoch; the rows of a step are read when it is asked for.

    `order` are places in `rows`; micro-batch m holds order[bounds[m]:bounds[m+1]], and step s the micro-batches
    steps[s] to steps[s+1]-1.
    """

    rows: Rows
    order: Places
    bounds: Places
    steps: Places

    def __len__(self) -> int:
        return len(self.steps) - 1

    def __getitem__(self, step: int) -> Step:
        at = range(len(self))[step]
        return [
            [self.rows[int(place)] for place in self.order[begin:end]]
            for begin, end in pairwise(self.bounds[self.steps[at] : self.steps[at + 1] + 1])
        ]

    def __iter__(self) -> Iterator[Step]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[Step]:
        """The steps from `step` on."""
        return (self[at] for at in range(step, len(self)))

    @property
    def largest_micro_batch(self) -> int:
        """Tokens."""
        return int(_sums(self.rows.lengths[self.order], self.bounds).max())

    @property
    def most_micro_batches(self) -> int:
        """Of one step."""
        return int(np.diff(self.steps).max())

    def shapes(self) -> set[tuple[int, int, int]]:
        """(most tokens, most supervised tokens, number) of the micro-batches of a step, each that occurs."""
        tokens, supervised = (_sums(v[self.order], self.bounds) for v in (self.rows.lengths, self.rows.supervised))
        first = self.steps[:-1]
        most = [np.maximum.reduceat(sums, first).tolist() for sums in (tokens, supervised)]
        return set(zip(*most, np.diff(self.steps).tolist(), strict=True))


@dataclass(frozen=True)
class Batching:
    """Deals `rows` into optimizer steps, epoch by epoch: a pure function of the rows, the options and the seed.

    By rows (default): `batch_size` rows a micro-batch, `accumulation` micro-batches a step; the last step of an epoch
    takes what is left. By tokens (`batch_tokens`): rows are packed, none split, none lost, up to that many a step.
    `micro_batch_tokens`, when given, cuts a micro-batch that holds more tokens into several; that changes no result
    beyond rounding, because a step divides by its own token count however it is cut. `shares` says how often an epoch
    takes which rows; empty: each once.
    """

    rows: Rows
    options: TrainOptions
    seed: int
    micro_batch_tokens: int | None = None
    shares: Sequence[Share] = ()

    def epoch(self, epoch: int) -> Epoch:
        """The optimizer steps of one epoch (0 is the first), in order."""
        order = epoch_order(self.shares or [Share(len(self.rows))], self.seed, epoch)
        lengths = self.rows.lengths[order]
        if self.options.batch_tokens is None:
            bounds, per_step = _every(self.options.batch_size, len(order)), self.options.accumulation
        else:
            bounds, per_step = pack(lengths, self.options.batch_tokens), 1
            self._refuse_longer(lengths, order, self.options.batch_tokens)
        steps = _every(per_step, len(bounds) - 1)
        if self.micro_batch_tokens is not None:
            parts = [pack(lengths[a:b], self.micro_batch_tokens)[1:] + a for a, b in pairwise(bounds)]
            cuts = np.cumsum([0, *map(len, parts)])
            bounds, steps = np.concatenate([[0], *parts]), cuts[steps]
        return Epoch(self.rows, order, bounds, steps)

    def _refuse_longer(self, lengths: Places, order: Places, capacity: int) -> None:
        at = int(lengths.argmax())
        if lengths[at] > capacity:
            source = self.rows[int(order[at])].source or "a row"
            raise DataError(
                f"{source}: {lengths[at]} tokens do not fit a step of {capacity}",
                hint="raise batch_tokens or lower max_seq_len",
            )

    @cached_property
    def length(self) -> RunLength:
        """Steps of the whole run and its largest micro-batch, from dealing out every epoch once. Raises ConfigError for
        more than `MOST_EPOCHS` of them, which would take minutes to count alone."""
        limit = self.options.max_steps
        epochs = -(-limit // len(self.epoch(0))) if limit else self.options.num_epochs
        if epochs > MOST_EPOCHS:
            asked = f"max_steps {limit}" if limit else f"epochs {epochs}"
            raise ConfigError(
                f"{asked}: {epochs:,} epochs over {len(self.rows)} rows, want at most {MOST_EPOCHS:,}",
                hint="give a smaller number; Ctrl-C ends a run at any step, with a checkpoint",
            )
        steps_of_epoch: list[int] = []
        largest, accumulated = 0, 1
        while sum(steps_of_epoch) < limit if limit else len(steps_of_epoch) < self.options.num_epochs:
            epoch = self.epoch(len(steps_of_epoch))
            steps_of_epoch.append(len(epoch))
            largest = max(largest, epoch.largest_micro_batch)
            accumulated = max(accumulated, epoch.most_micro_batches)
        return RunLength(tuple(steps_of_epoch), limit or sum(steps_of_epoch), largest, accumulated)


def _every(size: int, n: int) -> Places:
    """0, size, 2 * size, ... and n."""
    return np.append(np.arange(0, n, size, dtype=np.int64), n)


def _sums(values: NDArray[Any], bounds: Places) -> Places:
    """The sum of the values between each two bounds."""
    return np.add.reduceat(values, bounds[:-1], dtype=np.int64)


@dataclass(frozen=True)
class RunLength:
    """How long a run is, in optimizer steps, and what its largest step holds."""

    steps_of_epoch: tuple[int, ...]
    total_steps: int
    largest_micro_batch: int  # tokens
    most_micro_batches: int  # of one optimizer step

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, index within it) of the optimizer step that follows `step` finished ones."""
        left = step
        for epoch, steps in enumerate(self.steps_of_epoch):
            if left < steps:
                return epoch, left
            left -= steps
        return len(self.steps_of_epoch), left

    def epochs_done(self, step: int) -> float:
        """Epochs after `step` finished optimizer steps, as a fraction: 1.5 is the middle of the second."""
        epoch, index = self.position(step)
        return epoch + (index / self.steps_of_epoch[epoch] if epoch < len(self.steps_of_epoch) else 0.0)

    def occurrences(self, every: int | str) -> int:
        """How often something happens in the run that is due every so many steps, or every "epoch", and at the end."""
        return -(-self.total_steps // every) if isinstance(every, int) else len(self.steps_of_epoch)

    def ends_epoch(self, step: int) -> bool:
        """Whether finished optimizer step `step` was the last of its epoch."""
        return self.position(step)[1] == 0
