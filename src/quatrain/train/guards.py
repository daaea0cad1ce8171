"""Signs that a run is going wrong while its numbers still look fine, and when to stop for them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quatrain.errors import DataError, QuatrainError
from quatrain.train.batching import MicroBatch
from quatrain.train.reporter import Reporter

if TYPE_CHECKING:
    from quatrain.train.loop import StepResult

TOO_GOOD = 0.01  # nats per token: no model predicts unseen answers this well
TOO_GOOD_STEPS = 5


class Guards:
    """Looks at every step. Steps that were skipped for non-finite gradients are warned about and counted; so are losses
    that are too good to be true: below 0.01 from the very first step on, or a perplexity of exactly 1."""

    def __init__(self, max_skipped: int, reporter: Reporter) -> None:
        self.max_skipped, self.reporter = max_skipped, reporter
        self.skipped_in_a_row = 0
        self.too_good_in_a_row = 0

    def problem(self, step: int, result: StepResult, micro_batches: list[MicroBatch]) -> QuatrainError | None:
        """The error that should end the run after `step`, or None. Warnings go to the reporter."""
        if result.num_response_tokens == 0:
            return DataError(f"step {step} had no supervised token ({_rows(micro_batches)}): its loss means nothing")
        return self._skipped(step, result, micro_batches) or self._too_good(step, result)

    def _skipped(self, step: int, result: StepResult, micro_batches: list[MicroBatch]) -> QuatrainError | None:
        if not result.skipped:
            self.skipped_in_a_row = 0
            return None
        self.skipped_in_a_row += 1
        self.reporter.warning(
            f"step {step} skipped: gradients are not finite (loss {result.loss}, {_rows(micro_batches)})"
        )
        if self.skipped_in_a_row < self.max_skipped:
            return None
        return QuatrainError(
            f"{self.skipped_in_a_row} steps in a row had non-finite gradients, the last was step {step}; "
            "the adapter holds only finite values and a checkpoint was written",
            hint="lower --learning-rate, use --compute-dtype fp32, or look at the rows named above",
        )

    def _too_good(self, step: int, result: StepResult) -> QuatrainError | None:
        from_the_start = self.too_good_in_a_row == step - 1 and result.loss < TOO_GOOD
        if not (from_the_start or math.exp(min(result.loss, 700.0)) == 1.0):
            self.too_good_in_a_row = 0
            return None
        self.too_good_in_a_row += 1
        text = f"step {step} has loss {result.loss:.6f}: too good to be true for text that was never seen"
        if self.too_good_in_a_row == 1:
            self.reporter.warning(f"{text}; are the answers part of the prompts?")
        if self.too_good_in_a_row < TOO_GOOD_STEPS:
            return None
        return QuatrainError(
            f"{text}, for {TOO_GOOD_STEPS} steps in a row; a checkpoint was written",
            hint="look at `quatrain check`: which tokens are supervised? Or are these rows known by heart already?",
        )


def _rows(micro_batches: list[MicroBatch], most: int = 3) -> str:
    """`rows train.jsonl:4, train.jsonl:9 and 6 more`."""
    sources = [row.source or "?" for micro_batch in micro_batches for row in micro_batch]
    more = f" and {len(sources) - most} more" if len(sources) > most else ""
    return "rows " + ", ".join(sources[:most]) + more
