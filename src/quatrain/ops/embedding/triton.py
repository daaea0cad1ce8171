"""Token embedding on the GPU: a row, or a piece of one, a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import contiguous


@triton.jit
def embedding_kernel(out, ids, table, H, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + t * H + h, tl.load(table + tl.load(ids + t) * H + h, mask=h < H), mask=h < H)


def embedding_forward(out: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
    """out [T, H] = rows of table [V, H] named by ids int64 [T], in [0, V)."""
    contiguous("embedding_forward", out, ids, table)
    (tokens, hidden), how = out.shape, config_for("elementwise", out)
    embedding_kernel[(tokens, triton.cdiv(hidden, how["BLOCK"]))](out, ids, table, hidden, **how)


def cases(arch: str, dtype: str) -> list[Case]:
    return [Case(embedding_kernel, f"*{dtype} *i64 *{dtype} i32:16", config("elementwise", arch, dtype))]
