"""The dynamic loss scale of fp16: on the device, without a branch of the host, and invisible in every result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import families, hf
from oracles.engine import make_config, open_pipeline

from quatrain.optim.loss_scale import EVERY, LEAST, MOST, START, LossScale
from quatrain.optim.state import StepState
from quatrain.train.pipeline import InstructPipeline

LLAMA = families.BY_NAME["llama"]


def after(outcomes: list[bool]) -> tuple[float, int]:
    """(scale, updates since it changed) after steps that were skipped (True) or not."""
    state = StepState.create(1, "cpu")
    scale = LossScale(state)
    for skipped in outcomes:
        state.skip.fill_(skipped)
        scale.adjust()
    return state.loss_scale.item(), int(state.good)


@pytest.mark.parametrize(
    ("outcomes", "want"),
    [
        ([], (START, 0)),
        ([False] * (EVERY - 1), (START, EVERY - 1)),
        ([False] * EVERY, (2 * START, 0)),
        ([False] * (2 * EVERY + 3), (4 * START, 3)),
        ([True], (START / 2, 0)),
        ([False] * (EVERY - 1) + [True] + [False] * (EVERY - 1), (START / 2, EVERY - 1)),
        ([True] * 100, (LEAST, 0)),
        ([False] * EVERY * 20, (MOST, 0)),
    ],
)
def test_halves_when_skipped_and_doubles_after_enough_updates(outcomes: list[bool], want: tuple[float, int]) -> None:
    assert after(outcomes) == want


def rows(seed: int) -> list[Any]:
    return hf.make_rows([6, 13, 9], families.VOCAB, seed=seed)


def open_fp16(folder: Path, scale: float, **options: Any) -> InstructPipeline:
    pipeline = open_pipeline(LLAMA, folder, make_config(compute_dtype="fp16", **options))
    pipeline.engine.state.loss_scale.fill_(scale)
    return pipeline


@pytest.mark.parametrize("clip", ["global", "layer", "none"])
def test_the_scale_is_in_no_result(tmp_path: Path, clip: str) -> None:
    """Norms, updates and returned gradients at two scales; only what fp16 rounds away differs."""
    small, large = (open_fp16(tmp_path / str(scale), scale, clip=clip, adam_eps=1e-3) for scale in (1.0, 1024.0))
    (loss, gradients), (other_loss, others) = (p.loss_and_gradients(rows(0)) for p in (small, large))
    assert loss == other_loss
    for name, gradient in gradients.items():
        assert hf.norm_error(others[name], gradient) < 5e-3, name
    for seed in range(3):
        results = [pipeline.train_step(rows(seed)) for pipeline in (small, large)]
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-3)
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=5e-3)
    state, other = small.state(), large.state()  # moments too: AdamW's step hides a factor on all gradients
    names = [name for name in state if name.startswith(("master.", "exp_avg.", "exp_avg_sq."))]
    assert names and all(hf.norm_error(other[name], state[name]) < 1e-2 for name in names)


def test_fp16_agrees_with_fp32(tmp_path: Path) -> None:
    fp32 = open_pipeline(LLAMA, tmp_path / "fp32", make_config())
    loss, gradients = open_fp16(tmp_path / "fp16", START).loss_and_gradients(rows(0))
    want_loss, want = fp32.loss_and_gradients(rows(0))
    assert loss == pytest.approx(want_loss, rel=2e-3)
    assert max(hf.norm_error(gradients[name], want[name]) for name in want) < 2e-2


def test_an_overflow_skips_the_update_and_the_scale_finds_its_level(tmp_path: Path) -> None:
    """G1: hidden gradients near the end of fp16's range: the first steps overflow, then training goes on."""
    pipeline = open_fp16(tmp_path, MOST)
    pipeline.engine.params.head.mul_(8)  # larger gradients
    results, scales = [], []
    for _ in range(12):
        before = {name: tensor.clone() for name, tensor in pipeline.adapters.named().items()}
        results.append(pipeline.train_step(rows(0)).skipped)
        scales.append(pipeline.engine.state.loss_scale.item())
        changed = [not torch.equal(before[name], t) for name, t in pipeline.adapters.named().items()]
        assert not any(changed) if results[-1] else all(changed)
    assert results[0] and not any(results[-4:])
    skipped = sum(results)
    assert scales[-1] == MOST / 2**skipped and int(pipeline.state()["skipped"]) == skipped


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    first, second = (open_fp16(tmp_path / name, 64.0) for name in "ab")
    first.train_step(rows(0))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert (first.state()["loss_scale"], int(first.state()["good"])) == (64.0, 1)
    assert first.train_step(rows(1)) == second.train_step(rows(1))
    assert "loss_scale" not in open_pipeline(LLAMA, tmp_path / "c", make_config()).state()
