"""Which rows form which optimizer step: one function that both counts the steps of a run and deals them out.

Words: a *row* is one example; a *micro-batch* is the rows that go through the model at once, as one packed stream;
an *optimizer step* is one or more micro-batches and one update, normalised by the supervised tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from quatrain.config import TrainOptions
from quatrain.data.order import epoch_order
from quatrain.data.pack import pack
from quatrain.data.row import Row

MicroBatch = list[Row]
Step = list[MicroBatch]


@dataclass(frozen=True)
class Batching:
    """Deals `rows` into optimizer steps, epoch by epoch: a pure function of the rows, the options and the seed.

    By rows (default): `batch_size` rows a micro-batch, `accumulation` micro-batches a step; the last step of an epoch
    takes what is left. By tokens (`batch_tokens`): rows are packed, none split, none lost, up to that many a step.
    `micro_batch_tokens`, when given, cuts a micro-batch that holds more tokens into several; that changes no result
    beyond rounding, because a step divides by its own token count however it is cut.
    """

    rows: list[Row]
    options: TrainOptions
    seed: int
    micro_batch_tokens: int | None = None

    def epoch(self, epoch: int) -> list[Step]:
        """The optimizer steps of one epoch (0 is the first), in order."""
        shuffled = [self.rows[index] for index in epoch_order(len(self.rows), self.seed, epoch)]
        if self.options.batch_tokens is None:
            size, accumulation = self.options.batch_size, self.options.accumulation
            micro_batches = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
            groups = [micro_batches[at : at + accumulation] for at in range(0, len(micro_batches), accumulation)]
        else:
            groups = [[packed] for packed in pack(shuffled, self.options.batch_tokens)]
        return [[part for micro_batch in group for part in self._cut(micro_batch)] for group in groups]

    def _cut(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        if self.micro_batch_tokens is None:
            return [micro_batch]
        parts: list[MicroBatch] = [[]]
        tokens = 0
        for row in micro_batch:
            if parts[-1] and tokens + len(row) > self.micro_batch_tokens:
                parts.append([])
                tokens = 0
            parts[-1].append(row)
            tokens += len(row)
        return parts

    @cached_property
    def length(self) -> RunLength:
        """Steps of the whole run and its largest micro-batch, from dealing out every epoch once."""
        limit = self.options.max_steps
        steps_of_epoch: list[int] = []
        largest, accumulated = 0, 1
        while sum(steps_of_epoch) < limit if limit else len(steps_of_epoch) < self.options.num_epochs:
            steps = self.epoch(len(steps_of_epoch))
            steps_of_epoch.append(len(steps))
            largest = max(largest, max(sum(map(len, part)) for step in steps for part in step))
            accumulated = max(accumulated, max(map(len, steps)))
        return RunLength(tuple(steps_of_epoch), limit or sum(steps_of_epoch), largest, accumulated)


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

    def ends_epoch(self, step: int) -> bool:
        """Whether finished optimizer step `step` was the last of its epoch."""
        return self.position(step)[1] == 0
