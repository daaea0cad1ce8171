"""Which evaluation was the best, and whether to go on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class BestTracker:
    """Remembers the lowest evaluation loss and counts the evaluations since then that did not beat it.

    NaN and infinity are never an improvement and count as a miss like any other. `patience` None never stops.
    """

    patience: int | None = None
    best_loss: float | None = None
    best_step: int | None = None
    misses: int = 0

    def update(self, step: int, loss: float) -> bool:
        """Record one evaluation; true when it is the best so far (an equal one is not)."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.misses = loss, step, 0
            return True
        self.misses += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return self.patience is not None and self.misses >= self.patience
