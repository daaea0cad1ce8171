"""The frozen weights of a model, as the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
