"""Tiny random models of every supported family, made by transformers: what our engine is judged against.

Every number that could hide a fault by being trivial is random: norm weights, biases, head sizes that are not powers of
two, linears whose size is no multiple of NF4's block of 64. Vocabulary and lengths are small, so that a test takes
milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 113
MAX_POSITIONS = 64


@dataclass(frozen=True)
class Variant:
    """One tiny model: a family and the configuration keys that matter to it."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_ODD = {"hidden_size": 72, "intermediate_size": 150, "num_attention_heads": 4, "num_key_value_heads": 1}
_WIDE = {"hidden_size": 96, "intermediate_size": 130, "num_attention_heads": 4, "num_key_value_heads": 4}
_QWEN3 = {
    "hidden_size": 65,
    "intermediate_size": 97,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_MIXED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

VARIANTS = [
    Variant("llama", "llama", {**_SMALL, "rms_norm_eps": 1e-5}),
    Variant("llama-mqa-odd", "llama", _ODD),
    Variant("llama-tied-own-head-dim", "llama", {**_WIDE, "tie_word_embeddings": True, "head_dim": 10}),
    Variant("llama-bias", "llama", {**_ODD, "attention_bias": True, "mlp_bias": True}),
    Variant("llama-rope-llama3", "llama", {**_SMALL, **_rope("llama3", **_LLAMA3)}),
    Variant("llama-rope-linear", "llama", {**_SMALL, **_rope("linear", factor=4.0)}),
    Variant("llama-rope-dynamic", "llama", {**_SMALL, **_rope("dynamic", factor=2.0), "max_position_embeddings": 12}),
    Variant("llama-rope-yarn", "llama", {**_SMALL, **_rope("yarn", **_YARN, attention_factor=1.3)}),
    Variant("mistral", "mistral", {**_SMALL, "sliding_window": None}),
    Variant("mistral-window", "mistral", {**_ODD, "sliding_window": 4}),
    Variant("qwen2", "qwen2", _SMALL),
    Variant("qwen2-tied-mixed-windows", "qwen2", {**_WIDE, **_MIXED, "tie_word_embeddings": True}),
    Variant(
        "qwen2-yarn-mscale", "qwen2", {**_ODD, **_rope("yarn", **_YARN, beta_fast=16.0, mscale=0.8, mscale_all_dim=0.5)}
    ),
    Variant("qwen3", "qwen3", {**_QWEN3, "tie_word_embeddings": True}),
    Variant("qwen3-bias", "qwen3", {**_QWEN3, "num_key_value_heads": 4, "attention_bias": True}),
    Variant("qwen3-mixed-windows", "qwen3", {**_QWEN3, **_MIXED, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
]
BY_NAME = {variant.name: variant for variant in VARIANTS}
ONE_PER_FAMILY = [BY_NAME[name] for name in ("llama-bias", "mistral-window", "qwen2", "qwen3")]


def build(variant: Variant, seed: int = 0) -> Any:
    """A random model in fp32 with eager attention, in evaluation mode."""
    options = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 3,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
        **variant.options,
    }
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][: options["num_hidden_layers"]]
    config = transformers.AutoConfig.for_model(variant.family, **options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model


def randomise(model: Any, seed: int) -> None:
    """Weights at the scale of a trained model; norms around 1 and biases around 0, none of them exactly so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)


def save(variant: Variant, folder: Path, seed: int = 0, **options: Any) -> Any:
    """Build, write as a Hugging Face folder, and return the model."""
    model = build(variant, seed)
    model.save_pretrained(folder, **options)
    return model
