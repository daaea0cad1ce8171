"""Whole optimizer steps against torch.optim.AdamW and clip_grad_norm_ on the PEFT model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from oracles import families, hf
from oracles.engine import make_config, open_oracle, open_pipeline

from quatrain.data.row import Row
from quatrain.errors import ConfigError, DataError
from quatrain.train.pipeline import InstructPipeline

RATES = (2e-3, 1e-3, 5e-4)
LLAMA, QWEN3 = families.BY_NAME["llama"], families.BY_NAME["qwen3"]


def rows_of_step(step: int) -> list[Row]:
    return hf.make_rows([6, 13, 9, 17], families.VOCAB, seed=100 + step)


class TorchTrainer:
    """The oracle's step: mean over all supervised tokens, clip_grad_norm_, AdamW with no decay on norms."""

    def __init__(self, wrapped: Any, config: Any) -> None:
        self.wrapped, self.config = wrapped, config
        named = hf.trainable(wrapped)
        lora = [p for name, p in named.items() if ".lora_" in name]
        norms = [p for name, p in named.items() if ".lora_" not in name]
        groups = [{"params": lora, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.adam_eps)

    def step(self, rows: list[Row], lr: float) -> tuple[float, float]:
        """(loss, norm before clipping)."""
        loss, _ = hf.loss_and_gradients(self.wrapped, rows)
        parameters = list(hf.trainable(self.wrapped).values())
        limit = self.config.max_grad_norm if self.config.clip == "global" else math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss, norm


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.05, "weight_decay": 0.1},
        {"max_grad_norm": 1e6},
        {"clip": "none", "train_norms": True, "weight_decay": 0.1},
        {"max_grad_norm": 0.05, "use_rslora": True, "betas": (0.8, 0.95), "adam_eps": 1e-6, "train_norms": True},
    ],
    ids=["clipped", "below-the-limit", "unclipped-norms", "clipped-norms-rslora"],
)
@pytest.mark.parametrize("variant", [LLAMA, QWEN3], ids=str)
def test_three_steps_equal_torch(
    tmp_path: Path, variant: families.Variant, options: dict[str, Any], dtype: str
) -> None:
    """F13: one clip of the whole gradient, then AdamW. In fp64 with AdamW's usual eps. In fp32 a larger one: Adam
    divides each gradient by its own size, so that where one is nearly zero its rounding would show as a whole update,
    on any two correct implementations."""
    if dtype == "fp32":
        options = {**options, "adam_eps": 1e-3}
    config = make_config(compute_dtype=dtype, **options)
    trainer = TorchTrainer(open_oracle(variant, config), config)
    pipeline = open_pipeline(variant, tmp_path, config)
    bound = tol.OPTIMIZER if dtype == "fp32" else tol.ENGINE_FP64
    for step, lr in enumerate(RATES):
        want_loss, want_norm = trainer.step(rows_of_step(step), lr)
        pipeline.set_learning_rate(lr)
        result = pipeline.train_step(rows_of_step(step))
        assert result.loss == pytest.approx(want_loss, rel=tol.ENGINE_FP32 if dtype == "fp32" else tol.ENGINE_FP64)
        assert result.grad_norm == pytest.approx(want_norm, rel=tol.ENGINE_FP32 if dtype == "fp32" else 1e-9)
        assert (result.step, result.lr, result.skipped) == (step + 1, lr, False)
    for name, want in hf.trainable(trainer.wrapped).items():
        error = hf.norm_error(pipeline.adapters.named()[name], want.detach())
        assert error <= bound, (name, error)


def test_three_steps_in_fp32_from_the_same_gradients(tmp_path: Path) -> None:
    """The usual eps in fp32: torch's clip and AdamW get the engine's own gradients, so only the update is compared."""
    config = make_config(max_grad_norm=0.05, weight_decay=0.1)
    pipeline = open_pipeline(QWEN3, tmp_path, config)
    leaves = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in pipeline.adapters.named().items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.0, weight_decay=0.1)
    for step, lr in enumerate(RATES):
        for name, gradient in pipeline.loss_and_gradients(rows_of_step(step))[1].items():
            leaves[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(leaves.values(), config.max_grad_norm)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        pipeline.set_learning_rate(lr)
        pipeline.train_step(rows_of_step(step))
    for name, leaf in leaves.items():
        assert hf.norm_error(pipeline.adapters.named()[name], leaf.detach()) <= tol.OPTIMIZER, name


def masters(pipeline: InstructPipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipeline.state().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("clip", ["global", "none", "layer"])
def test_a_non_finite_gradient_changes_nothing_but_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str
) -> None:
    """G2: an inf in the gradient of the third step. Parameters and moments keep their bits; training goes on after."""
    config = make_config(clip=clip)
    pipeline, unbroken = (open_pipeline(LLAMA, tmp_path / name, config) for name in ("a", "b"))
    for p in (pipeline, unbroken):
        for step in range(2):
            p.train_step(rows_of_step(step))
    before = masters(pipeline)

    embed = pipeline.engine.params.embed
    saved = embed.clone()
    embed.fill_(float("nan"))  # every segment's gradient is NaN
    result = pipeline.train_step(rows_of_step(2))
    embed.copy_(saved)
    assert result.skipped and result.step == 2 and not math.isfinite(result.grad_norm)
    after = masters(pipeline)
    assert int(after.pop("skipped")) == int(before.pop("skipped")) + 1
    assert equal(after, before)

    for step in range(3, 5):
        results = [p.train_step(rows_of_step(step)) for p in (pipeline, unbroken)]
        assert results[0] == results[1]
    last, want = masters(pipeline), masters(unbroken)
    assert int(last.pop("skipped")) == 1 and int(want.pop("skipped")) == 0
    assert equal(last, want)


def test_an_inf_in_one_gradient_buffer_skips_the_whole_update(tmp_path: Path) -> None:
    """G2: one inf in one gradient buffer: no parameter and no moment changes."""
    pipeline = open_pipeline(LLAMA, tmp_path, make_config())
    before = masters(pipeline)
    optimizer = pipeline.engine.optimizer
    end_step = optimizer.end_step

    def poisoned() -> None:
        pipeline.adapters.grad[7] = float("inf")
        end_step()

    optimizer.end_step = poisoned  # type: ignore[method-assign]
    assert pipeline.train_step(rows_of_step(0)).skipped
    after = masters(pipeline)
    assert int(after.pop("skipped")) == 1
    before.pop("skipped")
    assert equal(after, before)


def test_layer_clip_is_a_clip_of_each_layer(tmp_path: Path) -> None:
    """Each segment by its own norm, on the oracle's gradients: one step of AdamW from zero moments, in fp64."""
    config = make_config(clip="layer", max_grad_norm=0.05, train_norms=True, weight_decay=0.1, compute_dtype="fp64")
    oracle = open_oracle(LLAMA, config)
    trainer = TorchTrainer(oracle, config)
    hf.loss_and_gradients(oracle, rows_of_step(0))
    named = hf.trainable(oracle)
    for segment in ("layers.0.", "layers.1.", "layers.2.", "model.norm."):
        part = [p for name, p in named.items() if segment in name]
        assert part and torch.nn.utils.clip_grad_norm_(part, config.max_grad_norm) > config.max_grad_norm
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-3
    trainer.optimizer.step()
    pipeline = open_pipeline(LLAMA, tmp_path, config)
    pipeline.set_learning_rate(1e-3)
    pipeline.train_step(rows_of_step(0))
    for name, want in named.items():
        assert hf.norm_error(pipeline.adapters.named()[name], want.detach()) <= tol.ENGINE_FP64, name


def test_layer_clip_refuses_accumulation(tmp_path: Path) -> None:
    pipeline = open_pipeline(LLAMA, tmp_path, make_config(clip="layer"))
    rows = rows_of_step(0)
    before = masters(pipeline)
    with pytest.raises(ConfigError, match="want one micro-batch a step, got 2"):
        pipeline.train_micro_batches([rows[:2], rows[2:]])
    assert equal(masters(pipeline), before)


def test_layer_clip_equals_global_where_nothing_is_clipped(tmp_path: Path) -> None:
    by_mode = {}
    for clip in ("global", "layer", "none"):
        pipeline = open_pipeline(QWEN3, tmp_path / clip, make_config(clip=clip, max_grad_norm=1e9, train_norms=True))
        result = [pipeline.train_step(rows_of_step(step)) for step in range(3)][-1]
        by_mode[clip] = (result, masters(pipeline))
    assert by_mode["layer"][0].grad_norm == by_mode["global"][0].grad_norm
    assert equal(by_mode["layer"][1], by_mode["global"][1]) and equal(by_mode["none"][1], by_mode["global"][1])


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_loss_and_norm_do_not_grow_with_accumulation(tmp_path: Path, accumulation: int) -> None:
    """E2: the same rows again and again; the logged loss and norm are those of one row."""
    pipeline = open_pipeline(LLAMA, tmp_path, make_config())
    (row,) = hf.make_rows([9], families.VOCAB)
    want_loss, want = pipeline.loss_and_gradients([row])
    want_norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.values()))
    result = pipeline.train_micro_batches([[row]] * accumulation)
    assert result.loss == pytest.approx(want_loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(want_norm, rel=1e-5)
    assert result.num_response_tokens == accumulation * row.num_supervised


def test_every_adapter_moves(tmp_path: Path) -> None:
    """E3: accumulation 4, fresh adapters (B = 0): after one step every B is non-zero, after two every A has changed."""
    families.save(LLAMA, tmp_path)
    pipeline = InstructPipeline.from_pretrained(tmp_path, make_config())
    start = {name: tensor.clone() for name, tensor in pipeline.adapters.named().items()}
    assert all(not tensor.any() for name, tensor in start.items() if "lora_B" in name)
    for step in range(2):
        pipeline.train_micro_batches([[row] for row in rows_of_step(step)])
    for name, tensor in pipeline.adapters.named().items():
        assert not torch.equal(tensor, start[name]), name


def test_a_callers_gradient_takes_the_usual_update(tmp_path: Path) -> None:
    """`backward_step` with the loss's own gradient is `train_step`."""
    rows = rows_of_step(0)
    config = make_config(max_grad_norm=0.05)
    a, b = (open_pipeline(LLAMA, tmp_path / name, config) for name in "ab")
    hidden = a.hidden_states(rows).requires_grad_()
    logits = hidden @ a.engine.params.head.T
    wanted, at, start = [], [], 0
    for row in rows:
        for i, label in enumerate(row.labels[1:]):
            if label >= 0:
                at.append(start + i)
                wanted.append(label)
        start += len(row)
    torch.nn.functional.cross_entropy(logits[at], torch.tensor(wanted)).backward()
    result = a.backward_step(rows, hidden.grad)
    want = b.train_step(rows)
    assert math.isnan(result.loss) and result.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
    for name, tensor in b.adapters.named().items():
        assert hf.norm_error(a.adapters.named()[name], tensor) <= 3 * tol.OPTIMIZER, name


def test_bad_samples_are_refused_before_anything_changes(tmp_path: Path) -> None:
    pipeline = open_pipeline(LLAMA, tmp_path, make_config(max_seq_len=16))
    before = masters(pipeline)
    for samples, message in (
        ([([1, 2], [3] * 15)], "17 tokens, max_seq_len is 16"),
        ([([1, 2], [113])], "token id 113 is outside the embedding's 113 rows"),
        ([([1, 2], [-1])], "token id -1 is outside"),
        ([([1, 2], [])], "no supervised token in any row"),
        ([([], [5])], "no supervised token in any row"),  # its one token has nothing before it
        ([([], [])], "the row has no tokens"),
        ([], "no rows were given"),
    ):
        with pytest.raises(DataError, match=message):
            pipeline.train_step(samples)
    assert equal(masters(pipeline), before)


def test_rows_without_supervision_beside_others_change_nothing(tmp_path: Path) -> None:
    pipeline, alone = (open_pipeline(LLAMA, tmp_path / name, make_config(compute_dtype="fp64")) for name in "ab")
    rows, silent = rows_of_step(0), ([5, 6, 7], [])
    result, want = pipeline.train_step([*rows, silent]), alone.train_step(rows)
    assert result.num_response_tokens == want.num_response_tokens and result.loss == pytest.approx(want.loss, rel=1e-12)
    for name, tensor in alone.adapters.named().items():
        assert hf.norm_error(pipeline.adapters.named()[name], tensor) <= 1e-12, name
