"""ModelSpec -> a Hugging Face `config.json`, for models whose file is none: the inverse of `from_config`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quatrain.errors import ModelError
from quatrain.model.from_config import QKV
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import ATTENTION_LINEARS, MLP_LINEARS, ModelSpec, RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor")
_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def config_from_spec(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The keys of `config.json` that change the maths; `spec_from_config` of them is `spec` again.

    Raises ModelError for what that format cannot say: biases on other linears than the family has them on, or frequency
    factors that are not Llama 3's.
    """
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        **_rope(spec, where),
        **_biases(spec, where),
    }
    window = next((window for window in spec.windows if window is not None), None)
    if spec.family == "mistral":
        config["sliding_window"] = window
    elif window is not None:
        kinds = ["full_attention" if each is None else "sliding_attention" for each in spec.windows]
        config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    return config


def _biases(spec: ModelSpec, where: str) -> dict[str, bool]:
    attention, mlp = spec.biased & set(ATTENTION_LINEARS), spec.biased & set(MLP_LINEARS)
    usual = {"llama": ((), ATTENTION_LINEARS), "mistral": ((),), "qwen2": (QKV,), "qwen3": ((), ATTENTION_LINEARS)}
    fits_mlp = not mlp or (spec.family == "llama" and mlp == set(MLP_LINEARS))
    if not any(attention == set(names) for names in usual[spec.family]) or not fits_mlp:
        raise ModelError(
            f"{where}: biases on {', '.join(sorted(spec.biased)) or 'no linear'}: {spec.family} as transformers has it "
            "cannot hold that",
            hint="use --format gguf",
        )
    flags = {"attention_bias": bool(attention)} if spec.family in ("llama", "qwen3") else {}
    return flags | ({"mlp_bias": bool(mlp)} if spec.family == "llama" else {})


def _rope(spec: ModelSpec, where: str) -> dict[str, Any]:
    """In the old spelling, which every version of transformers reads."""
    rope = spec.rope
    if rope.freq_factors is not None:
        rope = _llama3_of(rope, where)
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotary_dim != spec.head_dim:
        keys["partial_rotary_factor"] = rope.rotary_dim / spec.head_dim
    if rope.kind == "default":
        return keys
    block: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        own = _LLAMA3_KEYS if rope.kind == "llama3" else _YARN_KEYS
        block |= {name: getattr(rope, name) for name in own if getattr(rope, name) is not None}
        block["original_max_position_embeddings"] = rope.original_max_position
        if not rope.truncate:
            block["truncate"] = False
    return {**keys, "rope_scaling": block}


def _llama3_of(rope: RopeSpec, where: str) -> RopeSpec:
    """The Llama 3 parameters behind a GGUF file's frequency factors: those of the published models, with its factor."""
    assert rope.freq_factors is not None
    plain = replace(rope, freq_factors=None)
    guess = replace(plain, kind="llama3", factor=round(max(rope.freq_factors), 3), original_max_position=8192)
    got, want = (inverse_frequencies(each, 1)[0] for each in (guess, rope))
    if rope.kind != "default" or not torch.allclose(got, want, rtol=1e-5, atol=0.0):
        raise ModelError(
            f"{where}: its rope_freqs.weight is not that of a published Llama 3, and config.json has no place for it",
            hint="use --format gguf",
        )
    return guess
