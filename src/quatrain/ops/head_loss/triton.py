"""Head and cross-entropy on the GPU: two products of torch around one kernel that turns logits into their gradient.

A chunk of supervised rows is gathered, its logits lie in the slot that the engine provides and become dlogits there,
and dlogits times the head goes back to the rows of dhidden. Every size is static: an inert entry, which fills the list
of rows up to its capacity, has target -1 and any row number. Its loss is 0, and it reads and writes no row of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quatrain.ops.rows import row_chunks
from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import head_rows

LOWEST = tl.constexpr(-3.0e38)


def head_loss(
    losses: torch.Tensor,
    dhidden: torch.Tensor | None,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    head: torch.Tensor,
    logits: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """losses fp32 [R] =, dhidden [T, H] = (None: losses only), from hidden [T, H], rows, targets [R] int64 and head
    [V, H]. `logits` fp32 [c, V] is scratch: its bytes hold a chunk of logits in hidden's dtype, so a chunk of 2c rows
    where that has two bytes. `scratch` holds `triton_sizes.head_rows` of such a chunk."""
    contiguous("head_loss", losses, dhidden, hidden, rows, targets, head, logits)
    (width, vocab), count = (hidden.shape[1], head.shape[0]), rows.shape[0]
    logits = logits.view(hidden.dtype).view(-1, vocab)
    (gathered,) = carve("head_loss", scratch, head_rows(min(count, logits.shape[0]), width, hidden.dtype))
    copying = config_for("head_rows", hidden)
    if dhidden is not None:
        dhidden.zero_()
    for chunk in row_chunks(count, logits.shape[0]):
        at, wanted = rows[chunk], targets[chunk]
        x, scores = gathered[: at.shape[0]], logits[: at.shape[0]]
        grid = (at.shape[0], triton.cdiv(width, copying["BLOCK"]))
        copy_rows_kernel[grid](x, hidden, at, wanted, width, BACK=False, **copying)
        torch.mm(x, head.T, out=scores)
        cross_entropy_kernel[(at.shape[0],)](
            losses[chunk], scores, wanted, vocab, GRADIENT=dhidden is not None, **config_for("cross_entropy", hidden)
        )
        if dhidden is not None:
            torch.mm(scores, head, out=x)
            copy_rows_kernel[grid](dhidden, x, at, wanted, width, BACK=True, **copying)


@triton.jit
def copy_rows_kernel(out, x, rows, targets, D, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """out[r] = x[rows[r]], zero for an inert r; BACK: out[rows[r]] = x[r], nothing for an inert r."""
    r, d = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = d < tl.where(tl.load(targets + r) >= 0, D, 0)
    listed, compact = tl.load(rows + r) * D + d, r.to(tl.int64) * D + d
    if BACK:
        tl.store(out + listed, tl.load(x + compact, mask=live), mask=live)
    else:
        tl.store(out + compact, tl.load(x + listed, mask=live, other=0.0), mask=d < D)


@triton.jit
def cross_entropy_kernel(losses, logits, targets, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """losses[r] of logits [R, V]; GRADIENT: row r of logits becomes its gradient. Softmax and sums are fp32, block
    after block of the vocabulary."""
    r, v = tl.program_id(0), tl.arange(0, BLOCK)
    row, target = logits + r.to(tl.int64) * V, tl.load(targets + r)
    live = target >= 0
    # Before the first reduction, behind whose barrier other warps may overwrite the place.
    wanted = tl.load(row + tl.maximum(target, 0)).to(tl.float32)
    top, total = tl.full([], LOWEST, tl.float32), 0.0
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + v, mask=start + v < V, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    tl.store(losses + r, tl.where(live, tl.log(total) + top - wanted, 0.0))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            at = start + v
            x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - top) / total
            dlogits = tl.where(live, tl.where(at == target, p - 1, p), 0.0)
            tl.store(row + at, dlogits.to(logits.dtype.element_ty), mask=at < V)


def cases(arch: str, dtype: str) -> list[Case]:
    made, t = [], f"*{dtype}"
    for back in (False, True):
        how = config("head_rows", arch, dtype) | {"BACK": back}
        made.append(Case(copy_rows_kernel, f"{t} {t} *i64 *i64 i32:16", how, "back" if back else ""))
    for gradient in (False, True):
        how = config("cross_entropy", arch, dtype) | {"GRADIENT": gradient}
        made.append(Case(cross_entropy_kernel, f"*fp32 {t} *i64 i32:16", how, "gradient" if gradient else "loss"))
    return made
