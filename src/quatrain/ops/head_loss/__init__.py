"""Output head and cross-entropy on the supervised rows only, in chunks: the full logits never exist.

Legend: T tokens, R supervised rows, H hidden size, V vocabulary, c rows of a chunk.

    logits_r = hidden[rows[r]] W^T                  loss_r = logsumexp(logits_r) - logits_r[targets[r]]
    dhidden[rows[r]] = (softmax(logits_r) - onehot(targets[r])) W,      zero on every other row

This is the gradient of the SUM of the losses: dividing by the token count of the whole optimizer step happens once,
where the gradient is clipped. The head is frozen, so W gets no gradient. `losses` and `dhidden` are `=`. `rows` are
distinct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HeadTiles:
    """A head [V, H] that is never on the device as a whole: `tiles` gives (number of the first row, tile [n, H]) in
    order, each valid until the next is asked for. The gradient is then a sum over tiles, in fp32. On CUDA only."""

    shape: tuple[int, int]
    tiles: Callable[[], Iterator[tuple[int, torch.Tensor]]]
