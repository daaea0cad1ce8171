"""What a run tells whoever watches it. The run calls these; the command line prints, tests record, a library user may
ignore. Nothing here may change the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quatrain.train.run import Preparation


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step, as `metrics.jsonl` has it, and its place in the run."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    response_tokens: int
    tokens_per_s: float
    skipped: bool


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    step: int
    eval_loss: float
    eval_perplexity: float
    best: bool


class Reporter:
    """Does nothing with what it is told. Subclass it to show or record some of it."""

    def notice(self, text: str) -> None:
        """Something the user should know: a fallback and its reason, a rule that was applied."""

    def warning(self, text: str) -> None:
        """Something that is probably wrong."""

    def phase(self, text: str) -> None:
        """A slow piece of work begins."""

    def prepared(self, preparation: Preparation) -> None:
        """Everything is known and checked; the weights are read next."""

    def started(self, step: int, total_steps: int) -> None:
        """Training begins, or goes on after `step` finished steps."""

    def step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation is done."""

    def saved(self, path: Path, what: str) -> None:
        """A checkpoint or an adapter is complete on disk."""

    def stopped(self) -> None:
        """No more steps."""


class Reporters(Reporter):
    """Tells several reporters the same, in their order."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def notice(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.notice(text)

    def warning(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.warning(text)

    def phase(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.phase(text)

    def prepared(self, preparation: Preparation) -> None:
        for reporter in self.reporters:
            reporter.prepared(preparation)

    def started(self, step: int, total_steps: int) -> None:
        for reporter in self.reporters:
            reporter.started(step, total_steps)

    def step(self, record: StepRecord) -> None:
        for reporter in self.reporters:
            reporter.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        for reporter in self.reporters:
            reporter.evaluation(record)

    def saved(self, path: Path, what: str) -> None:
        for reporter in self.reporters:
            reporter.saved(path, what)

    def stopped(self) -> None:
        for reporter in self.reporters:
            reporter.stopped()
