"""SwiGLU's gate in plain torch."""

from __future__ import annotations

import torch

from quatrain.ops.rows import row_chunks


def swiglu_forward(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """out [T, I] = silu(gate) * up."""
    accumulate = torch.promote_types(gate.dtype, torch.float32)
    for rows in row_chunks(gate.shape[0]):
        wide = gate[rows].to(accumulate)
        out[rows] = wide * torch.sigmoid(wide) * up[rows]


def swiglu_backward(
    dgate: torch.Tensor, dup: torch.Tensor, dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> None:
    """dgate, dup [T, I] = from dout, gate, up [T, I]; in place allowed."""
    accumulate = torch.promote_types(gate.dtype, torch.float32)
    for rows in row_chunks(gate.shape[0]):
        wide, d, u = gate[rows].to(accumulate), dout[rows].to(accumulate), up[rows].to(accumulate)
        s = torch.sigmoid(wide)
        silu = wide * s  # before dgate is written: in place, `wide` is the same memory
        dgate[rows] = d * u * s * (1 + wide * (1 - s))
        dup[rows] = d * silu
