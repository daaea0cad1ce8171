"""The fp64 oracle is transformers + PEFT with more digits, and nothing else."""

from __future__ import annotations

import pytest
import torch
from oracles import families, hf

from quatrain.config import InstructConfig


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_strict_fp64_equals_transformers_to_fp32_rounding(variant: families.Variant) -> None:
    config = InstructConfig(lora_rank=4, lora_alpha=6.0, train_norms=True)
    rows = hf.make_rows([3, 9, 17], families.VOCAB)
    plain = hf.with_adapters(families.build(variant), config)
    strict = hf.strict_fp64(hf.with_adapters(families.build(variant), config))

    loss, gradients = hf.loss_and_gradients(plain, rows)
    want_loss, want_gradients = hf.loss_and_gradients(strict, rows)

    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert set(gradients) == set(want_gradients)
    norms = 2 * 3 + 1 + (2 * 3 if variant.family == "qwen3" else 0)
    assert len(gradients) == 2 * 7 * 3 + norms
    assert all(g.dtype == torch.float64 for g in want_gradients.values())
    worst = max((hf.norm_error(gradients[name], want), name) for name, want in want_gradients.items())
    assert worst[0] < 1e-4, worst


def test_the_oracle_can_see_a_small_fault() -> None:
    """One weight off by a thousandth moves a gradient by far more than any bound used here."""
    config = InstructConfig(lora_rank=4)
    rows = hf.make_rows([9], families.VOCAB)
    variant = families.BY_NAME["llama"]
    good = hf.strict_fp64(hf.with_adapters(families.build(variant), config))
    bad = hf.strict_fp64(hf.with_adapters(families.build(variant), config))
    with torch.no_grad():
        dict(bad.named_parameters())["base_model.model.model.layers.2.mlp.down_proj.base_layer.weight"][0, 0] += 1e-3
    _, want = hf.loss_and_gradients(good, rows)
    _, got = hf.loss_and_gradients(bad, rows)
    assert max(hf.norm_error(got[name], want[name]) for name in want) > 1e-5
