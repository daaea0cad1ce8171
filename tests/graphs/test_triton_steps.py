"""Whole steps of Triton's kernels (in the interpreter) as a GPU runs them: by bucket, rows bounded on the device, slots
overlaid, captured and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from graphs.standin import Tape, open_on_tape, rows_of
from graphs.test_captured_steps import assert_same_bits, bits
from oracles import families, hf
from oracles.engine import make_config, open_pipeline

from quatrain.config import GenerateConfig
from quatrain.ops import triton_configs
from quatrain.ops.select import Backend, triton_backend
from quatrain.train.pipeline import InstructPipeline

pytest.importorskip("triton.language", reason="triton is not installed")

OPTIONS = {
    "llama": {"checkpoint": "block"},
    "qwen3-mixed-windows": {"lora_dropout": 0.2, "train_norms": True},
}
LENGTHS = ([6, 1, 17], [9, 14], [20, 2])


def on_triton(tape: Tape) -> Backend:
    backend = triton_backend(torch.float32, "sm_80")
    return replace(backend, bind=lambda scratch: tape.recording(backend.bind(scratch)))


def train(pipeline: InstructPipeline) -> list[Any]:
    results = []
    for step, lengths in enumerate(LENGTHS):
        pipeline.set_learning_rate(1e-3 / (step + 1))
        results.append(pipeline.train_step(rows_of(lengths, seed=step)))
    return results


@pytest.mark.parametrize("name", OPTIONS)
def test_captured_is_uncaptured_and_both_are_the_reference(tmp_path: Path, name: str) -> None:
    """Bit for bit between the first two: equal inputs give equal bits on Triton. The reference runs each step at its
    own size, in fp32 as well."""
    variant, options = families.BY_NAME[name], {"micro_batch_tokens": 128, "adam_eps": 1e-3, **OPTIONS[name]}
    captured, plain = (
        open_on_tape(variant, tmp_path / mode, tape, backend=on_triton(tape), cuda_graph=mode, **options)
        for mode, tape in (("auto", Tape()), ("off", Tape()))
    )
    exact = open_pipeline(variant, tmp_path / "exact", make_config(kernels="reference", **options))
    results, wanted = train(captured), train(exact)
    assert results == train(plain)
    assert_same_bits(bits(captured), bits(plain))
    assert captured.engine.graphs is not None and captured.engine.graphs.replays == 2
    for got, want in zip(results, wanted, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=tol.ENGINE_FP32)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=tol.ENGINE_FP32)
    for key, master in exact.adapters.named().items():
        assert hf.norm_error(captured.adapters.named()[key], master) <= tol.OPTIMIZER * 10, key


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_head_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """From the host through two buffers: captured and not the same bits, and the numbers of a head in one piece."""
    monkeypatch.setattr("quatrain.engine.device_layout.HEAD_TILE_BYTES", 5000)
    variant, tapes = families.BY_NAME["llama"], [Tape() for _ in range(3)]
    backend = triton_backend(torch.float16 if dtype == "fp16" else torch.float32, "sm_80")
    pipelines = []
    for at, (tape, mode) in enumerate(zip(tapes, ("auto", "off", "off"), strict=True)):
        bound = replace(backend, bind=lambda scratch, tape=tape: tape.recording(backend.bind(scratch)))
        pipelines.append(
            open_on_tape(
                variant, tmp_path / str(at), tape, backend=bound, cuda_graph=mode, head_on_host=at < 2,
                compute_dtype=dtype, micro_batch_tokens=128, adam_eps=1e-3,
            )
        )  # fmt: skip
    captured, plain, whole = pipelines
    assert 2 * captured.layout.head_tile < captured.spec.vocab_size and whole.layout.head_tile == 0
    results, wanted = train(captured), train(whole)
    assert results == train(plain)
    assert_same_bits(bits(captured), bits(plain))
    bound_of = {"fp32": tol.ENGINE_FP32, "fp16": 0.02}[dtype]
    for got, want in zip(results, wanted, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=bound_of)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=bound_of)


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed-windows"])
def test_generating_gives_the_cpus_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Prompts by bucket, steps captured, sampled on the device; the reference's tokens where it is greedy."""
    small = {"*": {"BLOCK": 128, "num_warps": 4, "num_stages": 1}}  # the interpreter works on all of a block
    monkeypatch.setitem(triton_configs.TABLE, "sample", small)
    variant, options = families.BY_NAME[name], {"micro_batch_tokens": 512}
    captured, plain = (
        open_on_tape(variant, tmp_path / mode, tape, backend=on_triton(tape), cuda_graph=mode, **options)
        for mode, tape in (("auto", Tape()), ("off", Tape()))
    )
    exact = open_pipeline(variant, tmp_path / "exact", make_config(kernels="reference", **options))
    prompts = [list(row.input_ids) for row in rows_of([6, 1, 9], seed=2)]
    greedy, sampled = (GenerateConfig(max_new_tokens=4, temperature=t, top_k=30, top_p=0.9) for t in (0.0, 1.5))
    assert captured.generate_ids(prompts, greedy) == exact.generate_ids(prompts, greedy)
    assert captured.generate_ids(prompts, sampled) == plain.generate_ids(prompts, sampled)
    assert captured.engine.graphs is not None and captured.engine.graphs.replays > 3
