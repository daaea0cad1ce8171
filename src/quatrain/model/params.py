"""The frozen weights of a model, as the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quatrain.model.spec import ModelSpec
    from quatrain.ops.linear_lora import Linear


@dataclass
class BlockParams:
    """One transformer block. `linears` maps each name of `spec.LINEARS` to its layer. Norm weights are fp32 (fp64
    when the compute dtype is fp64): `input_norm`, `post_norm` [H]; `q_norm`, `k_norm` [head_dim] where the family has
    them."""

    linears: dict[str, Linear]
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass
class ModelParams:
    """All frozen weights. `embed` and `head` [V, H] are in the compute dtype and are one tensor when tied."""

    spec: ModelSpec
    embed: torch.Tensor
    blocks: list[BlockParams]
    final_norm: torch.Tensor
    head: torch.Tensor


def params_on(device: str, params: ModelParams, *, embed_stays: bool, head_stays: bool) -> ModelParams:
    """The weights on another device; with `embed_stays` all but the embedding, and with `head_stays`, for which it
    must, all but the head, which is then in pinned memory. Call it before adapters are attached."""

    def moved(value: Any) -> Any:
        if hasattr(value, "to"):
            return value.to(device)
        if isinstance(value, dict):
            return {name: moved(item) for name, item in value.items()}
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{field.name: moved(getattr(value, field.name)) for field in fields(value)})
        return value

    tied = params.head is params.embed
    head = params.head.pin_memory() if head_stays else moved(params.head)
    embed = head if tied and embed_stays == head_stays else params.embed if embed_stays else moved(params.embed)
    blocks = [moved(block) for block in params.blocks]
    return ModelParams(params.spec, embed, blocks, moved(params.final_norm), head)
