"""Class H8 of docs/cases.md: linears that bitsandbytes has quantised already. Their codes are used, never made anew."""

from __future__ import annotations

import json

import pytest
import torch
from oracles import families
from safetensors.torch import load_file, save_file

from quatrain.checkpoint.load import load_params
from quatrain.checkpoint.names import is_linear_weight
from quatrain.checkpoint.open import open_source
from quatrain.errors import ModelError
from quatrain.ops.nf4.reference import dequantize, nested_code_book, quantize

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the oracle")


def quantized_folder(folder, *, nested=True, kind="nf4", blocksize=64, storage=torch.uint8, skip=()):
    """A tiny Llama whose linears are stored as transformers + bitsandbytes store them. Returns the fp32 state dict."""
    state = families.save(families.BY_NAME["llama-bias"], folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if is_linear_weight(n) and not n.endswith(tuple(skip))]:
        packed, quant_state = functional.quantize_4bit(
            tensors[name].half(),
            blocksize=blocksize,
            compress_statistics=nested,
            quant_type=kind,
            quant_storage=storage,
        )
        tensors[name] = packed
        for part, tensor in quant_state.as_dict(packed=True).items():
            tensors[f"{name}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    return state


def params_of(folder, quantize="nf4", dtype=torch.float32):
    return load_params(open_source(str(folder)), quantize=quantize, double_quant=True, compute_dtype=dtype)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [True, False])
def test_codes_and_statistics_are_used_as_they_are(tmp_path, nested, storage):
    """H8: a folder that is NF4 already is used as it is, bit for bit."""
    state = quantized_folder(tmp_path, nested=nested, storage=storage)
    source = open_source(str(tmp_path))
    assert source.is_nf4
    name = "model.layers.1.mlp.down_proj"
    info = source.inventory()[f"{name}.weight"]
    assert info.dtype == "NF4" and info.shape == tuple(state[f"{name}.weight"].shape)
    got = params_of(tmp_path).blocks[1].linears["down_proj"].weight
    want = quantize(state[f"{name}.weight"].half(), double_quant=nested)
    assert got.shape == want.shape and torch.equal(got.codes, want.codes) and got.nested == nested
    if nested:
        assert torch.equal(got.absmax_codes, want.absmax_codes) and torch.equal(got.absmax2, want.absmax2)
        assert torch.equal(got.offset, want.offset) and got.code2 is nested_code_book()
    else:
        assert torch.equal(got.absmax, want.absmax)


def test_without_quantisation_the_values_expand(tmp_path):
    state = quantized_folder(tmp_path)
    want = torch.empty_like(state["model.layers.0.self_attn.k_proj.weight"])
    dequantize(want, quantize(state["model.layers.0.self_attn.k_proj.weight"].half(), double_quant=True))
    assert torch.equal(params_of(tmp_path, "none").blocks[0].linears["k_proj"].weight, want)


def test_modules_that_were_skipped_are_quantised_now(tmp_path):
    state = quantized_folder(tmp_path, skip=["o_proj.weight"])
    got = params_of(tmp_path).blocks[0].linears["o_proj"].weight
    assert torch.equal(got.codes, quantize(state["model.layers.0.self_attn.o_proj.weight"], double_quant=True).codes)


def test_fp4_and_other_block_sizes_are_refused(tmp_path):
    """H5: only blocks of 64 (statistics: 256) are read; others are refused. H8: fp4 is."""
    quantized_folder(tmp_path / "fp4", kind="fp4")
    with pytest.raises(ModelError, match="bitsandbytes fp4 weights are not supported"):
        open_source(str(tmp_path / "fp4"))
    config = json.loads((tmp_path / "fp4" / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "nf4"  # the weights still say fp4
    (tmp_path / "fp4" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj.weight: bitsandbytes fp4|bitsandbytes fp4 weights"):
        open_source(str(tmp_path / "fp4"))
    quantized_folder(tmp_path / "wide", blocksize=128)
    with pytest.raises(ModelError, match=r"nf4 with blocks of 128 \(nested 256\) is not supported"):
        open_source(str(tmp_path / "wide"))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        (".absmax", None, "absmax is missing: the 4-bit weight is incomplete"),
        (".nested_absmax", lambda t: torch.full_like(t, float("nan")), "statistics hold NaN"),
        (".absmax", lambda t: t[:-1].clone(), "want torch.uint8"),
        (".quant_map", lambda t: t.flip(0).clone(), "not NF4's 16 values"),
        (".quant_state.bitsandbytes__nf4", lambda t: t[:-3].clone(), "quant_state cannot be read"),
        ("", lambda t: t[:-1].clone(), "want torch.uint8"),
    ],
)
def test_damaged_parts_are_refused_by_name(tmp_path, part, change, said):
    quantized_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    tensor = tensors.pop(name + part)
    if change is not None:
        tensors[name + part] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name}.*{said}"):
        params_of(tmp_path)
