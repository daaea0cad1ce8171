"""Well-known models by name, for planning without a file: the numbers of their published `config.json`."""

from __future__ import annotations

import difflib
import math
from typing import Any

from quatrain.errors import ConfigError
from quatrain.model.from_config import spec_from_config
from quatrain.model.spec import LINEARS, ModelSpec

_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_QWEN25 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
_LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "num_key_value_heads": 8, "rope_scaling": _LLAMA3_ROPE,
}  # fmt: skip


def _numbers(
    family: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, tied: bool, **more: Any
) -> dict[str, Any]:
    return {
        **family, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "tie_word_embeddings": tied, **more,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _numbers(_SMOLLM2, 576, 1536, 30, 9, True, num_key_value_heads=3, rope_theta=1e5),
    "smollm2-360m": _numbers(_SMOLLM2, 960, 2560, 32, 15, True, num_key_value_heads=5, rope_theta=1e5),
    "smollm2-1.7b": _numbers(_SMOLLM2, 2048, 8192, 24, 32, True, num_key_value_heads=32, rope_theta=1.3e5),
    "qwen2.5-0.5b": _numbers(_QWEN25, 896, 4864, 24, 14, True, num_key_value_heads=2, vocab_size=151936),
    "qwen2.5-1.5b": _numbers(_QWEN25, 1536, 8960, 28, 12, True, num_key_value_heads=2, vocab_size=151936),
    "qwen2.5-7b": _numbers(_QWEN25, 3584, 18944, 28, 28, False, num_key_value_heads=4, vocab_size=152064),
    "qwen3-0.6b": _numbers(_QWEN3, 1024, 3072, 28, 16, True),
    "qwen3-1.7b": _numbers(_QWEN3, 2048, 6144, 28, 16, True),
    "qwen3-4b": _numbers(_QWEN3, 2560, 9728, 36, 32, True),
    "qwen3-8b": _numbers(_QWEN3, 4096, 12288, 36, 32, False),
    "llama-3.2-1b": _numbers(_LLAMA3, 2048, 8192, 16, 32, True, head_dim=64),
    "llama-3.2-3b": _numbers(_LLAMA3, 3072, 8192, 28, 24, True, head_dim=128),
    "llama-3.1-8b": _numbers(_LLAMA3, 4096, 14336, 32, 32, False, rope_scaling={**_LLAMA3_ROPE, "factor": 8.0}),
    "mistral-7b": _numbers(
        {"model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
        4096, 14336, 32, 32, False, num_key_value_heads=8, rope_theta=1e6, sliding_window=None,
    ),
}  # fmt: skip
"""Name -> the keys of its config.json that the engine reads. mistral-7b is version 0.3."""


def shape_spec(name: str) -> ModelSpec:
    """The spec of a well-known model. Raises ConfigError with the near names for one that is not listed."""
    if name.lower() not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=3, cutoff=0.4)
        raise ConfigError(f"shape: {name!r} is not listed", hint=f"try {', '.join(near or SHAPES)}")
    return spec_from_config(SHAPES[name.lower()], name)


def num_parameters(spec: ModelSpec) -> int:
    """All weights of a model; a tied head counts once."""
    biases = sum(spec.linear_shape(name)[0] for name in spec.biased)
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    block = sum(math.prod(spec.linear_shape(name)) for name in LINEARS) + biases + norms
    tables = (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size
    return spec.num_layers * block + tables + spec.hidden_size
