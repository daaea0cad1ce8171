"""The training loop: one optimizer step after another, with evaluation, checkpoints and the reasons to stop.

Everything is counted in optimizer steps. After each step, in this order: metrics, evaluation if due (with the best
adapter saved at once), checkpoint if due, rotation. A stop request is honoured between the step and the evaluation; the
evaluation that was due then is made first thing on resume, so that the two runs stay one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quatrain.checkpoint.resume import rotate, save_checkpoint
from quatrain.config import TrainOptions
from quatrain.data.row import Row
from quatrain.errors import QuatrainError
from quatrain.optim.schedule import Schedule
from quatrain.train.batching import Batching, MicroBatch
from quatrain.train.early_stopping import BestTracker
from quatrain.train.guards import Guards
from quatrain.train.interrupt import StopRequest
from quatrain.train.metrics import MetricsLog
from quatrain.train.preflight import ADAPTER, CHECKPOINTS, METRICS_FILE
from quatrain.train.reporter import EvalRecord, Reporter, StepRecord
from quatrain.train.watch import Watch

if TYPE_CHECKING:
    import torch

Ending = Literal["finished", "stopped early", "interrupted"]


class StepResult(Protocol):
    """What the loop reads of a step's result."""

    @property
    def loss(self) -> float: ...
    @property
    def num_response_tokens(self) -> int: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def skipped(self) -> bool: ...


class Started(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult: ...


class BatchResult(Protocol):
    """What the loop reads of an evaluation."""

    @property
    def avg_loss(self) -> float: ...
    @property
    def perplexity(self) -> float: ...


class Pipeline(Protocol):
    """What the loop needs of an engine; `InstructPipeline` is one."""

    @property
    def steps_in_flight(self) -> int: ...
    def set_learning_rate(self, lr: float) -> None: ...
    def start_step(self, micro_batches: list[MicroBatch]) -> Started: ...
    def evaluate(self, samples: Sequence[Row]) -> BatchResult: ...
    def state(self) -> Mapping[str, torch.Tensor]: ...
    def save_adapter(self, folder: Path) -> object: ...


@dataclass(frozen=True)
class _InFlight:
    """A step that was started and whose result is still to be read."""

    step: int
    lr: float
    micro_batches: list[MicroBatch]
    started: Started


@dataclass
class Progress:
    """Where a run stands. Together with the pipeline's state and the options it determines everything that follows."""

    step: int = 0
    evaluated_step: int = 0  # the last step whose evaluation, if one was due, is done
    tokens: int = 0
    response_tokens: int = 0
    skipped: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    misses: int = 0


class TrainingLoop:
    """Runs `pipeline` over `batching` until the last step, early stopping, a stop request or a guard's error."""

    def __init__(
        self,
        pipeline: Pipeline,
        batching: Batching,
        validation: Sequence[Row],
        schedule: Schedule,
        folder: Path,
        *,
        progress: Progress,
        identity: dict[str, Any],
        reporter: Reporter,
        stop: StopRequest,
        watch: Watch | None = None,
    ) -> None:
        """`identity` goes into every checkpoint beside the progress: options and hashes, for resume to compare.
        `watch` looks at the model on the way."""
        self.pipeline, self.batching, self.validation, self.schedule = pipeline, batching, validation, schedule
        self.folder, self.progress, self.identity = folder, progress, identity
        self.reporter, self.stop, self.watch = reporter, stop, watch
        self.options: TrainOptions = batching.options
        self.length = batching.length
        self.metrics = MetricsLog(folder / METRICS_FILE)
        self.best = BestTracker(self.options.patience, progress.best_loss, progress.best_step, progress.misses)
        self.guards = Guards(self.options.max_skipped_steps, reporter)
        self._in_flight: deque[_InFlight] = deque()
        self._read_at = time.perf_counter()

    def run(self) -> Ending:
        """Train to the end, or to the first reason to stop. A checkpoint of the last step exists when this returns."""
        self.metrics.truncate(self.progress.step)
        self.reporter.started(self.progress.step, self.length.total_steps)
        try:
            saved_at = -1 if self._evaluate_if_due() else self.progress.step
            for micro_batches in self._remaining_steps():
                if self.best.exhausted:
                    break
                self._step(micro_batches)
                if not self.stop.requested:
                    self._evaluate_if_due()
                if self.stop.requested or self._save_is_due():
                    self._save_checkpoint()
                    saved_at = self.progress.step
                if self.stop.requested:
                    return "interrupted"
            if saved_at != self.progress.step:
                self._save_checkpoint()
            return "stopped early" if self.progress.step < self.length.total_steps else "finished"
        finally:
            self.reporter.stopped()

    def _remaining_steps(self) -> Iterator[list[MicroBatch]]:
        epoch, index = self.length.position(self.progress.step)
        while self.progress.step < self.length.total_steps:
            for micro_batches in self.batching.epoch(epoch).starting_at(index):
                if self.progress.step == self.length.total_steps:
                    return
                yield micro_batches
            epoch, index = epoch + 1, 0

    def _step(self, micro_batches: list[MicroBatch]) -> None:
        """Starts a step, and reads results until no more than the pipeline wants are left unread."""
        if not self._in_flight:
            self._read_at = time.perf_counter()
        self.progress.step += 1
        lr = self.schedule(self.progress.step)
        self.pipeline.set_learning_rate(lr)
        started = self.pipeline.start_step(micro_batches)
        self._in_flight.append(_InFlight(self.progress.step, lr, micro_batches, started))
        self._read_results(0 if self._measures(self.progress.step) else self.pipeline.steps_in_flight)

    def _measures(self, step: int) -> bool:
        """Whether the model is measured after `step`: only while the state on the device is still that step's."""
        present = step == self.progress.step
        return present and self.watch is not None and (self.watch.is_due(step) or self._evaluates())

    def _read_results(self, leave: int = 0) -> None:
        """Reads the results of all steps in flight but the last `leave`. The state on the device is that of the last
        started step: whoever looks at it reads all results first."""
        problem = None
        while len(self._in_flight) > (0 if problem else leave):
            found = self._read(self._in_flight.popleft())
            problem = problem or found
        if problem is not None:
            self._save_checkpoint()
            raise problem

    def _read(self, step: _InFlight) -> QuatrainError | None:
        """Metrics of one step; the error that should end the run, or None."""
        progress, result = self.progress, step.started.result()
        now = time.perf_counter()
        seconds, self._read_at = now - self._read_at, now
        progress.tokens += result.tokens
        progress.response_tokens += result.num_response_tokens
        progress.skipped += result.skipped
        record = StepRecord(
            step=step.step,
            total_steps=self.length.total_steps,
            epoch=round(self.length.epochs_done(step.step), 4),
            loss=result.loss,
            lr=step.lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            response_tokens=result.num_response_tokens,
            tokens_per_s=round(result.tokens / max(seconds, 1e-9), 1),
            skipped=result.skipped,
        )
        line = asdict(record)
        del line["total_steps"]
        if self.watch is not None and self._measures(step.step):
            line |= self.watch.measure()
        self.metrics.append(line)
        self.reporter.step(record)
        return self.guards.problem(step.step, result, step.micro_batches)

    def _evaluate_if_due(self) -> bool:
        step = self.progress.step
        if step == self.progress.evaluated_step or not self._evaluates():
            return False
        self._read_results()
        self.reporter.phase(f"evaluating {len(self.validation)} rows")
        result = self.pipeline.evaluate(self.validation)
        improved = self.best.update(step, result.avg_loss)
        answers = self.watch.answers() if self.watch is not None else {}
        line = {"step": step, "eval_loss": result.avg_loss, "eval_perplexity": result.perplexity}
        self.metrics.append({**line, **answers})
        self.reporter.evaluation(EvalRecord(step, result.avg_loss, result.perplexity, improved))
        if improved:
            self.pipeline.save_adapter(self.folder / ADAPTER)
            self.reporter.saved(self.folder / ADAPTER, "adapter")
        self.progress.evaluated_step = step
        self.progress.best_loss, self.progress.best_step = self.best.best_loss, self.best.best_step
        self.progress.misses = self.best.misses
        return True

    def _evaluates(self) -> bool:
        """Whether there is an evaluation after the present step."""
        return bool(self.validation) and self._is_due(self.options.eval_every)

    def _save_is_due(self) -> bool:
        return self._is_due(self.options.save_every)

    def _is_due(self, every: int | str) -> bool:
        step = self.progress.step
        if step == 0:
            return False
        if step == self.length.total_steps:
            return True
        return step % every == 0 if isinstance(every, int) else self.length.ends_epoch(step)

    def _save_checkpoint(self) -> None:
        self._read_results()
        record = {"progress": asdict(self.progress), **self.identity}
        path = save_checkpoint(self.folder / CHECKPOINTS, self.progress.step, self.pipeline.state(), record)
        self.reporter.saved(path, "checkpoint")
        rotate(self.folder / CHECKPOINTS, self.options.keep_checkpoints, self.progress.best_step)
