"""Causal grouped-query attention over a packed stream, optionally with a sliding window.

Legend: T tokens of the stream, S tokens of one row, Hq query heads, Hk key/value heads (Hq a multiple of Hk; query
head h reads key head h // (Hq / Hk)), D head_dim. Rows are bounded by cu_seqlens [rows + 1] and never see each other.
A query at position i of its row sees keys j with i - window < j <= i (window None: all j <= i).

    forward   P = softmax(scale * Q K^T + mask)           out = P V                  lse = logsumexp of each score row
    backward  delta = rowsum(dout * out)                  dV = P^T dout              dP = dout V^T
              dS = P * (dP - delta) * scale               dQ = dS K                  dK = dS^T Q

P is recomputed from lse in the backward (FlashAttention, Dao et al. 2022, arXiv:2205.14135, section 3). Scores,
softmax and sums are fp32 (fp64 for fp64 input), whatever the dtype of q, k, v. All outputs are `=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RowBounds:
    """The rows of a stream where the host may not look: `start` and `end` int32 [T] say for each token where its row
    begins and where it is over (exclusive). They take the place of `cu_seqlens` in the CUDA ops.

    An inert token, one that fills the stream up to a fixed size, belongs to no row: its start and end are its own
    position. It sees nothing and nothing sees it, its out, lse, dq, dk and dv are 0, and whatever stands in its q, k,
    v and dout changes nothing. Inert tokens come last."""

    start: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], tokens: int) -> RowBounds:
        """Host tensors for a stream of `tokens` whose rows are bounded by cu_seqlens [rows + 1]; the rest is inert."""
        import torch

        start = torch.arange(tokens, dtype=torch.int32)
        end = start.clone()
        for a, b in pairwise(cu_seqlens):
            start[a:b], end[a:b] = a, b
        return cls(start, end)
