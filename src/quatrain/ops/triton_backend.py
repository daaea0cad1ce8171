"""The Triton backend: every op's kernels, bound to one scratch tensor. They run on CUDA tensors, and on CPU tensors in
Triton's interpreter."""

from __future__ import annotations

from functools import partial

import torch

from quatrain.ops.adamw.triton import adamw_step
from quatrain.ops.attention.triton import attention_backward, attention_forward
from quatrain.ops.attention.triton_cached import cached_attention_forward
from quatrain.ops.dropout.triton import dropout_keys
from quatrain.ops.embedding.triton import embedding_forward
from quatrain.ops.grad_norm.triton import clip_scale, sum_squares
from quatrain.ops.head_loss.triton import head_loss
from quatrain.ops.linear_lora.triton import linear_lora_backward, linear_lora_forward, lora_down_forward
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4 import triton as nf4
from quatrain.ops.nf4.triton import dequantize
from quatrain.ops.rmsnorm.triton import rms_norm_backward, rms_norm_forward
from quatrain.ops.rope.triton import rope_backward, rope_forward, rope_tables
from quatrain.ops.sampling.triton import sample_tokens
from quatrain.ops.select import Backend, Ops, select_backend
from quatrain.ops.swiglu.triton import swiglu_backward, swiglu_forward

__all__ = ["dequantize", "quantize", "relative_error", "triton_ops"]


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
        linear_lora_decode=partial(linear_lora_forward, scratch=scratch),
        lora_down_forward=lora_down_forward,
        attention_forward=attention_forward,
        attention_backward=partial(attention_backward, scratch=scratch),
        cached_attention_forward=partial(cached_attention_forward, scratch=scratch),
        sample_tokens=sample_tokens,
        swiglu_forward=swiglu_forward,
        swiglu_backward=swiglu_backward,
        head_loss=partial(head_loss, scratch=scratch),
        sum_squares=partial(sum_squares, scratch=scratch),
        clip_scale=clip_scale,
        adamw_step=adamw_step,
    )


def quantize(weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
    """`weight` in NF4 on its own device: on the CPU, where weights come from files, by the CPU's kernels."""
    if weight.device.type == "cpu":
        return _cpu().quantize(weight, double_quant=double_quant)
    return nf4.quantize(weight, double_quant=double_quant)


def relative_error(w: Nf4Tensor, weight: torch.Tensor) -> float:
    """The relative error of `w` against `weight`, likewise."""
    if weight.device.type == "cpu":
        return _cpu().quantize_error(w, weight)
    return nf4.relative_error(w, weight)


def _cpu() -> Backend:
    return select_backend("cpu", torch.float32, threads=torch.get_num_threads())
