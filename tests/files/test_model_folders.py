"""Hugging Face folders: what loads, what is refused, and what a load leaves in memory."""

from __future__ import annotations

import json
import shutil
import weakref

import pytest
import torch
from oracles import families
from safetensors.torch import load_file, save_file

from quatrain.checkpoint.load import load_params
from quatrain.checkpoint.names import linear_name
from quatrain.checkpoint.open import open_source
from quatrain.errors import ModelError
from quatrain.model.spec import LINEARS
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4.reference import block_absmax, quantize


def saved(folder, name: str = "llama", **options):
    """(folder of a tiny model, its state dict)."""
    return folder, families.save(families.BY_NAME[name], folder, **options).state_dict()


def params_of(folder, quantize="none", dtype=torch.float32, double_quant=True, **more):
    source = open_source(str(folder))
    return load_params(source, quantize=quantize, double_quant=double_quant, compute_dtype=dtype, **more)


def edit_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_weights(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_every_tensor_arrives(variant, tmp_path):
    state = families.save(variant, tmp_path).state_dict()
    params = params_of(tmp_path)
    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert torch.equal(params.embed, state["model.embed_tokens.weight"])
    assert torch.equal(params.head, state["lm_head.weight"])
    assert (params.head is params.embed) == params.spec.tie_word_embeddings
    assert torch.equal(params.final_norm, state["model.norm.weight"])
    for layer, block in enumerate(params.blocks):
        prefix = f"model.layers.{layer}."
        got = {"input_layernorm.weight": block.input_norm, "post_attention_layernorm.weight": block.post_norm}
        got |= {"self_attn.q_norm.weight": block.q_norm, "self_attn.k_norm.weight": block.k_norm}
        for name in LINEARS:
            got[f"{linear_name(name)}.weight"] = block.linears[name].weight
            got[f"{linear_name(name)}.bias"] = block.linears[name].bias
        for name, tensor in got.items():
            if tensor is None:
                assert prefix + name not in state
            else:
                assert torch.equal(tensor, state[prefix + name])
                used.add(prefix + name)
    assert used == set(state), "J7: every tensor of the file is used"


def test_quantised_codes_and_dtypes(tmp_path):
    """J8: norms, those of q and k included, stay what they are; only matrices become NF4."""
    folder, state = saved(tmp_path, "qwen3-bias")
    params = params_of(folder, "nf4", torch.bfloat16)
    for layer, block in enumerate(params.blocks):
        for name, linear in block.linears.items():
            want = quantize(state[f"model.layers.{layer}.{linear_name(name)}.weight"], double_quant=True)
            assert isinstance(linear.weight, Nf4Tensor) and torch.equal(linear.weight.codes, want.codes)
            assert linear.weight.code2 is want.code2, "one code book for all"
            assert linear.bias is None or linear.bias.dtype == torch.bfloat16
        assert block.input_norm.dtype == block.post_norm.dtype == block.q_norm.dtype == torch.float32
    assert params.embed.dtype == params.head.dtype == torch.bfloat16
    fp64 = params_of(folder, "nf4", torch.float64)
    assert fp64.embed.dtype == fp64.final_norm.dtype == fp64.blocks[0].q_norm.dtype == torch.float64
    assert params_of(folder, "nf4", double_quant=False).blocks[0].linears["q_proj"].weight.absmax is not None


def test_shards_and_their_index(tmp_path):
    folder, state = saved(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    params = params_of(folder)
    assert torch.equal(params.blocks[2].linears["up_proj"].weight, state["model.layers.2.mlp.up_proj.weight"])


def test_the_index_decides(tmp_path):
    folder, state = saved(tmp_path, max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(key for key, file in index["weight_map"].items() if file == shards[0])
    stale = load_file(folder / shards[1])
    save_file({**stale, name: torch.full_like(state[name], 7.0)}, folder / shards[1])
    save_file({"other": torch.zeros(3)}, folder / "not-in-the-index.safetensors")
    assert open_source(str(folder)).inventory().keys() == index["weight_map"].keys()
    tensors = dict(open_source(str(folder)).tensors())
    assert torch.equal(tensors[name], state[name])

    (folder / shards[0]).rename(folder / "elsewhere")
    with pytest.raises(ModelError, match=f"the index lists files that are missing: {shards[0]}"):
        open_source(str(folder))


def test_an_index_that_contradicts_its_shards(tmp_path):
    folder, _ = saved(tmp_path, max_shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    with pytest.raises(
        ModelError, match=r"listed but not there: model.ghost.*; there but not listed: model.norm.weight"
    ):
        open_source(str(folder))
    path.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="want the name of a file in the folder"):
        open_source(str(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_h12_type_is_read_per_tensor(tmp_path, dtype):
    """H12: bf16, fp16 and fp32 in one file: the same codes as from their exact fp32 values."""
    folder, _ = saved(tmp_path)
    edit_weights(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items() if "1." in k or "norm" in k}))
    mixed = params_of(folder, "nf4")
    edit_weights(folder, lambda t: t.update({k: v.float() for k, v in t.items()}))
    exact = params_of(folder, "nf4")
    for ours, theirs in zip(mixed.blocks, exact.blocks, strict=True):
        assert torch.equal(ours.input_norm, theirs.input_norm)
        for name in LINEARS:
            assert torch.equal(ours.linears[name].weight.codes, theirs.linears[name].weight.codes)
            assert torch.equal(ours.linears[name].weight.absmax2, theirs.linears[name].weight.absmax2)


def test_j11_tied_and_untied_heads(tmp_path):
    """J11: a tied head may be absent or equal; absent and untied, or tied and different, is refused."""
    folder, state = saved(tmp_path / "a", "llama-tied-own-head-dim")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    params = params_of(folder)
    assert params.head is params.embed

    edit_weights(folder, lambda t: t.update({"lm_head.weight": state["lm_head.weight"].clone()}))
    assert params_of(folder).head is not None, "the same head twice is fine"
    edit_weights(folder, lambda t: t["lm_head.weight"].add_(0.5))
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but lm_head.weight .* differ by 0.5"):
        params_of(folder)

    folder, _ = saved(tmp_path / "b")
    edit_weights(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head.weight is missing"):
        params_of(folder)


def test_all_misfits_are_reported_together(tmp_path):
    """J7, J13: a missing, an unexpected and a misshapen tensor, all in one error."""
    folder, _ = saved(tmp_path)

    def spoil(tensors):
        tensors.pop("model.norm.weight")
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 6)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].double()

    edit_weights(folder, spoil)
    with pytest.raises(ModelError) as caught:
        params_of(folder)
    for said in (
        "model.norm.weight is missing",
        "model.layers.0.self_attn.q_proj.bias [64] is unexpected",
        "model.layers.1.mlp.up_proj.weight: want shape [96, 64], got [5, 6]",
        "model.embed_tokens.weight: type F64 is not supported",
    ):
        assert said in str(caught.value)
    assert "BF16" in (caught.value.hint or "")


def test_known_buffers_are_ignored(tmp_path):
    folder, state = saved(tmp_path)
    edit_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(
        params_of(folder).blocks[0].linears["q_proj"].weight, state["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("mode", ["nf4", "none"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused_by_name(tmp_path, mode, name, bad):
    folder, _ = saved(tmp_path)
    edit_weights(folder, lambda t: t[name].view(-1)[3:4].fill_(bad))
    with pytest.raises(ModelError, match=f"{folder}: {name}.*NaN or infinity") as error:
        params_of(folder, mode)
    assert "damaged" in str(error.value.hint) and error.value.__cause__ is None


@pytest.mark.parametrize("fault", [lambda w: w.mul_(2), lambda w: w.zero_(), lambda w: w.neg_()])
def test_h6_a_tensor_that_does_not_survive_quantisation_stops_the_load(tmp_path, fault):
    """H6: a scaled, an all-zero and a negated result are noticed while loading."""
    folder, _ = saved(tmp_path)
    calls = []

    def faulty(weight, *, double_quant):
        calls.append(weight)
        return quantize(fault(weight.clone()) if len(calls) == 5 else weight, double_quant=double_quant)

    with pytest.raises(ModelError, match=r"model.layers.0.+quantisation went wrong: relative error [12inf]"):
        params_of(folder, "nf4", quantizer=faulty)


def test_h6_zero_weights_are_no_fault(tmp_path):
    """H6: zeros that are zeros in the file."""
    folder, _ = saved(tmp_path)
    edit_weights(folder, lambda t: t["model.layers.0.mlp.up_proj.weight"].zero_())
    loaded = params_of(folder, "nf4", double_quant=False).blocks[0].linears["up_proj"].weight
    assert isinstance(loaded, Nf4Tensor)
    assert not torch.any(block_absmax(loaded))


def test_one_tensor_at_a_time(tmp_path):
    """M7: when the source makes the next tensor, the load has let go of the quantised one before it."""
    folder, _ = saved(tmp_path)
    source = open_source(str(folder))
    inner, alive = source.tensors, []

    def watched():
        previous = None
        for name, tensor in inner():
            if previous is not None and "proj" in previous[0]:
                alive.append(previous[1]() is not None)
            previous = (name, weakref.ref(tensor))
            yield name, tensor
            del tensor

    source.tensors = watched
    load_params(source, quantize="nf4", double_quant=True, compute_dtype=torch.bfloat16)
    assert len(alive) >= 20 and not any(alive)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq"),
        ({"quant_method": "awq"}, "quantised by awq"),
        ({"quant_method": "fp8"}, "quantised by fp8"),
        ({"quant_method": "compressed-tensors"}, "quantised by compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit weights"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes fp4"),
    ],
)
def test_h8_other_quantisations_are_refused_by_method(tmp_path, quantization, said):
    """H8: GPTQ, AWQ, FP8 and others by name."""
    folder, _ = saved(tmp_path)
    edit_config(folder, quantization_config=quantization)
    with pytest.raises(ModelError, match=said):
        open_source(str(folder))


def test_j12_refused_before_any_weight_is_looked_at(tmp_path):
    """J12: the weights need not even be weights."""
    folder, _ = saved(tmp_path)
    edit_config(folder, model_type="mixtral")
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(ModelError, match="architecture 'mixtral' is not supported"):
        open_source(str(folder))


def test_folders_without_usable_weights(tmp_path):
    folder, _ = saved(tmp_path / "m")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)") as caught:
        open_source(str(folder))
    assert "save_pretrained" in (caught.value.hint or "")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no weights"):
        open_source(str(folder))
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(weights)
    with pytest.raises(ModelError, match=r"several safetensors files and no model.safetensors.index.json"):
        open_source(str(folder))
    (folder / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"config.json: not JSON"):
        open_source(str(folder))
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config.json is missing") as caught:
        open_source(str(folder))
    assert "adapter" in (caught.value.hint or "")


def test_eos_ids_notes_size_and_no_tokenizer(tmp_path):
    folder, state = saved(tmp_path)
    edit_config(folder, eos_token_id=[2, 5], rms_norm_eps="absent")
    (folder / "generation_config.json").unlink(missing_ok=True)
    source = open_source(str(folder))
    assert source.eos_token_ids == (2, 5) and source.tokenizer() is None and not source.is_nf4
    assert source.num_bytes == sum(t.numel() * 4 for t in state.values())
    assert any("rms_norm_eps" in note for note in source.notes)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_source(str(folder)).eos_token_ids == (7,)


def test_fingerprint_is_of_the_content(tmp_path):
    folder, _ = saved(tmp_path / "a")
    first = open_source(str(folder)).fingerprint()
    shutil.copytree(folder, tmp_path / "b")
    assert open_source(str(tmp_path / "b")).fingerprint() == first
    edit_weights(tmp_path / "b", lambda t: t["model.norm.weight"][3:4].add_(1e-3))
    assert open_source(str(tmp_path / "b")).fingerprint() != first
