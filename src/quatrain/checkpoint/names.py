"""Which tensors a model of a given spec has, by Hugging Face name, and which extra ones mean nothing."""

from __future__ import annotations

import re

from quatrain.model.spec import ATTENTION_LINEARS, LINEARS, ModelSpec

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Buffers that old versions of transformers wrote; their content follows from the configuration.
_IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.layers\.\d+\.self_attn\.(masked_)?bias"
)


def ignorable(name: str) -> bool:
    """Whether a tensor of this name carries no information of its own."""
    return _IGNORED.fullmatch(name) is not None


def block_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def linear_name(name: str) -> str:
    """`q_proj` -> `self_attn.q_proj`: the place of a linear in its block."""
    return f"self_attn.{name}" if name in ATTENTION_LINEARS else f"mlp.{name}"


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor, the head included even when it is tied."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (spec.vocab_size, spec.hidden_size),
        FINAL_NORM: (spec.hidden_size,),
        HEAD: (spec.vocab_size, spec.hidden_size),
    }
    for layer in range(spec.num_layers):
        prefix = block_prefix(layer)
        shapes[prefix + "input_layernorm.weight"] = (spec.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (spec.hidden_size,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
        for name in LINEARS:
            shapes[f"{prefix}{linear_name(name)}.weight"] = spec.linear_shape(name)
            if name in spec.biased:
                shapes[f"{prefix}{linear_name(name)}.bias"] = spec.linear_shape(name)[:1]
    return shapes


def is_linear_weight(name: str) -> bool:
    """Whether this is the weight of one of a block's linears: what NF4 is for."""
    parts = name.split(".")
    return parts[-1] == "weight" and len(parts) > 2 and parts[-2] in LINEARS
