"""A pipeline without a model: it records what the training loop asks of it. Its losses are scripted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from quatrain.config import TrainOptions
from quatrain.data.row import Row
from quatrain.data.rows import Rows
from quatrain.optim.schedule import Schedule, warmup_steps_of
from quatrain.train.batching import Batching
from quatrain.train.interrupt import StopRequest
from quatrain.train.loop import Progress, TrainingLoop
from quatrain.train.reporter import EvalRecord, Reporter, StepRecord


def rows_of(number: int, tokens: int = 10) -> Rows:
    """`number` rows of `tokens` tokens whose last half is supervised; the first id tells the rows apart."""
    begin, answer = range(tokens - tokens // 2 - 1), range(1, tokens // 2 + 1)
    return Rows.of(Row.from_pair((i, *begin), answer, f"rows.jsonl:{i + 1}") for i in range(number))


@dataclass(frozen=True)
class Result:
    loss: float
    num_response_tokens: int
    grad_norm: float
    tokens: int
    skipped: bool


@dataclass(frozen=True)
class Evaluation:
    avg_loss: float
    perplexity: float


@dataclass(frozen=True)
class Started:
    pipeline: Standin
    value: Result

    def result(self) -> Result:
        self.pipeline.unread -= 1
        return self.value


class Standin:
    """`losses` and `eval_losses` are dealt out in order; when they run out, a slowly falling loss takes over."""

    def __init__(self, losses: list[float] | None = None, eval_losses: list[float] | None = None) -> None:
        self.losses, self.eval_losses = list(losses or []), list(eval_losses or [])
        self.steps: list[list[list[Row]]] = []
        self.rates: list[float] = []
        self.evaluations: list[int] = []
        self.adapters: list[int] = []
        self.counter = torch.zeros((), dtype=torch.int64)
        self.steps_in_flight, self.unread = 0, 0
        self.after_step = lambda: None

    def set_learning_rate(self, lr: float) -> None:
        self.rates.append(lr)

    def start_step(self, micro_batches: list[list[Row]]) -> Started:
        self.counter += 1
        self.steps.append(micro_batches)
        loss = self.losses.pop(0) if self.losses else 2.0 - 0.001 * int(self.counter)
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        self.after_step()
        supervised, tokens = sum(row.num_supervised for row in rows), sum(map(len, rows))
        self.unread += 1
        return Started(self, Result(loss, supervised, 1.0, tokens, not math.isfinite(loss)))

    def evaluate(self, samples: list[Row]) -> Evaluation:
        assert self.unread == 0
        self.evaluations.append(int(self.counter))
        loss = self.eval_losses.pop(0) if self.eval_losses else 1.0 - 0.001 * int(self.counter)
        return Evaluation(loss, math.exp(loss))

    def state(self) -> dict[str, torch.Tensor]:
        assert self.unread == 0, "a checkpoint before the results of all its steps"
        return {"step": self.counter, "master.q_proj.lora_B.weight": self.counter.float().reshape(1)}

    def save_adapter(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "step.txt").write_text(str(int(self.counter)))
        self.adapters.append(int(self.counter))


class Recorder(Reporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notices: list[str] = []
        self.records: list[StepRecord] = []
        self.evals: list[EvalRecord] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self.evals.append(record)


def loop_of(
    folder: Path,
    pipeline: Standin,
    options: TrainOptions,
    *,
    rows: int = 100,
    tokens: int = 10,
    validation: int = 4,
    progress: Progress | None = None,
    reporter: Reporter | None = None,
    stop: StopRequest | None = None,
) -> TrainingLoop:
    batching = Batching(rows_of(rows, tokens), options, seed=7)
    total = batching.length.total_steps
    warmup = warmup_steps_of(total, steps=options.warmup_steps, ratio=options.warmup_ratio)
    return TrainingLoop(
        pipeline,
        batching,
        rows_of(validation),
        Schedule(options.schedule, 1e-3, total, warmup, options.lr_floor),
        folder,
        progress=progress or Progress(),
        identity={"given": {}},
        reporter=reporter or Recorder(),
        stop=stop or StopRequest(),
    )
