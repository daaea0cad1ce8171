"""What a step and an evaluation return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quatrain.engine.inputs import Batch
from quatrain.engine.outcomes import Pending


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` is the mean over its `num_response_tokens` supervised tokens (NaN for a caller's
    gradient), `grad_norm` that of the mean gradient before clipping. `skipped`: it was not finite, and nothing was
    updated."""

    loss: float
    num_response_tokens: int
    perplexity: float
    grad_norm: float
    tokens: int
    lr: float
    step: int
    skipped: bool


class PendingStep:
    """A step that was started. `result` waits until it is done."""

    def __init__(self, pending: Pending, batches: Sequence[Batch], loss: float | None = None) -> None:
        self._pending, self._loss = pending, loss
        self._tokens = sum(batch.num_tokens for batch in batches)
        self._count = sum(batch.num_targets for batch in batches)

    def result(self) -> StepResult:
        outcome = self._pending.result()
        mean = outcome.loss_sum / self._count if self._loss is None else self._loss
        return StepResult(
            loss=mean,
            num_response_tokens=self._count,
            perplexity=perplexity(mean),
            grad_norm=outcome.grad_norm,
            tokens=self._tokens,
            lr=outcome.lr,
            step=outcome.step,
            skipped=outcome.skipped,
        )


@dataclass(frozen=True)
class BatchResult:
    """Token-weighted mean loss over all supervised tokens."""

    avg_loss: float
    total_response_tokens: int
    perplexity: float


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
