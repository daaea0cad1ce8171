"""Switches that must not change numbers. Tolerance 0 where the order of additions allows it; where it does not, the
test says why and how much room rounding needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from oracles import families, hf
from oracles.engine import chosen_kernels, make_config, open_pipeline
from tiny_model import write_tiny_model

from quatrain.config import InstructConfig
from quatrain.data.row import Row
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.train.pipeline import InstructPipeline
from quatrain.train.results import StepResult

VARIANTS = [families.BY_NAME[name] for name in ("llama-bias", "mistral-window", "qwen3-mixed-windows")]
STEPS = 3
DROPOUT = 0.3


def rows_of_step(step: int) -> list[Row]:
    return hf.make_rows([6, 13, 9, 17, 1, 8], families.VOCAB, seed=50 + step)


def run(
    variant: families.Variant, folder: Path, split: list[list[int]] | None = None, steps: int = STEPS, **options: Any
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Some steps; `split` lists the row numbers of each micro-batch. The results, and all state afterwards."""
    pipeline = open_pipeline(variant, folder, make_config(**options))
    results = []
    for step in range(steps):
        rows = rows_of_step(step)
        micro_batches = [[rows[i] for i in part] for part in split] if split else [rows]
        results.append(pipeline.train_micro_batches(micro_batches))
    return results, {name: tensor.clone() for name, tensor in pipeline.state().items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different[:5]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_recompute_all_none_or_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: families.Variant, arithmetic: dict[str, Any]
) -> None:
    """Tolerance 0, with dropout (I14): the recompute runs the same ops on the same bits. `auto` is given a budget that
    keeps some blocks and not others."""
    monkeypatch.setattr("quatrain.engine.setup.resident_bytes", lambda: 0)  # else it differs from one call to the next
    options = {**arithmetic, "lora_dropout": DROPOUT, "train_norms": True}
    none, block = (
        open_pipeline(variant, tmp_path / mode, make_config(checkpoint=mode, **options)) for mode in ("none", "block")
    )
    budget = (none.plan().total_bytes + block.plan().total_bytes) // 2
    auto = open_pipeline(variant, tmp_path / "auto", make_config(memory_budget=budget, **options))
    assert [pipeline.layout.first_kept for pipeline in (none, auto, block)] == [0, 2, 3]
    results = [[pipeline.train_step(rows_of_step(step)) for step in range(STEPS)] for pipeline in (none, auto, block)]
    assert results[0] == results[1] == results[2]
    assert_same_bits(dict(auto.state()), dict(none.state()))
    assert_same_bits(dict(block.state()), dict(none.state()))
    moved = open_pipeline(variant, tmp_path / "start", make_config(**options)).state()
    assert not any(torch.equal(none.state()[name], moved[name]) for name in moved if name.startswith("master."))


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_one_batch_equals_its_split(tmp_path: Path, variant: families.Variant, dropout: float) -> None:
    """E4: one micro-batch, one a row, and an uneven split, with the same dropout masks. Not bit for bit: dA and dB are
    sums over tokens, which a split adds up in another order. In fp64 that order is all that is left. Native kernels in
    fp32, the reference in fp64."""
    splits: list[list[list[int]]] = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[0, 1], [2, 3, 4], [5]]]
    for dtype, bound in (("fp32", tol.OPTIMIZER * 10), ("fp64", 1e-12)):
        options = {"compute_dtype": dtype, "lora_dropout": dropout, "train_norms": True, "adam_eps": 1e-3}
        results, whole = run(variant, tmp_path / dtype, splits[0], **options)
        for split in splits[1:]:
            others, parts = run(variant, tmp_path / f"{dtype}{len(split)}", split, **options)
            for got, want in zip(others, results, strict=True):
                assert got.loss == pytest.approx(want.loss, rel=1e-6)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
                assert got.num_response_tokens == want.num_response_tokens
            for name in (name for name in whole if name.startswith("master.")):
                assert hf.norm_error(parts[name], whole[name]) <= bound, name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradients_of_one_batch_and_of_its_split(
    tmp_path: Path, variant: families.Variant, arithmetic: dict[str, Any]
) -> None:
    """One step's loss and gradients, in one micro-batch and in five. Native kernels give a token the same bits in any
    batch, so only the order of additions over tokens differs: 1e-6. Torch picks its product's blocking by the number
    of tokens, which is one more fp32 rounding of everything: the bound of two fp32 engines."""
    options = {**arithmetic, "lora_dropout": DROPOUT, "train_norms": True, "max_seq_len": 17}
    rows = rows_of_step(0)
    (loss, whole), (split_loss, parts) = (
        open_pipeline(variant, tmp_path / str(capacity), make_config(micro_batch_tokens=capacity, **options))
        .loss_and_gradients(rows)
        for capacity in (54, 18)
    )  # fmt: skip
    bound = tol.ENGINE_FP32 if arithmetic["kernels"] == "reference" else 1e-6
    assert split_loss == pytest.approx(loss, rel=bound)
    errors = {name: hf.norm_error(parts[name], whole[name]) for name in whole}
    assert max(errors.values()) <= bound, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_split_at_single_rows_is_the_same_run_twice(
    tmp_path: Path, variant: families.Variant, arithmetic: dict[str, Any]
) -> None:
    """Tolerance 0 where the order is the same: the engine's own split at its capacity, and that split given by hand."""
    options = {**arithmetic, "micro_batch_tokens": 20, "max_seq_len": 17, "lora_dropout": DROPOUT}
    pipeline = open_pipeline(variant, tmp_path / "own", make_config(**options))
    results = [pipeline.train_step(rows_of_step(step)) for step in range(STEPS)]
    by_hand, state = run(variant, tmp_path / "hand", [[0, 1], [2], [3, 4], [5]], **options)
    assert results == by_hand
    assert_same_bits(dict(pipeline.state()), state)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": DROPOUT}], ids=["plain", "dropout"])
@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_packed_equals_alone(tmp_path: Path, variant: families.Variant, options: dict[str, Any]) -> None:
    """D2, Q2: each token's loss, and the gradients. Not bit for bit: a product over more rows may be blocked another
    way by the linear algebra library."""
    rows = rows_of_step(0)
    pipeline = open_pipeline(variant, tmp_path, make_config(**options))
    packed = pipeline.token_losses(rows)
    alone = torch.cat([pipeline.token_losses([row]) for row in rows])
    assert torch.allclose(packed, alone, rtol=0, atol=1e-5 * float(packed.max()))
    reverse = torch.cat(pipeline.token_losses(rows[::-1]).split([row.num_supervised for row in rows[::-1]])[::-1])
    assert torch.allclose(reverse, packed, rtol=0, atol=1e-5 * float(packed.max()))

    if options:  # a row's mask goes by its number in the step, which packing does not change (see the split above)
        return
    gradients = pipeline.loss_and_gradients(rows)[1]
    count = sum(row.num_supervised for row in rows)
    total = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for row in rows:
        if row.num_supervised:
            for name, gradient in pipeline.loss_and_gradients([row])[1].items():
                total[name] += gradient * (row.num_supervised / count)
    for name, gradient in gradients.items():
        assert hf.norm_error(total[name], gradient) <= tol.ENGINE_FP32, name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_packed_equals_alone_bit_for_bit_on_native_kernels(
    tmp_path: Path, variant: families.Variant, arithmetic: dict[str, Any]
) -> None:
    """D2, Q2: a native kernel computes each row of its output alone, wherever in the stream it lies: tolerance 0."""
    if arithmetic["kernels"] == "reference":
        pytest.skip("torch blocks a product by the number of its rows")
    rows = hf.make_rows([6, 33, 9, 1, 17, 40], families.VOCAB, seed=8)
    pipeline = open_pipeline(variant, tmp_path, make_config(micro_batch_tokens=128, **arithmetic))
    packed = pipeline.token_losses(rows)
    assert torch.equal(torch.cat([pipeline.token_losses([row]) for row in rows]), packed)
    hidden = pipeline.hidden_states(rows)
    assert torch.equal(torch.cat([pipeline.hidden_states([row]) for row in rows]), hidden)


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1026])
def test_kernels_agree_at_the_borders_of_their_chunks(tmp_path: Path, length: int) -> None:
    """G4: the loss of every token of a long row, around the sizes at which attention and head cut their work, with the
    reference ops and with native kernels: 1e-4."""
    write_tiny_model(tmp_path, max_positions=2048)
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 259, (length,), generator=random).tolist()
    options = {"compute_dtype": "fp32", "lora_rank": 2, "max_seq_len": 1026, "micro_batch_tokens": 1026}
    reference, *others = (
        InstructPipeline.from_pretrained(tmp_path, InstructConfig(kernels=name, **options)).token_losses(
            [(ids[:1], ids[1:])]
        )
        for name in chosen_kernels()
    )
    assert len(reference) == length - 1
    for losses in others:
        assert torch.allclose(losses, reference, rtol=0, atol=1e-4)


def test_activations_have_the_compute_dtype_and_sums_fp32(tmp_path: Path, arithmetic: dict[str, Any]) -> None:
    """G5: with QK-norm, whose weights are fp32 whatever the rest: each slot of the plan has one dtype, and what leaves
    the blocks has the one that was asked for."""
    pipeline = open_pipeline(families.BY_NAME["qwen3"], tmp_path, make_config(train_norms=True, **arithmetic))
    want = {"fp32": torch.float32, "bf16": torch.bfloat16}[arithmetic["compute_dtype"]]
    assert pipeline.hidden_states(rows_of_step(0)).dtype == want
    assert {slot.dtype for slot in pipeline.plan().slots if slot.dtype.is_floating_point} <= {
        want,
        torch.float32,
        torch.float64,
    }
    assert all(gradient.dtype == torch.float32 for gradient in pipeline.loss_and_gradients(rows_of_step(0))[1].values())
    block = pipeline.engine.params.blocks[0]
    assert block.q_norm is not None and block.q_norm.dtype == torch.float32


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_evaluation_is_pure(tmp_path: Path, variant: families.Variant, arithmetic: dict[str, Any]) -> None:
    """Q3, Q4, I8: the same number for any batch; training with evaluations in between is bit for bit the training
    without, with dropout on."""
    options = {**arithmetic, "lora_dropout": DROPOUT}
    held_out = hf.make_rows([5, 9, 17, 3, 12, 7, 4], families.VOCAB, seed=9)
    with_eval, without = (open_pipeline(variant, tmp_path / name, make_config(**options)) for name in "ab")
    for step in range(STEPS):
        with_eval.evaluate(held_out)
        results = [pipeline.train_step(rows_of_step(step)) for pipeline in (with_eval, without)]
        assert results[0] == results[1]
        with_eval.loss_and_gradients(held_out)
        with_eval.hidden_states(held_out)
    assert_same_bits(dict(with_eval.state()), dict(without.state()))

    whole = with_eval.evaluate(held_out)
    assert with_eval.evaluate(held_out) == whole
    losses = [with_eval.evaluate([row]) for row in held_out]
    tokens = sum(loss.total_response_tokens for loss in losses)
    assert tokens == whole.total_response_tokens
    mean = sum(loss.avg_loss * loss.total_response_tokens for loss in losses) / tokens
    assert mean == pytest.approx(whole.avg_loss, rel=1e-6)
    plain = open_pipeline(variant, tmp_path / "c", make_config(**arithmetic))
    for name, master in plain.adapters.named().items():
        master.copy_(with_eval.adapters.named()[name])
    plain.adapters.refresh()
    assert plain.evaluate(held_out) == whole  # dropout does not reach it


def test_the_same_run_twice_has_the_same_bits(tmp_path: Path, arithmetic: dict[str, Any]) -> None:
    """N3: CPU, a fixed number of threads."""
    options = {**arithmetic, "lora_dropout": DROPOUT, "train_norms": True}
    first, second = (run(VARIANTS[2], tmp_path / name, **options) for name in "ab")
    assert first[0] == second[0]
    assert_same_bits(first[1], second[1])
    other = run(VARIANTS[2], tmp_path / "c", seed=43, **options)  # dropout's seed does reach the numbers
    assert other[0] != first[0]


def test_slots_of_an_earlier_longer_batch_do_not_leak(tmp_path: Path, arithmetic: dict[str, Any]) -> None:
    """Tolerance 0: a short batch after a long one gives what it gives on a fresh arena."""
    long, short = hf.make_rows([17, 17, 17], families.VOCAB), hf.make_rows([3], families.VOCAB, seed=2)
    used, fresh = (open_pipeline(VARIANTS[1], tmp_path / name, make_config(**arithmetic)) for name in "ab")
    used.loss_and_gradients(long)
    loss, gradients = used.loss_and_gradients(short)
    want_loss, want = fresh.loss_and_gradients(short)
    assert loss == want_loss
    assert_same_bits(gradients, want)


@pytest.mark.parametrize("options", [{}, {"double_quant": False}, {"quantize": "none"}], ids=str)
@pytest.mark.parametrize("variant", [families.BY_NAME["llama-bias"], families.BY_NAME["qwen3"]], ids=str)
def test_the_linears_are_held_as_asked_and_as_planned(
    tmp_path: Path, variant: families.Variant, options: dict[str, Any]
) -> None:
    """H9: NF4 that is asked for is what is in memory, to the byte of the plan."""
    pipeline = open_pipeline(variant, tmp_path, make_config(**options))
    (planned,) = (entry for entry in pipeline.plan().entries if entry.name.startswith("linears ("))
    weights = [linear.weight for block in pipeline.engine.params.blocks for linear in block.linears.values()]
    quantised = [weight for weight in weights if isinstance(weight, Nf4Tensor)]
    assert len(quantised) == (0 if "quantize" in options else len(weights))
    assert all(weight.nested == ("double_quant" not in options) for weight in quantised)
    sizes = [weight.nbytes() if isinstance(weight, Nf4Tensor) else weight.nbytes for weight in weights]
    code_book = 1024 if any(weight.nested for weight in quantised) else 0
    assert planned.nbytes == sum(sizes) + code_book


@pytest.mark.parametrize("options", [{}, {"checkpoint": "none"}, {"clip": "layer"}, {"quantize": "none"}], ids=str)
def test_the_arena_is_the_plan_and_nothing_is_written_beside_it(
    tmp_path: Path, options: dict[str, Any], arithmetic: dict[str, Any]
) -> None:
    """A full step on poisoned, guarded slots: no read of unwritten memory (a NaN would show), no stray write."""
    pipeline = open_pipeline(
        VARIANTS[2], tmp_path, make_config(train_norms=True, lora_dropout=DROPOUT, **arithmetic, **options)
    )
    arena, plan = pipeline.engine.arena, pipeline.plan()
    assert arena.poisoned
    assert arena.nbytes == sum(slot.nbytes for slot in plan.slots)
    rows = hf.make_rows([17, 16, 17, 14], families.VOCAB)
    assert sum(map(len, rows)) == pipeline.layout.tokens  # to the last token
    result = pipeline.train_step(rows)
    assert not result.skipped
    assert all(bool(torch.isfinite(tensor).all()) for tensor in pipeline.state().values())
    pipeline.evaluate(rows)
    arena.check_guards()
