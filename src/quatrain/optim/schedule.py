"""Learning rate as a pure function of the optimizer step: nothing to save, nothing to restore, nothing to drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then decay towards a floor. Steps are optimizer steps, counted from 1 to `total_steps`.

    Warm-up rises linearly: step s of `warmup_steps` W runs at peak * s / W, so step W is the first at the peak. The
    decay spans the steps after the first one at the peak and is placed so that it would meet the floor one step after
    the last: the last step still learns. `floor` is a fraction of the peak.
    """

    kind: ScheduleKind
    peak: float
    total_steps: int
    warmup_steps: int = 0
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        """The learning rate that optimizer step `step` (1 is the first) uses. Steps past the end stay at the floor."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * (self.floor + (1.0 - self.floor) * self._decay(step))

    def _decay(self, step: int) -> float:
        """1 at the first peak step, falling to 0 at total_steps + 1."""
        if self.kind == "constant":
            return 1.0
        start = max(self.warmup_steps, 1)
        done = min(1.0, (step - start) / max(1, self.total_steps + 1 - start))
        return 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def warmup_steps_of(total_steps: int, *, steps: int | None, ratio: float) -> int:
    """Optimizer steps of warm-up: `steps` when given, else `ratio` of the run, rounded up; never more than the run."""
    wanted = steps if steps is not None else math.ceil(round(ratio * total_steps, 9))
    return min(wanted, total_steps)
