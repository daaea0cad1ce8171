"""What a run will take, from its preparation: tokens, FLOPs, disk, and, with measured rates, time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quatrain.data.row import Row
from quatrain.train.batching import Epoch
from quatrain.train.preflight import DiskNeed, disk_need
from quatrain.train.workload import Flops, Load, evaluation_flops, training_flops

if TYPE_CHECKING:
    from quatrain.train.run import Preparation


@dataclass(frozen=True)
class Rates:
    """Measured seconds: `forward`, `recompute` and `backward` a token and layer, `head` a supervised token and
    vocabulary entry, `other` a token, `update` a trainable parameter, `fixed` a micro-batch. `spread` is the
    slowest measured step over the fastest; `tokens` were in a step."""

    forward: float
    recompute: float
    backward: float
    head: float
    other: float
    update: float
    fixed: float
    spread: float
    tokens: int


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of training and evaluation, without loading the model and without sample answers. The model of a step
    is good to about 15 percent; `least` and `most` add to that what the measurement itself varied by."""

    seconds: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: float, spread: float) -> TimeEstimate:
        return cls(seconds, seconds / (1.1 * spread), seconds * 1.15 * spread)


class Forecast:
    """Of one prepared run. Nothing is read or measured here."""

    def __init__(self, it: Preparation) -> None:
        self.it = it
        self.spec, self.config = it.source.spec, it.config
        self.epochs = it.batching.length.epochs_done(it.total_steps)

    @cached_property
    def epoch(self) -> Load:
        """One epoch of the training rows, each as often as its weight says."""
        return Load.of(self.it.batching.rows.select(self._first.order), self.spec.windows)

    @cached_property
    def validation(self) -> Load:
        return Load.of(self.it.prepared.validation, self.spec.windows)

    @cached_property
    def flops(self) -> Flops:
        """Of training, without the evaluations."""
        return training_flops(self.epoch.times(self.epochs), self.spec, self.config, self.it.layout.first_kept)

    @property
    def evaluation_flops(self) -> float:
        return self.it.evaluations * evaluation_flops(self.validation, self.spec, self.config)

    @property
    def trainable(self) -> int:
        return sum(parameters for _, parameters in self.it.modules().values())

    @property
    def answers(self) -> int:
        """Sample answers that the run generates. Their time is not estimated: no rate is one of single tokens."""
        return self.it.evaluations * len(self.it.prompts)

    def time(self, rates: Rates) -> TimeEstimate:
        """Training and evaluation at the measured rates, without sample answers."""
        layers, tokens = self.spec.num_layers, self.epoch.tokens * self.epochs
        blocks = layers * (rates.forward + rates.backward) + self.it.layout.first_kept * rates.recompute
        head = rates.head * self.spec.vocab_size
        seconds = tokens * (blocks + rates.other) + self.epoch.supervised * self.epochs * head
        seconds += self.it.total_steps * self.trainable * rates.update
        seconds += self._micro_batches * rates.fixed
        once = self.validation.tokens * (layers * rates.forward + rates.other) + self.validation.supervised * head / 2
        return TimeEstimate.of(seconds + self.it.evaluations * once, rates.spread)

    def disk(self) -> DiskNeed:
        settings = self.it.settings
        weights = sum(entry.nbytes for entry in self.it.plan.entries if entry.group == "weights")
        cached = weights if settings.engine.cache and self.config.quantize == "nf4" else 0
        folder = Path(settings.run.out or ".").expanduser()
        return disk_need(folder, self.trainable, self.it.kept_checkpoints, cached)

    def sample(self) -> list[Row]:
        """The rows of a micro-batch of middling size."""
        first = self._first
        tokens = np.add.reduceat(first.rows.lengths[first.order], first.bounds[:-1])
        at = int(np.argsort(tokens, kind="stable")[len(tokens) // 2])
        return [first.rows[int(place)] for place in first.order[first.bounds[at] : first.bounds[at + 1]]]

    def as_json(self) -> dict[str, Any]:
        """All but the time, for machines."""
        steps = self.it.total_steps
        return {
            "total_steps": steps,
            "largest_micro_batch": self.it.batching.length.largest_micro_batch,
            "epochs": self.epochs,
            "evaluations": self.it.evaluations,
            "tokens": {
                "epoch": int(self.epoch.tokens),
                "step": self.epoch.tokens * self.epochs / steps,
                "run": int(self.epoch.tokens * self.epochs),
                "supervised_epoch": int(self.epoch.supervised),
            },
            "flops": {**asdict(self.flops), "evaluation": self.evaluation_flops,
                      "run": self.flops.total + self.evaluation_flops},
            "disk": self.disk().as_json(),
        }  # fmt: skip

    @cached_property
    def _first(self) -> Epoch:
        return self.it.batching.epoch(0)

    @property
    def _micro_batches(self) -> float:
        return (len(self._first.bounds) - 1) * self.epochs
