"""Adapter files: PEFT reads ours, we read PEFT's, and a file that is not right is refused before anything changes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracles import families, hf
from safetensors.torch import load_file, save_file

from quatrain.checkpoint.peft import load_adapter, read_adapter, save_adapter, target_modules
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError

LAYERS = 3
LAYER_REGEX = r".*layers\.(0|2)\..*(q_proj|up_proj)"
CONFIGS = {
    "all": InstructConfig(lora_rank=4, lora_alpha=6.0),
    "rslora-fractional-alpha": InstructConfig(lora_rank=4, lora_alpha=6.5, use_rslora=True),
    "subset": InstructConfig(lora_rank=3, lora_targets=["q_proj", "v_proj"]),
    "some-layers": InstructConfig(lora_rank=2, lora_targets=LAYER_REGEX),
    "norms": InstructConfig(lora_rank=4, train_norms=True, lora_targets=["o_proj"]),
}


def trained(variant: families.Variant, config: InstructConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    model = hf.with_adapters(families.build(variant), config, seed=3)
    return model, {name: p.detach().clone() for name, p in hf.trainable(model).items()}


def save(folder: Path, tensors: dict[str, torch.Tensor], config: InstructConfig, **changes: Any) -> None:
    arguments = {"num_layers": LAYERS, "base_name": "", "base_fingerprint": "f" * 64, **changes}
    save_adapter(folder, tensors, config, **arguments)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], InstructConfig]:
    config = CONFIGS["all"]
    _, tensors = trained(families.BY_NAME["llama"], config)
    save(tmp_path / "adapter", tensors, config)
    return tmp_path / "adapter", tensors, config


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_peft_loads_our_adapter_with_equal_logits(
    tmp_path: Path, variant: families.Variant, config: InstructConfig
) -> None:
    model, tensors = trained(variant, config)
    save(tmp_path / "adapter", tensors, config)
    ids = torch.arange(3, 20)[None]
    want = model(ids).logits

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = peft.PeftModel.from_pretrained(families.build(variant), tmp_path / "adapter", is_trainable=True)

    fresh = peft.get_peft_model(families.build(variant), peft.PeftConfig.from_pretrained(tmp_path / "adapter"))
    result = peft.set_peft_model_state_dict(fresh, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    assert set(hf.trainable(loaded)) == set(tensors)
    assert torch.equal(loaded.eval()(ids).logits, want)
    assert not torch.equal(families.build(variant)(ids).logits, want)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_we_load_what_peft_saves(tmp_path: Path, config: InstructConfig) -> None:
    model, tensors = trained(families.BY_NAME["qwen3"], config)
    model.save_pretrained(tmp_path)
    ours = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    notices = load_adapter(tmp_path, ours, config, base_fingerprint="f" * 64)
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)
    assert len(notices) == 1 and "does not say which base" in notices[0]
    options = read_adapter(tmp_path).options()
    assert (options["lora_rank"], options["lora_alpha"]) == (config.lora_rank, config.lora_alpha)
    assert (options["use_rslora"], options["train_norms"]) == (config.use_rslora, config.train_norms)
    again = trained(families.BY_NAME["qwen3"], InstructConfig(**options))[1]
    assert set(again) == set(tensors)


def test_round_trip_is_exact_and_carries_files(saved: Any, tmp_path: Path) -> None:
    """I12: without added tokens no embedding is stored. I4: names come back as they went."""
    folder, tensors, config = saved
    save(folder, tensors, config, files={"tokenizer.json": b"{\r\n}"}, base_name="some/base")
    adapter = read_adapter(folder)
    assert (folder / "tokenizer.json").read_bytes() == b"{\r\n}"
    assert adapter.base_fingerprint == "f" * 64 and adapter.base_name == "some/base"
    assert adapter.tensors.keys() == tensors.keys()
    assert all(torch.equal(adapter.tensors[name], tensors[name]) for name in tensors)
    assert not [key for key in adapter.tensors if "embed" in key or "lm_head" in key]
    assert json.loads((folder / "adapter_config.json").read_bytes())["lora_alpha"] == 6


def test_scale_is_not_folded_into_b(saved: Any) -> None:
    folder, tensors, _ = saved
    stored = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_each_tensor_is_read_in_its_own_dtype(saved: Any) -> None:
    """I2: bf16 and fp32 side by side in one file: every value arrives exactly."""
    folder, tensors, config = saved
    mixed = {name: t.to(torch.bfloat16) if "lora_B" in name else t for name, t in tensors.items()}
    save_file(mixed, folder / "adapter_model.safetensors")
    ours = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load_adapter(folder, ours, config, base_fingerprint="f" * 64)
    assert all(torch.equal(ours[name], mixed[name].float()) for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())


def test_default_spelled_keys_are_taken(saved: Any) -> None:
    """I4: only the last part of a name is read another way; one that holds `weight` or `lora_A` elsewhere keeps it."""
    folder, tensors, config = saved
    name = "base_model.model.lora_A.default.pair_weighted_avg.proj.lora_A{}.weight"
    save_file({name.format(".default"): torch.ones(2)}, folder / "adapter_model.safetensors")
    assert read_adapter(folder).tensors.keys() == {name.format("")}
    spelled = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    save_file(spelled, folder / "adapter_model.safetensors")
    ours = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load_adapter(folder, ours, config, base_fingerprint="f" * 64)
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)


def test_all_bad_tensors_are_reported_together_and_nothing_changes(saved: Any) -> None:
    folder, tensors, config = saved
    names = sorted(tensors)
    bad = dict(tensors)
    del bad[names[0]]
    bad[names[1]] = tensors[names[1]][:, :1].contiguous()
    bad["base_model.model.pair_weighted_avg.proj.lora_A.weight"] = torch.ones(2)
    save_file(bad, folder / "adapter_model.safetensors")
    ours = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as error:
        load_adapter(folder, ours, config, base_fingerprint="f" * 64)
    message = str(error.value)
    assert f"missing {names[0]}" in message
    assert f"{names[1]} is {list(bad[names[1]].shape)}, want {list(tensors[names[1]].shape)}" in message
    assert "unexpected base_model.model.pair_weighted_avg.proj.lora_A.weight" in message  # I4: not renamed
    assert not any(tensor.any() for tensor in ours.values())


def test_a_model_of_another_size_is_refused_in_a_few_lines(saved: Any) -> None:
    folder, tensors, config = saved
    ours = {name.replace("layers.", "layers.1"): torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"does not fit \(\d\d problems\): missing .* and \d\d more") as error:
        load_adapter(folder, ours, config, base_fingerprint="f" * 64)
    assert len(str(error.value)) < 1500


def test_other_options_are_refused(saved: Any) -> None:
    folder, tensors, config = saved
    other = config.model_copy(update={"lora_alpha": 12.0})
    with pytest.raises(CheckpointError, match=r"its scale is 1\.5, here .* give 3"):
        load_adapter(folder, tensors, other, base_fingerprint="f" * 64)


def test_another_base_is_refused_unless_asked_for(saved: Any) -> None:
    folder, tensors, config = saved
    with pytest.raises(CheckpointError, match="other base weights"):
        load_adapter(folder, tensors, config, base_fingerprint="0" * 64)
    (notice,) = load_adapter(folder, tensors, config, base_fingerprint="0" * 64, any_base=True)
    assert "other base weights" in notice
    assert load_adapter(folder, tensors, config, base_fingerprint="f" * 64) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"some_future_variant": {"x": 1}}, "some_future_variant"),
        ({"r": 0}, "r: want a whole number"),
        ({"r": -4}, "r: want a whole number"),
        ({"r": 1.5}, "r: want a whole number"),
        ({"lora_alpha": 0}, "lora_alpha: want a number above 0"),
        ({"lora_alpha": "8"}, "lora_alpha: want a number above 0"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(saved: Any, change: dict[str, Any], message: str) -> None:
    """I7: a rank or scale that means nothing, and variants that are not supported, in a file."""
    folder, _, _ = saved
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder)
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_broken_configuration_is_refused(saved: Any, content: bytes) -> None:
    folder, _, _ = saved
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(folder)


def cut(content: bytes) -> list[bytes]:
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    huge_header = (1 << 63).to_bytes(8, "little") + content[8:]
    return [b"", content[:5], content[: len(content) * 6 // 10], content[:-1], content + b"x", lfs, huge_header]


@pytest.mark.parametrize("case", range(7))
def test_cut_and_foreign_weights_are_refused(saved: Any, case: int) -> None:
    """H11, M2: an empty, cut or foreign adapter file."""
    folder, _, _ = saved
    path = folder / "adapter_model.safetensors"
    content = cut(path.read_bytes())[case]
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder)
    assert f"{path}: is not a complete safetensors file ({len(content)} bytes)" in str(error.value)


def test_missing_files_are_named(saved: Any, tmp_path: Path) -> None:
    folder, _, _ = saved
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(tmp_path / "nowhere")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle, which is never loaded"):
        read_adapter(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_reach_no_file_and_no_engine(saved: Any, value: float) -> None:
    folder, tensors, config = saved
    before = (folder / "adapter_model.safetensors").read_bytes()
    name = sorted(tensors)[3]
    bad = {**tensors, name: torch.full_like(tensors[name], value)}
    with pytest.raises(CheckpointError, match="hold NaN or infinity: " + name.replace(".", r"\.")):
        save(folder, bad, config)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    save_file(bad, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        read_adapter(folder)


def test_a_write_that_does_not_read_back_leaves_the_old_adapter(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tensors, config = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = Path.write_bytes

    def flip_last_byte(path: Path, content: bytes) -> int:
        changed = content[:-1] + bytes([content[-1] ^ 1]) if path.suffix == ".safetensors" else content
        return write(path, changed)

    monkeypatch.setattr(Path, "write_bytes", flip_last_byte)
    with pytest.raises(CheckpointError, match="does not read back"):
        save(folder, {name: tensor + 1 for name, tensor in tensors.items()}, config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_target_modules_are_a_list_only_when_all_layers_match() -> None:
    def names(*modules: str) -> list[str]:
        return [f"base_model.model.model.layers.{module}.lora_A.weight" for module in modules]

    every = names("0.self_attn.q_proj", "1.self_attn.q_proj")
    assert target_modules(every, 2) == ["q_proj"]
    assert target_modules(every, 3) == r"model\.layers\.(?:0|1)\.(?:self_attn\.q_proj)"
    mixed = names("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
    assert (
        target_modules(mixed, 2)
        == r"model\.layers\.(?:1)\.(?:mlp\.up_proj)|model\.layers\.(?:0|1)\.(?:self_attn\.q_proj)"
    )


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    """M2: saving replaces a folder, which may only be an earlier adapter."""
    _, tensors = trained(families.BY_NAME["llama"], CONFIGS["all"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty and holds no adapter"):
        save(tmp_path, tensors, CONFIGS["all"])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
