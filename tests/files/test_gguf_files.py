"""GGUF: block formats, row order, spec and hostile headers, against the library that writes them and the real model."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from oracles import families

from quatrain.checkpoint.gguf_file import SUPPORTED_TYPES, GgufFile
from quatrain.checkpoint.gguf_source import _BLOCK, GgufSource, hf_name
from quatrain.checkpoint.load import load_params
from quatrain.checkpoint.names import linear_name
from quatrain.checkpoint.open import open_source
from quatrain.errors import ModelError
from quatrain.model.from_gguf import LINEAR_NAMES
from quatrain.model.spec import LINEARS
from quatrain.ops.nf4 import Nf4Tensor

TO_GGUF = {linear_name(name): gguf_name for name, gguf_name in LINEAR_NAMES.items()}
TO_GGUF |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TO_GGUF |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL:
        return f"{GLOBAL[stem]}.{kind}"
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[place]}.{kind}"


def neighbours(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's row order of q and k: rows i and i + d/2 of a head become neighbours."""
    rows = [
        head * (size := tensor.shape[0] // heads) + half * (size // 2) + i
        for head in range(heads)
        for i in range(tensor.shape[0] // heads // 2)
        for half in (0, 1)
    ]
    return tensor[rows]


def write(path, variant: str, *, extra=None, tensors=None):
    """A GGUF file of a tiny model as the converter of llama.cpp would write it. Returns the model's state dict."""
    model = families.build(families.BY_NAME[variant])
    config, state = model.config, model.state_dict()
    family = families.BY_NAME[variant].family
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    if extra is not None:
        extra(writer)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = neighbours(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = neighbours(tensor, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), tensor.numpy())
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


@pytest.mark.parametrize(
    "variant", ["llama", "llama-bias", "llama-tied-own-head-dim", "mistral", "qwen2", "qwen3", "qwen3-bias"]
)
def test_tensors_return_to_their_names_and_row_order(tmp_path, variant):
    state = write(tmp_path / "m.gguf", variant)
    source = open_source(str(tmp_path / "m.gguf"))
    got = dict(source.tensors())
    if source.spec.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert got.keys() == state.keys() == source.inventory().keys()
    for name, want in state.items():
        assert torch.equal(got[name], want), name
    params = load_params(source, quantize="none", double_quant=True, compute_dtype=torch.float32)
    want = open_hf_spec(tmp_path, variant)
    assert params.spec == (want if want.family != "mistral" else replace_family(want))


def open_hf_spec(tmp_path, variant):
    families.save(families.BY_NAME[variant], tmp_path / "hf")
    return open_source(str(tmp_path / "hf")).spec


def replace_family(spec):
    import dataclasses

    return dataclasses.replace(spec, family="llama")  # a converted Mistral without a window is a Llama


def test_the_row_order_is_that_of_rotating_neighbours():
    order = neighbours(torch.arange(8).view(8, 1), heads=1).view(-1).tolist()
    assert order == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_block_formats(tmp_path, kind):
    """Every format against the library's own expansion; random bytes reach all bit fields of the K-quants."""
    qtype = gguf.GGMLQuantizationType[kind]
    generator = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    if kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        raw = gguf.quantize(generator.standard_normal((6, 512), dtype=np.float32), qtype)
    else:
        raw = generator.integers(0, 256, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    assert file.tensors["w"].shape == (6, 512) and file.tensors["w"].type_name == kind
    want = gguf.dequantize(raw, qtype).astype(np.float32)
    np.testing.assert_array_equal(file.read("w").numpy(), want)


def test_pieces_of_a_large_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("quatrain.checkpoint.gguf_file._PIECE_BYTES", 700)
    state = write(tmp_path / "m.gguf", "llama")
    got = GgufFile(tmp_path / "m.gguf").read("token_embd.weight")
    assert torch.equal(got, state["model.embed_tokens.weight"])


def test_rope_of_a_file(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write(tmp_path / "a.gguf", "llama", tensors={"rope_freqs.weight": factors})
    source = open_source(str(tmp_path / "a.gguf"))
    assert source.spec.rope.freq_factors == tuple(factors.tolist()) and source.spec.rope.kind == "default"
    assert "rope_freqs.weight" not in source.inventory()

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write(tmp_path / "b.gguf", "qwen2", extra=linear)
    rope = open_source(str(tmp_path / "b.gguf")).spec.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    write(tmp_path / "c.gguf", "qwen3", extra=yarn)
    rope = open_source(str(tmp_path / "c.gguf")).spec.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 16)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count = 8 is not supported"),
        (lambda w: w.add_rope_dimension_count(8), "partial rotation is not supported"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope scaling 'longrope' is not supported"),
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale = 0.5"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts of a model"),
        (lambda w: w.add_value_length(99), "attention.value_length differs"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(tmp_path, extra, said):
    write(tmp_path / "m.gguf", "llama", extra=extra)
    with pytest.raises(ModelError, match=said):
        open_source(str(tmp_path / "m.gguf"))


def test_unknown_architecture_and_tensors(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("w", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'qwen3moe' is not supported.*router"):
        open_source(str(tmp_path / "m.gguf"))
    write(tmp_path / "n.gguf", "llama", tensors={"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)})
    source = open_source(str(tmp_path / "n.gguf"))
    with pytest.raises(ModelError, match=r"blk.0.attn_sinks.weight \[4\] is unexpected"):
        load_params(source, quantize="none", double_quant=True, compute_dtype=torch.float32)


def test_names():
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("blk.0.attn_k.bias") == "model.layers.0.self_attn.k_proj.bias"
    assert hf_name("blk.0.exotic.weight") == "blk.0.exotic.weight" and _BLOCK.fullmatch("blk.x.attn_k.bias") is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (lambda b: b[: len(b) * 6 // 10], "bytes as its header says, got"),
        (lambda b: b[:5], "the header wants 4 bytes at 4, the file has 5"),
        (lambda b: b"", "not a GGUF file"),
        (lambda b: b"PK\3\4" + b[4:], "not a GGUF file"),
        (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], "version 9 is not supported"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "big-endian"),
        (lambda b: b[:8] + struct.pack("<Q", 2**63) + b[16:], "announces 9223372036854775808 entries"),
        (lambda b: b[:16] + struct.pack("<Q", 2**60) + b[24:], "announces 1152921504606846976 entries"),
        (lambda b: b[:24] + struct.pack("<Q", 2**62) + b[32:], "the header wants 4611686018427387904 bytes"),
        (lambda b: b[:40] + b"\xff" + b[41:], "is not UTF-8|unknown kind"),
    ],
)
def test_hostile_files(tmp_path, spoil, said):
    """H11, M4: a pointer, a cut file and numbers that lie are refused at the start, before anything is allocated."""
    path = tmp_path / "m.gguf"
    write(path, "llama")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ModelError, match=said):
        open_source(str(path))


def test_no_truncation_gets_past_the_header(tmp_path):
    """H11: a GGUF file that is cut inside its header is refused."""
    path = tmp_path / "m.gguf"
    write(path, "llama")
    whole = path.read_bytes()
    for size in range(0, 4000, 37):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            GgufSource(path)


def test_smollm2(smollm2_path):
    source = open_source("smollm2-135m")
    spec = source.spec
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == ("llama", 49152, 576, 1536)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.rms_norm_eps, spec.rope.theta, spec.tie_word_embeddings) == (1e-5, 100000.0, True)
    assert source.eos_token_ids == (2,) and source.name == "smollm2-135m" and source.files == (smollm2_path,)
    params = load_params(source, quantize="nf4", double_quant=True, compute_dtype=torch.bfloat16)
    weights = [block.linears[name].weight for block in params.blocks for name in LINEARS]
    assert all(isinstance(weight, Nf4Tensor) for weight in weights)
    bytes_a_parameter = sum(w.nbytes() for w in weights) / sum(w.numel for w in weights)
    assert bytes_a_parameter == pytest.approx(0.516, abs=5e-4)  # H9
    assert params.head is params.embed and params.embed.dtype == torch.bfloat16
