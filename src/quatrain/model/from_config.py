"""A Hugging Face `config.json` -> ModelSpec. Whatever would change the maths and is not understood is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quatrain.errors import ModelError
from quatrain.model.config_values import ConfigValues
from quatrain.model.rope_config import rope_from_config
from quatrain.model.spec import ATTENTION_LINEARS, MLP_LINEARS, Family, ModelSpec

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class _FamilyDefaults:
    """What an absent key means, as documented for the family. `None`: as many key/value heads as heads, or
    hidden_size / heads as the head size."""

    family: Family
    num_kv_heads: int | None
    max_position: int
    head_dim: int | None = None


_FAMILIES: dict[str, _FamilyDefaults] = {
    "llama": _FamilyDefaults("llama", None, 2048),
    "mistral": _FamilyDefaults("mistral", 8, 131072),
    "qwen2": _FamilyDefaults("qwen2", 32, 32768),
    "qwen3": _FamilyDefaults("qwen3", 32, 32768, head_dim=128),
}
SUPPORTED = "Llama (llama), Mistral (mistral), Qwen2 and Qwen2.5 (qwen2), Qwen3 (qwen3)"

_NEEDS = {
    "mixtral": "a router and a mixture of experts",
    "qwen2_moe": "a router and a mixture of experts",
    "qwen3_moe": "a router and a mixture of experts",
    "gpt_oss": "a mixture of experts, attention sinks and MXFP4 weights",
    "deepseek_v2": "latent attention and a mixture of experts",
    "deepseek_v3": "latent attention and a mixture of experts",
    "llama4": "a mixture of experts and chunked attention",
    "gemma": "GeGLU, RMSNorm with 1 + weight, and scaled embeddings",
    "gemma2": "GeGLU, four norms a block and soft-capped logits",
    "gemma3": "GeGLU, four norms a block and two rope bases",
    "gemma3_text": "GeGLU, four norms a block and two rope bases",
    "phi": "LayerNorm and a parallel block",
    "phi3": "fused qkv and gate-up weights and LongRoPE",
    "granite": "embedding, attention, residual and logit multipliers",
    "cohere": "LayerNorm, a parallel block and a logit scale",
    "olmo2": "norms after attention and MLP",
    "glm4": "interleaved partial rotary embeddings and four norms a block",
    "gpt2": "LayerNorm, learned positions and a fused qkv weight",
    "gpt_neox": "LayerNorm and a parallel block",
    "falcon": "LayerNorm and a parallel block",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "ministral": "the per-layer rope and window rules of that family",
    "smollm3": "layers without rotary embedding",
    "qwen3_next": "gated linear attention and a mixture of experts",
}

# Keys that are read, or that do not touch the forward or backward pass of these families.
_READ = {"model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
_READ |= {"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta"}
_READ |= {"rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
_READ |= {"max_position_embeddings", "tie_word_embeddings", "attention_dropout", "quantization_config"}
_INERT = {"initializer_range", "use_cache", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"}
_INERT |= {"torch_dtype", "dtype", "transformers_version", "auto_map", "max_length", "attn_implementation"}
_INERT |= {"chunk_size_feed_forward", "output_attentions", "output_hidden_states"}
_FAMILY_KEYS: dict[Family, set[str]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window", "layer_types"},
    "qwen2": {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "attention_bias"},
}
# An unknown key with one of these words in its name, and a value that is not off, very likely changes the maths.
_MATHS_WORDS = {"alibi", "attention", "attn", "bias", "cap", "clip", "expert", "head", "layer", "mlp", "moe", "norm"}
_MATHS_WORDS |= {"multiplier", "parallel", "residual", "rope", "rotary", "router", "scal", "sink", "window"}
_MULTIPLIER_WORDS = ("multiplier", "scal")


def spec_from_config(
    config: Mapping[str, Any], where: str = "config.json", notes: list[str] | None = None
) -> ModelSpec:
    """The ModelSpec of a parsed `config.json`. Defaults taken for absent keys are appended to `notes`.

    Raises one ModelError that lists every problem: unsupported family, activation, rope kind or key; bad or missing
    sizes. Reads no weight.
    """
    defaults = _family(config, where)
    values = ConfigValues(config, where)
    _refuse_unknown(values, defaults.family)
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    layers, max_position = (
        values.integer("num_hidden_layers"),
        values.integer("max_position_embeddings", defaults.max_position),
    )
    head_dim = _head_dim(values, defaults, hidden, heads)
    spec = ModelSpec(
        family=defaults.family,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(values, defaults, heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=rope_from_config(values, head_dim, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=values.flag("tie_word_embeddings", False),
        windows=_windows(values, defaults.family, layers),
        biased=_biased(values, defaults.family),
        qk_norm=defaults.family == "qwen3",
    )
    _check_activation(values)
    values.check()
    if notes is not None:
        notes += values.notes
    return spec


def unsupported_family(name: str, where: str) -> ModelError:
    """The error for a model family outside the supported list, with what it would take."""
    known = _NEEDS.get(name) or ("a router and a mixture of experts" if "moe" in name else None)
    needs = f" (it would need {known})" if known else ""
    return ModelError(f"{where}: architecture {name!r} is not supported{needs}; supported: {SUPPORTED}")


def _family(config: Mapping[str, Any], where: str) -> _FamilyDefaults:
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    if not isinstance(model_type, str):
        seen = f"; architectures says {architectures}" if architectures else ""
        raise ModelError(
            f"{where}: model_type is missing, so the architecture is unknown{seen}; supported: {SUPPORTED}"
        )
    if model_type not in _FAMILIES:
        raise unsupported_family(model_type, where)
    other = [name for name in architectures if not str(name).endswith("ForCausalLM")]
    if other:
        raise ModelError(
            f"{where}: {other[0]} has another head than a language model: want an architecture named ...ForCausalLM"
        )
    return _FAMILIES[model_type]


def _refuse_unknown(values: ConfigValues, family: Family) -> None:
    known = _READ | _INERT | _FAMILY_KEYS[family]
    for key, value in values.values.items():
        if key in known or key.startswith("_") or _is_off(key, value):
            continue
        if family == "qwen2" and key in ("attention_bias", "qkv_bias") and value is True:
            continue  # says what the family always has
        if any(word in key.lower() for word in _MATHS_WORDS):
            values.problem(f"{key} = {value!r} is not part of {family} as supported here and would change the result")
    if values.values.get("attention_dropout"):
        values.problem(
            f"attention_dropout = {values.values['attention_dropout']!r}: dropout inside attention is not supported"
        )


def _is_off(key: str, value: Any) -> bool:
    """Whether an unknown key's value changes nothing: absent, empty, zero, or one for a factor."""
    if any(word in key.lower() for word in _MULTIPLIER_WORDS):
        return value is None or value is False or value == 1
    return not value or (isinstance(value, list) and set(map(str, value)) == {"full_attention"})


def _num_kv_heads(values: ConfigValues, defaults: _FamilyDefaults, heads: int) -> int:
    absent = "num_key_value_heads" not in values.values
    default = defaults.num_kv_heads if absent and defaults.num_kv_heads else heads  # an explicit null means `heads`
    kv_heads = values.integer("num_key_value_heads", default)
    if heads % kv_heads:
        values.problem(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    return kv_heads


def _head_dim(values: ConfigValues, defaults: _FamilyDefaults, hidden: int, heads: int) -> int:
    if values.values.get("head_dim") is None and defaults.head_dim is None and hidden % heads:
        values.problem(f"head_dim is missing and hidden_size ({hidden}) is not a multiple of {heads} heads")
    return values.integer("head_dim", defaults.head_dim or max(hidden // heads, 1))


def _check_activation(values: ConfigValues) -> None:
    activation = values.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        values.problem(f"hidden_act {activation!r} is not supported; supported: silu")


def _biased(values: ConfigValues, family: Family) -> frozenset[str]:
    names: set[str] = set()
    if family == "qwen2":
        names.update(QKV)
    if family in ("llama", "qwen3") and values.flag("attention_bias", False):
        names.update(ATTENTION_LINEARS)
    if family == "llama" and values.flag("mlp_bias", False):
        names.update(MLP_LINEARS)
    return frozenset(names)


def _windows(values: ConfigValues, family: Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. Mistral: all alike; Qwen: `layer_types`, else from max_window_layers on."""
    if family == "llama":
        return (None,) * layers
    qwen = family != "mistral"
    window: int | None = None
    if not qwen or values.flag("use_sliding_window", False):
        explicit_null = values.values.get("sliding_window", 4096) is None
        window = None if explicit_null else values.integer("sliding_window", 4096)
    types = values.values.get("layer_types")
    if types is not None:
        return _windows_by_type(values, types, window, layers, family)
    if not qwen or window is None:
        return (window,) * layers
    first = values.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _windows_by_type(
    values: ConfigValues, types: Any, window: int | None, layers: int, family: Family
) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * layers
    if not isinstance(types, list) or len(types) != layers:
        values.problem(f"layer_types: want a list of {layers} names, one a layer, got {types!r}")
        return full
    unknown = sorted({str(name) for name in types} - {"full_attention", "sliding_attention"})
    if unknown:
        values.problem(f"layer_types: {', '.join(unknown)}: want full_attention or sliding_attention")
        return full
    if "sliding_attention" in types and window is None:
        values.problem("layer_types names sliding_attention, but no sliding window is in use")
    windows = tuple(window if name == "sliding_attention" else None for name in types)
    if family == "mistral" and windows != (window,) * layers:
        values.problem("layer_types: a mistral model has the same window in every layer; this one mixes them")
    return windows
