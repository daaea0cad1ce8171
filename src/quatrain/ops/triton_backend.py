"""The Triton backend: every op's kernels, bound to one scratch tensor. They run on CUDA tensors, and on CPU tensors in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from quatrain.ops.adamw.triton import adamw_step
from quatrain.ops.dropout.triton import dropout_keys
from quatrain.ops.embedding.triton import embedding_forward
from quatrain.ops.grad_norm.triton import clip_scale, sum_squares
from quatrain.ops.linear_lora.triton import linear_lora_backward, linear_lora_forward, lora_down_forward
from quatrain.ops.rmsnorm.triton import rms_norm_backward, rms_norm_forward
from quatrain.ops.rope.triton import rope_backward, rope_forward, rope_tables
from quatrain.ops.select import Ops
from quatrain.ops.swiglu.triton import swiglu_backward, swiglu_forward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The activation dtypes that kernels exist for."""


def triton_ops(scratch: torch.Tensor) -> Ops:
    """The ops over `scratch`, uint8 [`triton_sizes.scratch_bytes`]."""
    return Ops(
        embedding_forward=embedding_forward,
        rope_tables=rope_tables,
        rope_forward=rope_forward,
        rope_backward=rope_backward,
        dropout_keys=dropout_keys,
        rms_norm_forward=rms_norm_forward,
        rms_norm_backward=partial(rms_norm_backward, scratch=scratch),
        linear_lora_forward=partial(linear_lora_forward, scratch=scratch),
        linear_lora_backward=partial(linear_lora_backward, scratch=scratch),
        lora_down_forward=lora_down_forward,
        attention_forward=_late("attention", "attention_forward"),
        attention_backward=partial(_late("attention", "attention_backward"), scratch=scratch),
        swiglu_forward=swiglu_forward,
        swiglu_backward=swiglu_backward,
        head_loss=_late("head_loss", "head_loss"),
        sum_squares=partial(sum_squares, scratch=scratch),
        clip_scale=clip_scale,
        adamw_step=adamw_step,
    )


def _late(op: str, name: str) -> Callable[..., None]:
    """An op whose module is imported when it is first called."""

    def call(*args: object, **more: object) -> None:
        getattr(import_module(f"quatrain.ops.{op}.triton"), name)(*args, **more)

    return call
