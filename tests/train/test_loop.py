"""The training loop's own logic, on a stand-in for the engine."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from train.standin import Recorder, Standin, loop_of

from quatrain.checkpoint.resume import newest_complete
from quatrain.config import TrainOptions
from quatrain.errors import DataError, QuatrainError
from quatrain.train.interrupt import StopRequest
from quatrain.train.loop import Progress


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_steps_rates_and_metrics_agree(tmp_path: Path) -> None:
    """F1, E4: warm-up counts optimizer steps: 2 of 18, the peak at step 2, and a last step that still learns."""
    pipeline = Standin()
    options = TrainOptions(batch_size=3, accumulation=4, epochs=2, warmup_ratio=0.1)
    assert loop_of(tmp_path, pipeline, options).run() == "finished"
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert pipeline.rates == [line["lr"] for line in lines]
    assert pipeline.rates[0] == 0.5e-3 and pipeline.rates[1] == 1e-3 == max(pipeline.rates) and pipeline.rates[-1] > 0
    assert lines[8]["epoch"] == 1.0 and lines[-1]["epoch"] == 2.0
    assert set(lines[0]) == {
        "step", "epoch", "loss", "lr", "grad_norm", "tokens", "response_tokens", "tokens_per_s", "skipped",
    }  # fmt: skip
    assert lines[0]["tokens"] == 120 and lines[0]["response_tokens"] == 60
    assert pipeline.evaluations == [9, 18]
    assert next(line for line in metrics(tmp_path) if "eval_loss" in line)["eval_perplexity"] > 1


def test_packed_runs_count_one_kind_of_step(tmp_path: Path) -> None:
    """D4: ten steps of packs: metrics, learning rates, epochs and checkpoint names all go by that number."""
    pipeline = Standin()
    options = TrainOptions(batch_tokens=256, epochs=2, keep_checkpoints=9)
    assert loop_of(tmp_path, pipeline, options, rows=10, tokens=100).run() == "finished"
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 11)) and len(pipeline.rates) == 10
    assert [line["epoch"] for line in lines if line["step"] in (5, 10)] == [1.0, 2.0]
    assert kept(tmp_path) == ["step-000005", "step-000010"]


def test_best_adapter_is_kept_and_nan_counts_as_a_miss(tmp_path: Path) -> None:
    """F10: losses 1.0, 0.8, NaN, 0.9 with patience 2: the second is kept, NaN is a miss, the fourth ends the run. C3: a
    number that is missing is null, never 0."""
    pipeline = Standin(eval_losses=[1.0, 0.8, math.nan, 0.9, 0.95])
    options = TrainOptions(batch_size=10, max_steps=100, eval_every=10, patience=2)
    assert loop_of(tmp_path, pipeline, options).run() == "stopped early"
    assert pipeline.evaluations == [10, 20, 30, 40]
    assert pipeline.adapters == [10, 20] and (tmp_path / "adapter" / "step.txt").read_text() == "20"
    evals = [line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert evals == [1.0, 0.8, None, 0.9]  # a missing number is never written as 0
    checkpoint, _ = newest_complete(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 40
    assert checkpoint.progress["progress"]["best_step"] == 20


def test_resuming_a_run_that_stopped_early_does_not_train_on(tmp_path: Path) -> None:
    pipeline = Standin(eval_losses=[0.8, 0.9])
    options = TrainOptions(batch_size=10, max_steps=50, eval_every=10, patience=1)
    loop = loop_of(tmp_path, pipeline, options)
    loop.run()
    again = Standin()
    assert loop_of(tmp_path, again, options, progress=loop.progress).run() == "stopped early"
    assert again.steps == []


@pytest.mark.parametrize(
    ("keep", "best", "want"),
    [
        (2, 20, [20, 100]),
        (3, 20, [20, 80, 100]),
        (1, 20, [20, 100]),
        (2, 80, [80, 100]),
        (2, 100, [80, 100]),
        (9, 20, [20, 40, 60, 80, 100]),
    ],
)
def test_rotation_goes_by_step_number_and_spares_the_best(
    tmp_path: Path, keep: int, best: int, want: list[int]
) -> None:
    """F11: of the checkpoints at steps 20 to 100, two to keep and the best at 20: 20 and 100 remain."""
    pipeline = Standin(eval_losses=[0.5 if step == best else 0.9 for step in range(20, 101, 20)])
    options = TrainOptions(batch_size=10, max_steps=100, eval_every=20, save_every=20, keep_checkpoints=keep)
    loop_of(tmp_path, pipeline, options).run()
    assert kept(tmp_path) == [f"step-{step:06d}" for step in want]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path: Path, number: int) -> None:
    pipeline = Standin()
    pipeline.after_step = lambda: signal.raise_signal(number) if len(pipeline.steps) == 10 else None
    options = TrainOptions(batch_size=10, epochs=3, save_every=1000)
    before = signal.getsignal(number)
    with StopRequest() as stop:
        loop = loop_of(tmp_path, pipeline, options, stop=stop)
        assert loop.run() == "interrupted"
    assert signal.getsignal(number) is before
    assert kept(tmp_path) == ["step-000010"] and len(metrics(tmp_path)) == 10
    assert pipeline.evaluations == []  # one was due; it is made on resume, before the next step
    resumed = Standin()
    resumed.counter += 10
    assert loop_of(tmp_path, resumed, options, progress=loop.progress).run() == "finished"
    assert resumed.evaluations == [10, 20, 30] and len(resumed.steps) == 20


def test_a_second_signal_leaves_at_once() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_resume_deals_the_rows_that_were_next_and_cuts_the_metrics(tmp_path: Path) -> None:
    options = TrainOptions(batch_size=7, epochs=2, save_every=4)
    unbroken = Standin()
    (tmp_path / "a").mkdir()
    loop_of(tmp_path / "a", unbroken, options, rows=50).run()

    first = Standin()
    stop = StopRequest()
    first.after_step = lambda: stop.request() if len(first.steps) == 11 else None
    (tmp_path / "b").mkdir()
    loop_of(tmp_path / "b", first, options, rows=50, stop=stop).run()
    with open(tmp_path / "b" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 12, "loss": 1.0}\n{"step": 13, "lo\xff\0')  # a crash came later than the checkpoint
    checkpoint, _ = newest_complete(tmp_path / "b" / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 11
    second = Standin()
    second.counter += 11
    progress = Progress(**checkpoint.progress["progress"])
    loop_of(tmp_path / "b", second, options, rows=50, progress=progress).run()
    assert first.steps + second.steps == unbroken.steps
    assert first.rates + second.rates == unbroken.rates
    assert [line["step"] for line in metrics(tmp_path / "b") if "loss" in line] == list(range(1, 17))


def test_steps_without_finite_gradients_are_counted_and_end_the_run(tmp_path: Path) -> None:
    """G2: skipped steps are named with their rows, counted, and end the run when there are too many in a row."""
    reporter = Recorder()
    pipeline = Standin(losses=[2.0, math.nan, 2.0, math.inf, math.nan, math.nan])
    options = TrainOptions(batch_size=10, epochs=3, max_skipped_steps=3)
    loop = loop_of(tmp_path, pipeline, options, reporter=reporter)
    with pytest.raises(QuatrainError, match="3 steps in a row had non-finite gradients, the last was step 6"):
        loop.run()
    assert loop.progress.skipped == 4
    assert (
        len(reporter.warnings) == 4
        and "step 2 skipped" in reporter.warnings[0]
        and "rows.jsonl:" in reporter.warnings[0]
    )
    assert metrics(tmp_path)[1]["loss"] is None and metrics(tmp_path)[1]["skipped"] is True
    assert kept(tmp_path) == ["step-000006"]


def test_a_loss_too_good_to_be_true_warns_and_then_stops(tmp_path: Path) -> None:
    """D3: a loss below 0.01 from the first step on is said, and ends the run after five steps."""
    reporter = Recorder()
    loop = loop_of(tmp_path, Standin(losses=[0.001] * 10), TrainOptions(batch_size=10, epochs=3), reporter=reporter)
    with pytest.raises(QuatrainError, match=r"step 5 .* 5 steps in a row"):
        loop.run()
    assert len(reporter.warnings) == 1 and "too good to be true" in reporter.warnings[0]


def test_a_low_loss_late_in_the_run_is_no_cause_for_alarm(tmp_path: Path) -> None:
    reporter = Recorder()
    loop = loop_of(tmp_path, Standin(losses=[2.0] + [0.001] * 29), TrainOptions(batch_size=10), reporter=reporter)
    assert loop.run() == "finished" and reporter.warnings == []


def test_a_perplexity_of_exactly_one_is_suspicious_at_any_time(tmp_path: Path) -> None:
    """D3: a perplexity of exactly 1 is never earned."""
    loop = loop_of(tmp_path, Standin(losses=[2.0] + [0.0] * 29), TrainOptions(batch_size=10))
    with pytest.raises(QuatrainError, match=r"step 6 has loss 0\.000000"):
        loop.run()


def test_a_step_without_supervised_tokens_is_an_error_not_a_zero(tmp_path: Path) -> None:
    """C3: a step with nothing to learn from has no loss to show."""
    with pytest.raises(DataError, match="step 1 had no supervised token"):
        loop_of(tmp_path, Standin(), TrainOptions(batch_size=10), tokens=1).run()


def test_evaluation_and_checkpoint_always_happen_at_the_end(tmp_path: Path) -> None:
    """P4: intervals beyond the end of the run: one evaluation and one checkpoint, at the end."""
    pipeline = Standin()
    loop_of(tmp_path, pipeline, TrainOptions(batch_size=5, epochs=1, eval_every=1000, save_every=1000)).run()
    assert pipeline.evaluations == [20] and kept(tmp_path) == ["step-000020"]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_results_that_are_read_late_change_nothing(tmp_path: Path, in_flight: int) -> None:
    """Metrics, evaluations, checkpoints and the best adapter are those of a run that waits for every step."""
    options = TrainOptions(batch_size=10, max_steps=23, eval_every=5, save_every=4)
    seen = []
    for name, steps in (("at once", 0), ("late", in_flight)):
        pipeline, recorder = Standin(losses=[2.0, math.nan, 1.5]), Recorder()
        pipeline.steps_in_flight = steps
        (tmp_path / name).mkdir()
        assert loop_of(tmp_path / name, pipeline, options, reporter=recorder).run() == "finished"
        lines = [{**line, "tokens_per_s": None} for line in metrics(tmp_path / name)]
        seen.append((lines, pipeline.evaluations, pipeline.adapters, kept(tmp_path / name), recorder.warnings))
    assert seen[0] == seen[1] and len(seen[0][0]) == 23 + 5 and len(seen[0][4]) == 1


def test_a_problem_that_is_read_late_still_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The step that was started meanwhile is kept: it is in the metrics, and the checkpoint is of it."""
    pipeline = Standin(losses=[2.0, math.nan, math.nan, 1.5, 1.5])
    pipeline.steps_in_flight = 1
    options = TrainOptions(batch_size=10, max_steps=9, max_skipped_steps=2)
    with pytest.raises(QuatrainError, match="the last was step 3"):
        loop_of(tmp_path, pipeline, options).run()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    checkpoint, _ = newest_complete(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 4 and checkpoint.progress["progress"]["skipped"] == 2
