"""Whole training steps: tokens a second, percent of the product peak, planned and measured memory.

Each length runs in a fresh process, so that its peak memory is its own. Before timing, the loss must be finite and
every adapter must have a gradient.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from quatrain.config import InstructConfig
from quatrain.errors import KernelError, QuatrainError
from quatrain.profile.limits import Limits
from quatrain.profile.report import rows
from quatrain.profile.spans import Span

if TYPE_CHECKING:
    from quatrain.data.row import Row
    from quatrain.train.pipeline import InstructPipeline

WARM_UP = 2


@dataclass(frozen=True)
class Request:
    """What the other process is to do. `options` are those of `InstructConfig`; a step is one micro-batch of `tokens`
    tokens in rows of `row`, all of them supervised."""

    model: str
    shape: str | None
    tokens: int
    row: int
    threads: int
    repeats: int
    options: dict[str, Any]


def row(measured: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """What `measure_apart` gave, with rates and percents: of the step by its products alone, of each op by the limit
    that binds it."""
    if "error" in measured:
        return measured
    spans = [Span(**span) for span in measured["spans"]]
    step = Span("", None, "step", 1, measured["ms"] / 1e3, 0.0, sum(span.flops for span in spans))
    (whole,) = rows([step], limits)
    rest = {name: value for name, value in measured.items() if name != "spans"}
    return {
        **rest,
        "tokens_per_second": measured["tokens"] / step.seconds,
        "gflops": whole["gflops"],
        "percent_of_peak": whole["percent_of_limit"],
        "ops": rows(spans, limits),
    }


def measure_apart(request: Request) -> dict[str, Any]:
    """`measure` in a fresh process. A run that fails, or does not fit, gives its "error" in place of numbers."""
    words = [sys.executable, "-m", "quatrain.bench.steps", json.dumps(asdict(request))]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"tokens": request.tokens, "error": f"the process ended with code {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(request: Request) -> dict[str, Any]:
    """Median of `repeats` optimizer steps in this process, and the spans of one more, as JSON values.

    Raises KernelError at the gate, PlanError where the step does not fit."""
    import torch

    from quatrain.bench.shapes import open_model
    from quatrain.train.pipeline import InstructPipeline

    torch.set_num_threads(request.threads)
    own = {"max_seq_len": request.row, "micro_batch_tokens": request.tokens}
    if request.shape:
        own["cache"] = False  # random weights have no file that the cache could know them by
    pipe = InstructPipeline.from_source(
        open_model(request.model, request.shape), InstructConfig(**request.options, **own)
    )
    stream = _rows(request, pipe.spec.vocab_size)
    for _ in range(WARM_UP):
        loss = pipe.train_micro_batches([stream]).loss
    _gate(pipe, loss)
    seconds = []
    for _ in range(request.repeats):
        start = time.perf_counter()
        pipe.train_micro_batches([stream])
        seconds.append(time.perf_counter() - start)
    peak = _peak_bytes(pipe.layout.device)
    pipe.profiler.enabled = True
    pipe.train_micro_batches([stream])
    return {
        "tokens": request.tokens,
        "rows": len(stream),
        "ms": 1e3 * median(seconds),
        "all_ms": [1e3 * each for each in seconds],
        "recomputed_blocks": pipe.layout.first_kept,
        "planned_bytes": pipe.plan().total_bytes,
        "measured_peak_bytes": peak,
        "loss": loss,
        "spans": [asdict(span) for span in pipe.profiler.by_op()],
    }


def _peak_bytes(device: str) -> int:
    """Of the memory that the plan is about. On a GPU all that is taken, by whomever: torch gives nothing back."""
    import torch

    from quatrain.memory.process import peak_resident_bytes

    if device == "cpu":
        return peak_resident_bytes()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _rows(request: Request, vocab: int) -> list[Row]:
    import torch

    from quatrain.data.row import Row

    ids = torch.randint(vocab, (request.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    cut = [tuple(ids[at : at + request.row]) for at in range(0, request.tokens, request.row)]
    return [Row(row, row) for row in cut]


def _gate(pipe: InstructPipeline, loss: float) -> None:
    """After an update, when no B is zero any more, every A and every B has a gradient."""
    if not math.isfinite(loss):
        raise KernelError(f"the loss of step {WARM_UP} is {loss}: nothing is timed")
    still = [name for name, grad in pipe.adapters.named_grads().items() if not bool(grad.any())]
    if still:
        raise KernelError(f"{len(still)} adapters have no gradient, the first is {still[0]}: nothing is timed")


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    try:
        result = measure(request)
    except QuatrainError as error:
        result = {"tokens": request.tokens, "error": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
