"""From training to PEFT and back: the saved adapter gives PEFT the engine's own logits, and another engine its bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import tolerances as tol
import torch
from oracles import families, hf
from oracles.engine import make_config

from quatrain.checkpoint.peft import read_adapter
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError
from quatrain.train.pipeline import InstructPipeline

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"lora_dropout": 0.2},
    "rslora": {"use_rslora": True, "lora_alpha": 5.5},
    "subset-of-layers": {"lora_targets": r".*layers\.[02]\..*(v_proj|down_proj)"},
    "norms": {"train_norms": True, "lora_targets": ["q_proj", "o_proj"]},
    "plain-weights": {"quantize": "none"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_peft_and_a_second_engine_agree_with_the_first(
    tmp_path: Path, variant: families.Variant, options: dict[str, Any]
) -> None:
    config = make_config(learning_rate=0.02, **options)
    base = families.save(variant, tmp_path / "base")
    pipeline = InstructPipeline.from_pretrained(tmp_path / "base", config)
    rows = hf.make_rows([5, 9, 16], families.VOCAB)
    untrained = pipeline.hidden_states(rows)
    for _ in range(3):
        pipeline.train_step(rows)
    pipeline.save_adapter(tmp_path / "adapter")
    hidden = pipeline.hidden_states(rows)
    ours = hidden @ pipeline.engine.params.head.T
    assert hf.norm_error(hidden, untrained) > 1e-3  # training did change the answer

    if config.quantize == "nf4":
        hf.round_linears_to_nf4(base, double_quant=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    theirs_logits = torch.cat([theirs(input_ids=torch.tensor([row.input_ids])).logits[0] for row in rows])
    assert hf.norm_error(ours, theirs_logits) <= tol.ENGINE_FP32

    saved = read_adapter(tmp_path / "adapter")
    assert saved.base_fingerprint == pipeline.source.fingerprint()
    fresh = InstructPipeline.from_pretrained(
        tmp_path / "base", InstructConfig(**{**config.model_dump(), **saved.options()})
    )
    assert fresh.load_adapter(tmp_path / "adapter") == []
    assert torch.equal(fresh.hidden_states(rows), hidden)


def test_loading_is_all_or_nothing(tmp_path: Path) -> None:
    variant = families.BY_NAME["llama"]
    families.save(variant, tmp_path / "base")
    families.save(variant, tmp_path / "other", seed=1)
    pipeline = InstructPipeline.from_pretrained(tmp_path / "base", make_config())
    pipeline.train_step(hf.make_rows([9], families.VOCAB))
    pipeline.save_adapter(tmp_path / "adapter")
    for folder, options, message in (
        ("other", {}, "was trained on other base weights"),
        ("base", {"lora_rank": 8}, "its rank is 4, here lora_rank is 8"),
        ("base", {"lora_targets": ["q_proj"]}, "unexpected base_model"),
    ):
        second = InstructPipeline.from_pretrained(tmp_path / folder, make_config(**options))
        before = {name: tensor.clone() for name, tensor in second.state().items()}
        with pytest.raises(CheckpointError, match=message):
            second.load_adapter(tmp_path / "adapter")
        assert all(torch.equal(tensor, before[name]) for name, tensor in second.state().items())
    second = InstructPipeline.from_pretrained(tmp_path / "other", make_config())
    (notice,) = second.load_adapter(tmp_path / "adapter", any_base=True)
    assert "other base weights" in notice
