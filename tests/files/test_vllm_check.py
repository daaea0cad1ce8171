"""Whether vLLM would load an adapter: every rule of its loader, on files of ours, of PEFT's layout, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_rows, write_tiny_model

from quatrain.checkpoint.peft import save_adapter
from quatrain.checkpoint.vllm import check
from quatrain.cli.main import main
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError
from quatrain.model.adapters import AdapterSet
from quatrain.model.shapes import shape_spec

WEIGHTS = "adapter_model.safetensors"


def adapter(folder: Path, **options: Any) -> Path:
    """An adapter of ours on the first two layers of SmolLM2's shape."""
    options = {"lora_rank": 2, "lora_targets": r"model\.layers\.[01]\..*", **options}
    spec, config = shape_spec("smollm2-135m"), InstructConfig(**options)
    adapters = AdapterSet(spec, config, torch.float32)
    adapters.initialise(0)
    save_adapter(folder, adapters.named(), config, num_layers=30, base_name="some/base", base_fingerprint="f" * 64)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("rank", "flags"),
    [
        (1, "--enable-lora --max-lora-rank 8"),
        (8, "--enable-lora --max-lora-rank 8"),
        (9, "--enable-lora"),
        (16, "--enable-lora"),
        (17, "--enable-lora --max-lora-rank 32"),
    ],
)
def test_ours_load_with_the_smallest_rank_that_the_server_takes(tmp_path: Path, rank: int, flags: str) -> None:
    verdict = check(adapter(tmp_path / "a", lora_rank=rank))
    assert verdict.loads and verdict.flags == flags and verdict.notes == []
    assert verdict.lines() == [f"loads in vLLM 0.14: {flags}"]


def test_rslora_and_some_layers_load(tmp_path: Path) -> None:
    """The scale is read from use_rslora, and tensor names decide over target_modules."""
    assert check(adapter(tmp_path / "a", use_rslora=True, lora_targets=r".*layers\.1\..*q_proj")).loads


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 513}, "r=513 is above 512"),
        ({"r": None}, "r is missing"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} would be ignored"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4} would be ignored"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True would be ignored"),
        ({"r": 4}, "has rank 2, r is 4"),
    ],
)
def test_what_its_configuration_reader_refuses(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    edit(adapter(tmp_path / "a"), **changes)
    verdict = check(tmp_path / "a")
    assert not verdict.loads and said in verdict.lines()[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".lora_A.weight", ".lora_A.default.weight", "is no LoRA weight's name"),
        (".lora_A.weight", ".lora_magnitude_vector", "is no LoRA weight's name"),
        (".lora_A.weight", ".bias", "is no LoRA weight's name"),
        ("q_proj", "c_attn", "model.layers.0.self_attn.c_attn is not one of q_proj"),
    ],
)
def test_names_that_it_cannot_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = adapter(tmp_path / "a") / WEIGHTS
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    verdict = check(tmp_path / "a")
    assert not verdict.loads and said in " ".join(verdict.problems)


def test_half_a_pair_and_trained_norms(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a") / WEIGHTS
    tensors = load_file(path)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, path)
    assert check(tmp_path / "a").problems == ["model.layers.0.self_attn.q_proj has a lora_A alone"]
    problems = " ".join(check(adapter(tmp_path / "norms", train_norms=True)).problems)
    assert "modules_to_save=" in problems and "input_layernorm.weight is no LoRA weight's name" in problems
    assert "more" in problems  # sixty norms are not sixty lines


def test_an_adapted_head_is_a_note_and_saved_base_weights_are_nothing(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a") / WEIGHTS
    head = {f"base_model.model.lm_head.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file({**load_file(path), **head, "base_model.model.lm_head.base_layer.weight": torch.ones(2)}, path)
    verdict = check(tmp_path / "a")
    assert verdict.loads and verdict.notes == ["lm_head is adapted: only models whose class lists it take that"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{"])
def test_no_adapter_at_all(tmp_path: Path, content: bytes) -> None:
    (adapter(tmp_path / "a") / "adapter_config.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        check(tmp_path / "a")


def test_the_command_and_the_end_of_a_run_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = write_tiny_model(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", 8)
    words = ["train", "--model", str(model), "--data", str(rows), "--max-steps", "1", "--lora-rank", "20"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    verdict = "loads in vLLM 0.14: --enable-lora --max-lora-rank 32"
    assert verdict in capsys.readouterr().out
    assert main(["adapter", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert verdict in said and "rank 20, alpha 32" in said and "14 modules" in said
    edit(tmp_path / "run" / "adapter", use_dora=True)
    assert main(["adapter", str(tmp_path / "run"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["vllm"]["loads"] is False and "use_dora=True" in facts["problem"]
    assert main(["adapter", str(tmp_path)]) == 2
    assert "holds no adapter_config.json" in capsys.readouterr().err
