"""Steps on a device that captures: a replay is the step it stands for, bit for bit, whatever has changed since."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from graphs.standin import Tape, open_on_tape, rows_of
from oracles import families, hf
from oracles.engine import make_config, open_pipeline

from quatrain.engine.inputs import bucket_for
from quatrain.errors import KernelError
from quatrain.train.pipeline import InstructPipeline
from quatrain.train.results import StepResult

LLAMA, QWEN3 = families.BY_NAME["llama"], families.BY_NAME["qwen3-mixed-windows"]
# Lengths of each step's rows: two buckets of tokens, in turn, and never the same rows.
LENGTHS = [[6, 13, 9], [30, 17, 33], [5, 14, 8], [31, 20, 27], [9, 9, 9], [12, 10], [40, 20, 15]]


def train(pipeline: InstructPipeline, steps: int = len(LENGTHS), micro_batches: int = 1) -> list[StepResult]:
    """Steps with other rows, lengths and learning rate each."""
    results = []
    for step in range(steps):
        pipeline.set_learning_rate(1e-3 / (step + 1))
        parts = [rows_of(LENGTHS[step], seed=10 * step + part) for part in range(micro_batches)]
        results.append(pipeline.train_micro_batches(parts))
    return results


def bits(pipeline: InstructPipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.state().items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


OPTIONS = [
    {},
    {"lora_dropout": 0.3, "train_norms": True, "max_grad_norm": 0.05, "weight_decay": 0.1},
    {"clip": "layer", "checkpoint": "none"},
    {"clip": "none", "checkpoint": "block", "compute_dtype": "bf16"},
    {"compute_dtype": "fp16", "lora_dropout": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", [LLAMA, QWEN3], ids=str)
def test_captured_is_uncaptured_bit_for_bit(tmp_path: Path, variant: families.Variant, options: dict[str, Any]) -> None:
    """Tolerance 0: other rows, lengths and rates on every replay. Traps 1 and 2 of a captured loop: the step that
    captures is not lost, and lr, step and bias correction are not frozen."""
    tape = Tape()
    captured = open_on_tape(variant, tmp_path / "on", tape, micro_batch_tokens=128, **options)
    plain = open_on_tape(variant, tmp_path / "off", Tape(), micro_batch_tokens=128, cuda_graph="off", **options)
    assert train(captured) == train(plain)
    assert_same_bits(bits(captured), bits(plain))
    assert len(tape.captures) == 2 and tape.launches == len(LENGTHS) - 2  # each bucket's first step runs as it is
    assert int(captured.state()["step"]) == len(LENGTHS)


@pytest.mark.parametrize("sets", [3, 1])
def test_accumulation_is_captured_when_its_inputs_fit(tmp_path: Path, sets: int) -> None:
    tape = Tape()
    captured = open_on_tape(QWEN3, tmp_path / "on", tape, input_sets=sets, micro_batch_tokens=128, lora_dropout=0.3)
    plain = open_on_tape(QWEN3, tmp_path / "off", Tape(), micro_batch_tokens=128, lora_dropout=0.3, cuda_graph="off")
    assert train(captured, micro_batches=3) == train(plain, micro_batches=3)
    assert_same_bits(bits(captured), bits(plain))
    assert len(tape.captures) == (2 if sets == 3 else 0)


@pytest.mark.parametrize("variant", [*families.ONE_PER_FAMILY, families.BY_NAME["llama-rope-dynamic"]], ids=str)
def test_inert_rows_change_nothing(tmp_path: Path, variant: families.Variant) -> None:
    """A bucket's filler against the same steps at their own size, without overlaid slots. In fp64: torch multiplies
    more rows in another order, which is all that may differ."""
    lengths = [length for step in LENGTHS for length in step]
    options = {"compute_dtype": "fp64", "train_norms": True, "max_seq_len": max(lengths), "micro_batch_tokens": 128}
    static = open_on_tape(variant, tmp_path / "static", Tape(), **options)
    exact = open_pipeline(variant, tmp_path / "exact", make_config(**options))
    for got, want in zip(train(static, 5), train(exact, 5), strict=True):
        assert got.loss == pytest.approx(want.loss, rel=1e-12)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-10)
    masters = {name: tensor for name, tensor in bits(exact).items() if name.startswith("master.")}
    for name, master in masters.items():
        assert hf.norm_error(bits(static)[name], master) <= tol.ENGINE_FP64, name
    losses = static.token_losses(rows_of([7, 20, 3], 5))
    assert torch.allclose(losses, exact.token_losses(rows_of([7, 20, 3], 5)), rtol=1e-12, atol=0)


def test_each_bucket_is_captured_once(tmp_path: Path) -> None:
    """Trap 5: a graph keyed by the exact length is captured again at each new one."""
    tape = Tape()
    pipeline = open_on_tape(LLAMA, tmp_path, tape, micro_batch_tokens=128)
    arena = pipeline.engine.arena
    address = arena["hidden.1"].data_ptr()
    buckets = []
    for repeat in range(4):
        for lengths in ([20, 9], [21, 10], [50, 40], [19, 9]):
            rows = rows_of(lengths, seed=repeat)
            buckets.append(bucket_for(sum(lengths), sum(row.num_supervised for row in rows), 128))
            pipeline.train_step(rows)
    assert pipeline.engine.graphs is not None
    shapes = pipeline.engine.graphs.report()["captured"]
    seen = sorted({(b.tokens, b.targets) for b in buckets if buckets.count(b) > 1}, reverse=True)
    assert [(shape["tokens"], shape["targets"]) for shape in shapes] == seen and len(tape.captures) == len(seen) < 5
    assert arena is pipeline.engine.arena and arena["hidden.1"].data_ptr() == address
    assert tape.launches == pipeline.engine.graphs.replays == 16 - len(set(buckets))


def test_a_capture_leaves_nothing_out(tmp_path: Path) -> None:
    """Trap 7: what is refreshed only when it is stale looks fresh during a capture, and is then never refreshed. The
    captured calls are those of a step that runs as it is."""
    tape = Tape()
    pipeline = open_on_tape(QWEN3, tmp_path, tape, micro_batch_tokens=128, lora_dropout=0.3, train_norms=True)
    pipeline.train_step(rows_of([6, 13], 1))
    first = list(tape.eager)
    pipeline.train_step(rows_of([7, 11], 2))
    ops = [name for name in tape.captures[0] if not name.startswith("aten::")]
    assert ops == first and tape.eager == first and len(ops) > 50


def test_a_replay_reads_no_address_that_is_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 3: a buffer that a step makes anew. Every tensor a capture sees is part of the arena, the weights, the
    adapters or the step's state; the tape refuses new ones."""
    tape = Tape()
    pipeline = open_on_tape(LLAMA, tmp_path, tape, micro_batch_tokens=128)
    engine = pipeline.engine
    pipeline.train_step(rows_of([6, 13], 1))
    load = engine._stream

    def anew(loaded: Any, training: bool) -> Any:
        return load(replace(loaded, ids=loaded.ids.clone()), training)

    monkeypatch.setattr(engine, "_stream", anew)
    pipeline.train_step(rows_of([6, 13], 1))
    assert engine.graphs is not None and "clone during a capture" in str(engine.graphs.reason)


@pytest.mark.parametrize("planted", [lambda state: state.lr.item(), lambda state: bool(state.skip)])
def test_a_host_read_in_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Any) -> None:
    """Trap 2, from the other side: a rate that the host reads is baked into the graph."""
    pipeline = open_on_tape(LLAMA, tmp_path, Tape(), micro_batch_tokens=128)
    optimizer = pipeline.engine.optimizer
    end_step = optimizer.end_step

    def reads() -> None:
        planted(pipeline.engine.state)
        end_step()

    monkeypatch.setattr(optimizer, "end_step", reads)
    for seed in range(3):
        pipeline.train_step(rows_of([6, 13], seed))
    assert pipeline.engine.graphs is not None
    assert "_local_scalar_dense during a capture" in str(pipeline.engine.graphs.reason)
    assert int(pipeline.state()["step"]) == 3


@pytest.mark.parametrize("fail_at", [1, 40, 97])
def test_a_capture_that_breaks_costs_nothing(tmp_path: Path, fail_at: int) -> None:
    """Trap 4: the capture is ended, nobody tries again, the run goes on with the same bits, and the reason is told
    once."""
    tape, told = Tape(fail_at=fail_at), []
    broken = open_on_tape(LLAMA, tmp_path / "on", tape, micro_batch_tokens=128)
    plain = open_on_tape(LLAMA, tmp_path / "off", Tape(), micro_batch_tokens=128, cuda_graph="off")
    assert broken.engine.graphs is not None
    broken.engine.graphs.on_refused = told.append
    assert train(broken) == train(plain)
    assert_same_bits(bits(broken), bits(plain))
    assert not tape.capturing and len(tape.captures) == 1 and tape.launches == 0
    assert len(told) == 1 and "not permitted when stream is capturing" in told[0]
    assert broken.engine.graphs.report() == {"captured": [], "replays": 0, "reason": told[0]}


def test_cuda_graph_on_makes_a_failure_an_error(tmp_path: Path) -> None:
    tape = Tape(fail_at=20)
    pipeline = open_on_tape(LLAMA, tmp_path, tape, micro_batch_tokens=128, cuda_graph="on")
    pipeline.train_step(rows_of([6, 13], 1))
    before = bits(pipeline)
    with pytest.raises(KernelError, match="cuda_graph on: the capture of a step of 32 tokens failed"):
        pipeline.train_step(rows_of([6, 13], 2))
    assert not tape.capturing
    assert_same_bits(bits(pipeline), before)


def test_dynamic_rope_of_long_rows_is_not_captured(tmp_path: Path) -> None:
    """Its frequencies depend on each row's length, which only the host knows."""
    tape = Tape()
    variant = families.BY_NAME["llama-rope-dynamic"]
    pipeline = open_on_tape(variant, tmp_path / "long", tape, micro_batch_tokens=128)
    train(pipeline, 4)
    assert tape.captures == [] and pipeline.engine.graphs is not None
    assert "dynamic rope" in str(pipeline.engine.graphs.reason)
    with pytest.raises(KernelError, match="cuda_graph on: dynamic rope"):
        open_on_tape(variant, tmp_path / "on", tape, micro_batch_tokens=128, cuda_graph="on")


def test_dynamic_rope_of_short_rows_is_captured(tmp_path: Path) -> None:
    """Up to the length that the model was trained for, all rows share one set of frequencies, wherever they lie."""
    tape, variant = Tape(), families.BY_NAME["llama-rope-dynamic"]
    options = {"micro_batch_tokens": 128, "max_seq_len": 12, "adam_eps": 1e-3}
    captured = open_on_tape(variant, tmp_path / "on", tape, **options)
    exact = open_pipeline(variant, tmp_path / "off", make_config(**options))
    for seed, lengths in enumerate([[3, 4], [12, 1], [5, 8], [2, 2, 11], [12, 3]]):
        got, want = (pipeline.train_step(rows_of(lengths, seed)) for pipeline in (captured, exact))
        assert got.loss == pytest.approx(want.loss, rel=tol.ENGINE_FP32)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=tol.ENGINE_FP32)
    assert tape.launches == 4


@pytest.mark.parametrize("clip", ["global", "layer"])
def test_clipping_and_skipping_happen_inside_a_replay(tmp_path: Path, clip: str) -> None:
    """Trap 6: with the graph on, the clip was left out. Here a replay clips (the limit shows in the update) and skips a
    step whose gradient is not finite."""
    tape = Tape()
    states = []
    for limit in (1e-3, 1e9):
        pipeline = open_on_tape(
            LLAMA, tmp_path / str(limit), tape, micro_batch_tokens=128, clip=clip, max_grad_norm=limit, adam_eps=1.0
        )
        for seed in range(3):
            result = pipeline.train_step(rows_of([6, 13], seed))
        assert result.grad_norm > 1e-2
        states.append(bits(pipeline))
    names = [name for name in states[0] if name.startswith("exp_avg.")]
    assert all(states[0][name].norm() < 0.2 * states[1][name].norm() for name in names)

    embed, before = pipeline.engine.params.head, bits(pipeline)
    saved = embed.clone()
    embed.fill_(float("nan"))
    result = pipeline.train_step(rows_of([7, 12], 7))
    embed.copy_(saved)
    assert result.skipped and not math.isfinite(result.loss) and result.step == 3
    after = bits(pipeline)
    assert int(after.pop("skipped")) == int(before.pop("skipped")) + 1
    assert_same_bits(after, before)
    assert not pipeline.train_step(rows_of([7, 12], 8)).skipped


def test_evaluating_between_replays_changes_nothing(tmp_path: Path) -> None:
    a, b = (open_on_tape(QWEN3, tmp_path / name, Tape(), micro_batch_tokens=128, lora_dropout=0.3) for name in "ab")
    for seed in range(5):
        a.evaluate(rows_of([40, 11], 99))
        a.loss_and_gradients(rows_of([11], 98))
        assert a.train_step(rows_of([9, 12], seed)) == b.train_step(rows_of([9, 12], seed))
    assert_same_bits(bits(a), bits(b))


def test_preparing_captures_the_largest_first_and_leaves_no_trace(tmp_path: Path) -> None:
    tape = Tape()
    prepared = open_on_tape(LLAMA, tmp_path / "a", tape, input_sets=2, micro_batch_tokens=128, compute_dtype="fp16")
    plain = open_on_tape(LLAMA, tmp_path / "b", Tape(), input_sets=2, micro_batch_tokens=128, compute_dtype="fp16")
    train(prepared, 2), train(plain, 2)
    before = bits(prepared)
    steps = [[rows_of(lengths, 1)] * number for lengths in ([40, 12], [6, 9], [50, 40]) for number in (1, 2)]
    prepared.prepare_steps(
        {
            (max(tokens), max(sum(r.num_supervised for r in part) for part in step), len(step))
            for step in steps
            if (tokens := [sum(map(len, part)) for part in step])
        }
    )
    assert_same_bits(bits(prepared), before)
    assert prepared.engine.graphs is not None
    shapes = [(s["tokens"], s["micro_batches"]) for s in prepared.engine.graphs.report()["captured"]]
    assert shapes == [(96, 2), (96, 1), (64, 2), (64, 1)]  # the budget holds four
    calls = [len(names) for names in tape.captures]
    assert calls[0] > calls[1] and calls[2] > calls[3]
    for step in (steps[1], steps[4], steps[0]):
        assert prepared.train_micro_batches(step) == plain.train_micro_batches(step)
    assert_same_bits(bits(prepared), bits(plain))
    assert tape.launches == 3 and len(tape.captures) == len(calls)


def test_a_callers_own_gradient_is_captured_too(tmp_path: Path) -> None:
    tape = Tape()
    captured = open_on_tape(QWEN3, tmp_path / "on", tape, micro_batch_tokens=128)
    plain = open_on_tape(QWEN3, tmp_path / "off", Tape(), micro_batch_tokens=128, cuda_graph="off")
    for seed, lengths in enumerate([[9, 12], [8, 15], [9, 9], [40, 1], [20, 4]]):
        rows = rows_of(lengths, seed)
        d_hidden = torch.randn(sum(lengths), captured.spec.hidden_size, generator=torch.Generator().manual_seed(seed))
        got, want = (pipeline.backward_step(rows, d_hidden) for pipeline in (captured, plain))
        assert (got.grad_norm, got.step) == (want.grad_norm, want.step) == (want.grad_norm, seed + 1)
    assert_same_bits(bits(captured), bits(plain))
    assert tape.launches == 3 and all("head_loss" not in names for names in tape.captures)


def test_results_wait_until_they_are_asked_for(tmp_path: Path) -> None:
    """Many steps are started before the first result is read; each tells its own."""
    late, at_once = (open_on_tape(LLAMA, tmp_path / name, Tape(), micro_batch_tokens=128) for name in "ab")
    started, want = [], []
    for seed in range(20):
        for pipeline in (late, at_once):
            pipeline.set_learning_rate(1e-3 / (seed + 1))
        started.append(late.start_step([rows_of([9, 12], seed)]))
        want.append(at_once.train_step(rows_of([9, 12], seed)))
    assert [step.result() for step in reversed(started)] == want[::-1]
    assert started[0].result() is not started[1].result() and [w.step for w in want] == list(range(1, 21))


def test_what_happened_to_graphs_is_told_and_kept(tmp_path: Path) -> None:
    """A reason that was there before anybody listened is told as well; each once."""
    told: list[str] = []
    variant = families.BY_NAME["llama-rope-dynamic"]
    refused = open_on_tape(variant, tmp_path / "a", Tape(), micro_batch_tokens=128)
    refused.watch_graphs(told.append)
    train(refused, 4)
    assert len(told) == 1 and told[0].startswith("steps run without a captured graph: dynamic rope")
    captured = open_on_tape(LLAMA, tmp_path / "b", Tape(), micro_batch_tokens=128)
    captured.watch_graphs(told.append)
    train(captured, 4)
    report = captured.graph_report()
    assert (report["replays"], report["reason"], len(told)) == (2, None, 1)
    assert [shape["tokens"] for shape in report["captured"]] == [80, 32]
    assert set(report["captured"][0]) == {"kind", "micro_batches", "tokens", "targets"}
    on_the_cpu = open_pipeline(LLAMA, tmp_path / "c", make_config())
    on_the_cpu.watch_graphs(told.append)
    assert on_the_cpu.graph_report() == {"captured": [], "replays": 0, "reason": "the CPU captures no graphs"}


def test_profiling_runs_steps_as_they_are(tmp_path: Path) -> None:
    tape = Tape()
    pipeline = open_on_tape(LLAMA, tmp_path, tape, micro_batch_tokens=128)
    pipeline.profiler.enabled = True
    train(pipeline, 4)
    assert tape.captures == []
