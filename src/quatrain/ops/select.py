"""Which implementation of each op a run uses.

`Ops` is the whole vocabulary of the engine. The block calls `ops.<name>` and never an implementation, so that a
device's kernels, the profiler's timers or a recording stand-in can take the place of any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quatrain.errors import KernelError


@dataclass(frozen=True)
class Ops:
    """One callable per op; signatures and formulas are in the op's package."""

    embedding_forward: Callable[..., None]
    rope_tables: Callable[..., None]
    rope_forward: Callable[..., None]
    rope_backward: Callable[..., None]
    dropout_keys: Callable[..., None]
    rms_norm_forward: Callable[..., None]
    rms_norm_backward: Callable[..., None]
    linear_lora_forward: Callable[..., None]
    linear_lora_backward: Callable[..., None]
    lora_down_forward: Callable[..., None]
    attention_forward: Callable[..., None]
    attention_backward: Callable[..., None]
    swiglu_forward: Callable[..., None]
    swiglu_backward: Callable[..., None]
    head_loss: Callable[..., None]
    sum_squares: Callable[..., None]
    clip_scale: Callable[..., None]
    adamw_step: Callable[..., None]


def select_ops(device: str) -> tuple[Ops, str]:
    """The ops for a device and one sentence that says which were taken and why. Raises KernelError where there are
    none."""
    if device != "cpu":
        raise KernelError(f"no kernels for device {device!r}", hint="use --device cpu")
    return reference_ops(), "reference ops (torch) on the CPU: no native kernels in this version"


def reference_ops() -> Ops:
    """Every op's torch implementation."""
    from quatrain.ops.adamw.reference import adamw_step
    from quatrain.ops.attention.reference import attention_backward, attention_forward
    from quatrain.ops.dropout.reference import dropout_keys
    from quatrain.ops.embedding.reference import embedding_forward
    from quatrain.ops.grad_norm.reference import clip_scale, sum_squares
    from quatrain.ops.head_loss.reference import head_loss
    from quatrain.ops.linear_lora.reference import linear_lora_backward, linear_lora_forward, lora_down_forward
    from quatrain.ops.rmsnorm.reference import rms_norm_backward, rms_norm_forward
    from quatrain.ops.rope.reference import rope_backward, rope_forward, rope_tables
    from quatrain.ops.swiglu.reference import swiglu_backward, swiglu_forward

    return Ops(
        embedding_forward=embedding_forward,
        rope_tables=rope_tables,
        rope_forward=rope_forward,
        rope_backward=rope_backward,
        dropout_keys=dropout_keys,
        rms_norm_forward=rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        linear_lora_forward=linear_lora_forward,
        linear_lora_backward=linear_lora_backward,
        lora_down_forward=lora_down_forward,
        attention_forward=attention_forward,
        attention_backward=attention_backward,
        swiglu_forward=swiglu_forward,
        swiglu_backward=swiglu_backward,
        head_loss=head_loss,
        sum_squares=sum_squares,
        clip_scale=clip_scale,
        adamw_step=adamw_step,
    )
