"""One transformer block: forward, recompute and backward, each a list of op calls.

Legend: T tokens of the packed stream, H hidden, Hq/Hk query and key/value heads, D head_dim, I intermediate, r rank.

    mid = x + o(attention(rope(q), rope(k), v))         q, k, v of norm(x)
    out = mid + down(swiglu(gate, up))                  gate, up of norm(mid)

Where the family has QK-norm, q and k are normed per head before RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quatrain.model.params import BlockParams
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import BackwardScratch, Intermediates
from quatrain.ops.attention import RowBounds
from quatrain.ops.dropout import Dropout
from quatrain.ops.select import Ops


@dataclass(frozen=True)
class Stream:
    """What all blocks share about the current micro-batch of T tokens."""

    ops: Ops
    spec: ModelSpec
    cu_seqlens: Sequence[int] | RowBounds  # where the host may not look, the bounds are on the device
    cos: torch.Tensor  # [T, rotary_dim / 2]
    sin: torch.Tensor  # [T, rotary_dim / 2]
    dropout: Dropout | None

    @property
    def attention_scale(self) -> float:
        return float(self.spec.head_dim**-0.5)


def block_forward(
    out: torch.Tensor, x: torch.Tensor, saved: Intermediates, block: BlockParams, s: Stream, window: int | None
) -> None:
    """out [T, H] = the block of x [T, H]; fills `saved`. `out` must not be `x`."""
    _up_to_activation(x, saved, block, s, window)
    _linear(s, [out], saved, saved.act, block, ["down_proj"], residual=saved.mid)


def block_recompute(x: torch.Tensor, saved: Intermediates, block: BlockParams, s: Stream, window: int | None) -> None:
    """Fills `saved` from x [T, H]: the forward without the product of down_proj, which no gradient needs."""
    _up_to_activation(x, saved, block, s, window)
    s.ops.lora_down_forward([saved.u.get("down_proj")], saved.act, [block.linears["down_proj"]], s.dropout)


def block_backward(
    d_x: torch.Tensor,
    norm_grads: Mapping[str, torch.Tensor],
    d_out: torch.Tensor,
    x: torch.Tensor,
    saved: Intermediates,
    scratch: BackwardScratch,
    block: BlockParams,
    s: Stream,
    window: int | None,
) -> None:
    """d_x [T, H] = from d_out [T, H]; adapter gradients and `norm_grads` (empty when norms are frozen) +=.

    Consumes `saved`: gate and up turn into their gradients. `d_out` is only read."""
    ops, spec = s.ops, s.spec
    _linear_backward(s, scratch.d_act, [d_out], saved, saved.act, block, ["down_proj"])
    ops.swiglu_backward(saved.gate, saved.up, scratch.d_act, saved.gate, saved.up)
    _linear_backward(
        s, scratch.d_normed, [saved.gate, saved.up], saved, saved.post_normed, block, ["gate_proj", "up_proj"]
    )
    ops.rms_norm_backward(
        scratch.d_mid, norm_grads.get("post_norm"), scratch.d_normed, saved.mid, saved.post_rstd, block.post_norm, d_out
    )
    d_attn = scratch.d_q  # the attention's backward turns it into dq in place
    _linear_backward(s, d_attn, [scratch.d_mid], saved, saved.attn, block, ["o_proj"])
    ops.attention_backward(
        scratch.d_q, scratch.d_k, scratch.d_v, d_attn, saved.attn, saved.lse, saved.q, saved.k, saved.v,
        s.cu_seqlens, s.attention_scale, window,
    )  # fmt: skip
    ops.rope_backward(scratch.d_q, s.cos, s.sin)
    ops.rope_backward(scratch.d_k, s.cos, s.sin)
    if spec.qk_norm:
        for d, raw, rstd, name in (
            (scratch.d_q, saved.q_raw, saved.q_rstd, "q_norm"),
            (scratch.d_k, saved.k_raw, saved.k_rstd, "k_norm"),
        ):
            heads, weight = _per_head(d), getattr(block, name)
            ops.rms_norm_backward(heads, norm_grads.get(name), heads, _per_head(_present(raw)), rstd, weight, None)
    _linear_backward(
        s, scratch.d_normed, [scratch.d_q, scratch.d_k, scratch.d_v], saved, saved.normed, block,
        ["q_proj", "k_proj", "v_proj"],
    )  # fmt: skip
    ops.rms_norm_backward(
        d_x, norm_grads.get("input_norm"), scratch.d_normed, x, saved.rstd, block.input_norm, scratch.d_mid
    )


def _up_to_activation(x: torch.Tensor, saved: Intermediates, block: BlockParams, s: Stream, window: int | None) -> None:
    """Fills `saved` up to `act`, the input of down_proj."""
    ops, spec = s.ops, s.spec
    ops.rms_norm_forward(saved.normed, saved.rstd, x, block.input_norm, spec.rms_norm_eps)
    if spec.qk_norm:
        q_raw, k_raw = _present(saved.q_raw), _present(saved.k_raw)
        _linear(s, [q_raw, k_raw, saved.v], saved, saved.normed, block, ["q_proj", "k_proj", "v_proj"])
        ops.rms_norm_forward(_per_head(saved.q), saved.q_rstd, _per_head(q_raw), block.q_norm, spec.rms_norm_eps)
        ops.rms_norm_forward(_per_head(saved.k), saved.k_rstd, _per_head(k_raw), block.k_norm, spec.rms_norm_eps)
    else:
        _linear(s, [saved.q, saved.k, saved.v], saved, saved.normed, block, ["q_proj", "k_proj", "v_proj"])
    ops.rope_forward(saved.q, s.cos, s.sin)
    ops.rope_forward(saved.k, s.cos, s.sin)
    ops.attention_forward(saved.attn, saved.lse, saved.q, saved.k, saved.v, s.cu_seqlens, s.attention_scale, window)
    _linear(s, [saved.mid], saved, saved.attn, block, ["o_proj"], residual=x)
    ops.rms_norm_forward(saved.post_normed, saved.post_rstd, saved.mid, block.post_norm, spec.rms_norm_eps)
    _linear(s, [saved.gate, saved.up], saved, saved.post_normed, block, ["gate_proj", "up_proj"])
    ops.swiglu_forward(saved.act, saved.gate, saved.up)


def _linear(
    s: Stream,
    outs: list[torch.Tensor],
    saved: Intermediates,
    x: torch.Tensor,
    block: BlockParams,
    names: list[str],
    residual: torch.Tensor | None = None,
) -> None:
    linears, us = [block.linears[n] for n in names], [saved.u.get(n) for n in names]
    s.ops.linear_lora_forward([_rows(o) for o in outs], us, _rows(x), linears, s.dropout, residual=residual)


def _linear_backward(
    s: Stream,
    d_x: torch.Tensor,
    d_outs: list[torch.Tensor],
    saved: Intermediates,
    x: torch.Tensor,
    block: BlockParams,
    names: list[str],
) -> None:
    linears, us = [block.linears[n] for n in names], [saved.u.get(n) for n in names]
    s.ops.linear_lora_backward(_rows(d_x), [_rows(d) for d in d_outs], _rows(x), us, linears, s.dropout)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> [T, heads * D]; 2-D tensors as they are."""
    return x.flatten(1)


def _per_head(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> [T * heads, D]."""
    return x.flatten(0, 1)


def _present(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None, "the plan gives QK-norm models slots for the raw q and k"
    return x
