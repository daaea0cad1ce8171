"""Token embedding in plain torch."""

from __future__ import annotations

import torch


def embedding_forward(out: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
    """out [T, H] = rows of table [V, H] named by ids [T] (int64, in [0, V))."""
    torch.index_select(table, 0, ids, out=out)
