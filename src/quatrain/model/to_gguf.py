"""ModelSpec -> GGUF metadata, under the names that llama.cpp reads: the inverse of `from_gguf`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quatrain.errors import ModelError
from quatrain.model.from_gguf import ARCHITECTURES
from quatrain.model.rope import inverse_frequencies, yarn_attention_factor
from quatrain.model.spec import ModelSpec


def gguf_architecture(spec: ModelSpec) -> str:
    """Mistral has no name of its own there: it is a llama."""
    return spec.family if spec.family in ARCHITECTURES else "llama"


def metadata_from_spec(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The architecture's keys. Integers are meant as uint32, numbers as fp32.

    Raises ModelError for what llama.cpp does not compute for these architectures: rope scaling of other kinds, partial
    rotation, windows that differ from layer to layer, biases in Qwen3.
    """
    prefix = gguf_architecture(spec) + "."
    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.dimension_count": spec.rope.rotary_dim,
        "rope.freq_base": spec.rope.theta,
    }
    if spec.rope.rotary_dim != spec.head_dim:
        raise _cannot(where, "partial rotation")
    if spec.family == "qwen3" and spec.biased:
        raise _cannot(where, "biases")
    windows = set(spec.windows)
    if len(windows) > 1:
        raise _cannot(where, "a sliding window in some layers only")
    if (window := windows.pop()) is not None:
        values["attention.sliding_window"] = window
    values |= _rope_scaling(spec, where)
    return {prefix + name: value for name, value in values.items()}


def frequency_factors(spec: ModelSpec) -> list[float] | None:
    """The content of `rope_freqs.weight`, by which llama.cpp divides the frequencies; None where it has none."""
    rope = spec.rope
    if rope.freq_factors is not None:
        return list(rope.freq_factors)
    if rope.kind != "llama3":
        return None
    plain, scaled = (inverse_frequencies(each, 1)[0] for each in (replace(rope, kind="default"), rope))
    return [float(factor) for factor in plain / scaled]


def _rope_scaling(spec: ModelSpec, where: str) -> dict[str, Any]:
    rope = spec.rope
    if rope.kind in ("default", "llama3"):
        return {}
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    usual = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    if rope.kind != "yarn" or not rope.truncate or not math.isclose(yarn_attention_factor(rope), usual, rel_tol=1e-6):
        raise _cannot(where, f"rope scaling {rope.kind!r}" + (" with an own factor" if rope.kind == "yarn" else ""))
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.factor,
        "rope.scaling.original_context_length": rope.original_max_position,
        "rope.scaling.yarn_beta_fast": rope.beta_fast,
        "rope.scaling.yarn_beta_slow": rope.beta_slow,
    }


def _cannot(where: str, what: str) -> ModelError:
    return ModelError(f"{where}: llama.cpp has no {what} for this architecture", hint="use --format hf")
