"""Head and cross-entropy on the GPU: two products of torch around one kernel that turns logits into their gradient.

A chunk of supervised rows is gathered, its logits lie in the slot that the engine provides and become dlogits there,
and dlogits times the head goes back to the rows of dhidden. Every size is static: an inert entry, which fills the list
of rows up to its capacity, has target -1 and any row number. Its loss is 0, and it reads and writes no row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from quatrain.ops.head_loss import HeadTiles
from quatrain.ops.rows import row_chunks
from quatrain.ops.triton_configs import Case, config, config_for
from quatrain.ops.triton_runtime import carve, contiguous
from quatrain.ops.triton_sizes import head_parts

LOWEST = tl.constexpr(-3.0e38)


def head_loss(
    losses: torch.Tensor,
    dhidden: torch.Tensor | None,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    head: torch.Tensor | HeadTiles,
    logits: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """losses fp32 [R] =, dhidden [T, H] = (None: losses only), from hidden [T, H], rows, targets [R] int64 and head
    [V, H]. `logits` fp32 [c, V] is scratch: its bytes hold a chunk of logits in hidden's dtype, so a chunk of 2c rows
    where that has two bytes. `scratch` holds `triton_sizes.head_parts` of such a chunk."""
    tiled, whole = (True, None) if isinstance(head, HeadTiles) else (False, head)
    contiguous("head_loss", losses, dhidden, hidden, rows, targets, whole, logits)
    (width, vocab), count = (hidden.shape[1], head.shape[0]), rows.shape[0]
    logits = logits.view(hidden.dtype).view(-1, vocab)
    parts = head_parts(min(count, logits.shape[0]), width, hidden.dtype, tiled=tiled)
    gathered, *sums = carve("head_loss", scratch, *parts)
    copying = config_for("head_rows", hidden)
    if dhidden is not None:
        dhidden.zero_()
    for chunk in row_chunks(count, logits.shape[0]):
        at, wanted = rows[chunk], targets[chunk]
        x, scores = gathered[: at.shape[0]], logits[: at.shape[0]]
        grid = (at.shape[0], triton.cdiv(width, copying["BLOCK"]))
        copy_rows_kernel[grid](x, hidden, at, wanted, width, BACK=False, **copying)
        for first, tile in _tiles(head):
            torch.mm(x, tile.T, out=scores[:, first : first + len(tile)])
        cross_entropy_kernel[(at.shape[0],)](
            losses[chunk], scores, wanted, vocab, GRADIENT=dhidden is not None, **config_for("cross_entropy", hidden)
        )
        if dhidden is not None:
            _product_with_head(x, scores, head, *(part[: len(x)] for part in sums))
            copy_rows_kernel[grid](dhidden, x, at, wanted, width, BACK=True, **copying)


def _tiles(head: torch.Tensor | HeadTiles) -> Iterable[tuple[int, torch.Tensor]]:
    return head.tiles() if isinstance(head, HeadTiles) else ((0, head),)


def _product_with_head(
    x: torch.Tensor, scores: torch.Tensor, head: torch.Tensor | HeadTiles, *sums: torch.Tensor
) -> None:
    """x [c, H] = scores [c, V] head; over tiles by a product of each [c, H] and their sum in fp32 [c, H]."""
    if isinstance(head, HeadTiles):
        product, total = sums
        total.zero_()
        for first, tile in head.tiles():
            torch.mm(scores[:, first : first + len(tile)], tile, out=product)
            total.add_(product)
        x.copy_(total)
    else:
        torch.mm(scores, head, out=x)


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
