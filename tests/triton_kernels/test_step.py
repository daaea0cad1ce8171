"""Whole training steps of the engine on Triton kernels, against the reference ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from oracles import families, hf
from oracles.engine import make_config, open_pipeline

from quatrain.ops.attention import RowBounds
from quatrain.ops.select import Backend, Ops, triton_backend

OPTIONS = {
    "qwen3-norms-dropout": ("qwen3", {"train_norms": True, "lora_dropout": 0.2, "checkpoint": "block"}),
    "llama-layer-clip": ("llama", {"clip": "layer", "use_rslora": True, "quantize": "none"}),
}


def triton_ops_on_host_rows(device: str, dtype: torch.dtype, *_: Any) -> Backend:
    """In place of `select_backend`. The engine's rows on the CPU are a list; attention gets them as on the GPU."""
    backend = triton_backend(dtype, "sm_80")

    def bind(scratch: torch.Tensor) -> Ops:
        ops = backend.bind(scratch)

        def on_bounds(op: Callable[..., None], q: int) -> Callable[..., None]:
            def call(*args: Any) -> None:
                *tensors, cu_seqlens, scale, window = args
                op(*tensors, RowBounds.of(cu_seqlens, tensors[q].shape[0]), scale, window)

            return call

        return replace(
            ops,
            attention_forward=on_bounds(ops.attention_forward, 2),
            attention_backward=on_bounds(ops.attention_backward, 6),
        )

    return replace(backend, bind=bind)


@pytest.mark.parametrize(("family", "options"), OPTIONS.values(), ids=OPTIONS)
def test_steps_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    config = make_config(kernels="reference", **options)
    variant, rows = families.BY_NAME[family], hf.make_rows([6, 1, 17], families.VOCAB, seed=5)
    results: list[tuple[dict[str, torch.Tensor], Any]] = []
    select: Callable[..., Backend]
    for name, select in (("reference", None), ("triton", triton_ops_on_host_rows)):
        if select is not None:
            monkeypatch.setattr("quatrain.engine.setup.select_backend", select)
        pipeline = open_pipeline(variant, tmp_path / name, config)
        assert pipeline.layout.backend.name.startswith(name)
        _, gradients = pipeline.loss_and_gradients(rows)
        pipeline.set_learning_rate(1e-3)
        step = pipeline.train_step(rows)
        results.append((gradients, (step, {key: value.clone() for key, value in pipeline.adapters.named().items()})))
    (want_gradients, (want_step, want)), (gradients, (step, got)) = results
    assert step.loss == pytest.approx(want_step.loss, rel=tol.ENGINE_FP32)
    assert step.grad_norm == pytest.approx(want_step.grad_norm, rel=tol.ENGINE_FP32)
    for key, gradient in want_gradients.items():
        tol.assert_close(gradients[key], gradient, tol.ENGINE_FP32, key)
        tol.assert_close(got[key], want[key], 1e-4, key)
