"""A micro-batch on its way to the device: rows packed into one stream, positions restarting at each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quatrain.data.row import IGNORE, Row
from quatrain.memory.plan import Slot


@dataclass(frozen=True)
class Batch:
    """T tokens in one stream. `loss_rows[i]` is the position whose hidden state predicts `targets[i]`."""

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    row_ids: torch.Tensor  # int64 [T], the row's number in the optimizer step
    cu_seqlens: tuple[int, ...]
    loss_rows: torch.Tensor  # int64 [R]
    targets: torch.Tensor  # int64 [R]

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]


def pack_rows(rows: Sequence[Row], first_row: int = 0) -> Batch:
    """One stream of `rows` in order; the first is number `first_row` of its optimizer step."""
    ids: list[int] = []
    positions: list[int] = []
    row_ids: list[int] = []
    loss_rows: list[int] = []
    targets: list[int] = []
    cu_seqlens = [0]
    for number, row in enumerate(rows, first_row):
        start = len(ids)
        ids.extend(row.input_ids)
        positions.extend(range(len(row)))
        row_ids.extend([number] * len(row))
        for i, label in enumerate(row.labels[1:]):
            if label != IGNORE:
                loss_rows.append(start + i)
                targets.append(label)
        cu_seqlens.append(len(ids))
    as_ids = [torch.tensor(values, dtype=torch.int64) for values in (ids, positions, row_ids, loss_rows, targets)]
    return Batch(as_ids[0], as_ids[1], as_ids[2], tuple(cu_seqlens), as_ids[3], as_ids[4])


def split_rows(rows: Sequence[Row], capacity: int) -> list[list[Row]]:
    """Consecutive groups of rows, each of at most `capacity` tokens. Order is kept, no row is split."""
    groups: list[list[Row]] = []
    used = capacity + 1
    for row in rows:
        if used + len(row) > capacity:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += len(row)
    return groups


def input_slots(tokens: int, rotary_half: int, wide: torch.dtype) -> list[Slot]:
    """The arena slots that a `Batch` of up to `tokens` tokens is loaded into."""
    integers = ("ids", "positions", "row_ids", "loss_rows", "targets", "dropout_keys")
    slots = [Slot("inputs", name, (tokens,), torch.int64) for name in integers]
    slots += [Slot("inputs", name, (tokens, rotary_half), wide) for name in ("cos", "sin")]
    return [*slots, Slot("inputs", "losses", (tokens,), wide)]
