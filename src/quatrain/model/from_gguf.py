"""GGUF metadata -> ModelSpec, under the names that llama.cpp's converter writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from quatrain.errors import ModelError
from quatrain.model.config_values import ConfigValues
from quatrain.model.from_config import SUPPORTED, unsupported_family
from quatrain.model.spec import LINEARS, Family, ModelSpec, RopeSpec

# Mistral models are converted under the name llama.
ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# The name of each of a block's linears in GGUF.
LINEAR_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# Keys (after the architecture's name) that change the maths in a way the supported families do not have.
_FOREIGN = [
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "expert_used_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.dimension_sections",
    "use_parallel_residual",
]


def spec_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    freq_factors: tuple[float, ...] | None,
    where: str,
    notes: list[str] | None = None,
) -> ModelSpec:
    """The ModelSpec of a GGUF file. `shapes` are its tensors by GGUF name: the vocabulary's size, a head of its own and
    biases show in them only. `freq_factors` is the content of its `rope_freqs.weight`, if it has one.

    Raises one ModelError that lists every problem. Reads no weight.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{where}: general.architecture is missing; supported: {SUPPORTED}")
    if architecture not in ARCHITECTURES:
        raise unsupported_family(architecture, where)
    prefix = architecture + "."
    values = ConfigValues({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, where)
    for key in _FOREIGN:
        if values.values.get(key):
            values.problem(f"{prefix}{key} = {values.values[key]!r} is not supported for this architecture")
    family = ARCHITECTURES[architecture]
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    layers = values.integer("block_count")
    head_dim = max(hidden // heads, 1)  # the format's rule where it says nothing, so no note
    if values.values.get("attention.key_length") is not None:
        head_dim = values.integer("attention.key_length")
    max_position = values.integer("context_length")
    kv_heads = values.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        values.problem(f"attention.head_count ({heads}) is not a multiple of attention.head_count_kv ({kv_heads})")
    if values.values.get("attention.value_length", head_dim) != head_dim:
        values.problem(f"attention.value_length differs from the key length, {head_dim}")
    window = values.integer("attention.sliding_window", 0, minimum=0) or None if _has_window(values) else None
    spec = ModelSpec(
        family="mistral" if window is not None and family == "llama" else family,
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        hidden_size=hidden,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_decimal(values.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(values, head_dim, max_position, freq_factors),
        max_position_embeddings=max_position,
        tie_word_embeddings="output.weight" not in shapes,
        windows=(window,) * layers,
        biased=frozenset(name for name in LINEARS if f"blk.0.{LINEAR_NAMES[name]}.bias" in shapes),
        qk_norm=family == "qwen3",
    )
    if not spec.vocab_size:
        values.problem("token_embd.weight is missing")
    values.check()
    if notes is not None:
        notes += values.notes
    return spec


def _has_window(values: ConfigValues) -> bool:
    return values.values.get("attention.sliding_window") is not None


def _rope(values: ConfigValues, head_dim: int, max_position: int, freq_factors: tuple[float, ...] | None) -> RopeSpec:
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        values.problem(
            f"rope.dimension_count is {rotary_dim} of a head of {head_dim}: partial rotation is not supported"
        )
    if freq_factors is not None and len(freq_factors) != head_dim // 2:
        values.problem(f"rope_freqs.weight: want {head_dim // 2} factors, got {len(freq_factors)}")
    theta = _decimal(values.number("rope.freq_base", 10000.0))
    kind = values.values.get("rope.scaling.type") or "none"
    old_factor = values.optional_number("rope.scale_linear")
    if kind == "none" and old_factor not in (None, 1.0):
        return RopeSpec(theta, head_dim, "linear", factor=old_factor or 1.0, freq_factors=freq_factors)
    if kind == "none":
        return RopeSpec(theta, head_dim, freq_factors=freq_factors)
    if kind == "linear":
        factor = _decimal(values.number("rope.scaling.factor"))
        return RopeSpec(theta, head_dim, "linear", factor=factor, freq_factors=freq_factors)
    if kind != "yarn":
        values.problem(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")
        return RopeSpec(theta, head_dim)
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if values.values.get(f"rope.scaling.{name}") not in (None, 1.0):
            values.problem(f"rope.scaling.{name} is not supported")
    return RopeSpec(
        theta,
        head_dim,
        "yarn",
        factor=_decimal(values.number("rope.scaling.factor")),
        original_max_position=values.integer("rope.scaling.original_context_length", max_position),
        beta_fast=values.optional_number("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=values.optional_number("rope.scaling.yarn_beta_slow") or 1.0,
        freq_factors=freq_factors,
    )


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to the same fp32: 9.999999747e-06 in the file was 1e-05 in the model."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
