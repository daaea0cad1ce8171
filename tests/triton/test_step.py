"""Whole training steps of the engine on Triton kernels, against the reference ops. Attention and head are the
reference's: on the GPU they take rows in another form (tests of their own)."""

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

from quatrain.ops.select import Backend, Ops, reference_ops, triton_backend

OPTIONS = {
    "qwen3-norms-dropout": ("qwen3", {"train_norms": True, "lora_dropout": 0.2, "checkpoint": "block"}),
    "llama-layer-clip": ("llama", {"clip": "layer", "use_rslora": True, "quantize": "none"}),
}


def triton_but_for_attention_and_head(device: str, dtype: torch.dtype, *_: Any) -> Backend:
    """In place of `select_backend`."""
    backend, reference = triton_backend(dtype, "sm_80"), reference_ops(torch.empty(0, dtype=torch.uint8))
    kept = {name: getattr(reference, name) for name in ("attention_forward", "attention_backward", "head_loss")}

    def bind(scratch: torch.Tensor) -> Ops:
        return replace(backend.bind(scratch), **kept)

    return replace(backend, bind=bind)


@pytest.mark.parametrize(("family", "options"), OPTIONS.values(), ids=OPTIONS)
def test_steps_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    config = make_config(kernels="reference", **options)
    variant, rows = families.BY_NAME[family], hf.make_rows([6, 1, 17], families.VOCAB, seed=5)
    results: list[tuple[dict[str, torch.Tensor], Any]] = []
    select: Callable[..., Backend]
    for name, select in (("reference", None), ("triton", triton_but_for_attention_and_head)):
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
