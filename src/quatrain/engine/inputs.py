"""A micro-batch on its way to the device: rows packed into one stream, positions restarting at each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quatrain.data.row import IGNORE, Row
from quatrain.engine.device import Device, Wait
from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.ops.attention import RowBounds


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


@dataclass(frozen=True)
class Bucket:
    """The shape that the micro-batches of a step are filled up to: tokens of the stream, entries of the loss rows."""

    tokens: int
    targets: int


def bucket_for(tokens: int, targets: int, capacity: int) -> Bucket:
    """The smallest bucket that holds so much. There are eight sizes up to `capacity`, for either number."""
    grain = -(-capacity // 8)

    def up(count: int) -> int:
        return min(-(-max(count, 1) // grain) * grain, capacity)

    return Bucket(up(tokens), up(targets))


@dataclass(frozen=True)
class Loaded:
    """A micro-batch in its slots: what `Batch` holds, filled up to the bucket with inert rows."""

    ids: torch.Tensor
    positions: torch.Tensor
    row_ids: torch.Tensor
    loss_rows: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor  # int64 [], the supervised tokens
    rows: Sequence[int] | RowBounds  # as the attention takes them
    cu_seqlens: tuple[int, ...]
    embedded: torch.Tensor | None  # [T, H] where the embedding is on the host

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]


def batch_slots(tokens: int, *, static: bool, index: int = 0) -> list[Slot]:
    """The arena slots for a `Batch` of up to `tokens` tokens, number `index` of those loaded at once."""
    slots = [Slot("inputs", f"{name}.{index}", (tokens,), torch.int64) for name in _FIELDS]
    slots.append(Slot("inputs", f"count.{index}", (1,), torch.int64))
    if static:
        slots += [Slot("inputs", f"{name}.{index}", (tokens,), torch.int32) for name in _BOUNDS]
    return slots


def stream_slots(tokens: int, rotary_half: int, wide: torch.dtype) -> list[Slot]:
    """The arena slots for what is made from a batch before its first block, and for its losses."""
    slots = [Slot("inputs", "dropout_keys", (tokens,), torch.int64)]
    slots += [Slot("inputs", name, (tokens, rotary_half), wide) for name in ("cos", "sin")]
    return [*slots, Slot("inputs", "losses", (tokens,), wide)]


_FIELDS = ("ids", "positions", "row_ids", "loss_rows", "targets")
_BOUNDS = ("row_start", "row_end")


class Inputs:
    """Loads batches into their slots: as they are, or, `static`, filled up to a bucket by way of (pinned) staging
    buffers, so that the host never waits for the step before. `embed` [V, H] is the embedding where it is on the host;
    the rows of a lone micro-batch then go to `embedded_slot`."""

    def __init__(
        self, arena: Arena, device: Device, *, static: bool, embed: torch.Tensor | None, embedded_slot: str
    ) -> None:
        self._arena, self._device, self._static = arena, device, static
        self._embed, self._embedded_slot = embed, embedded_slot
        self._staging: dict[str, torch.Tensor] = {}
        self._uploaded: Wait | None = None

    def load(self, batches: Sequence[Batch], bucket: Bucket | None) -> list[Loaded]:
        """The batches in sets of slots 0, 1, ...; `bucket` None takes each at its own size."""
        if self._uploaded is not None:
            self._uploaded()  # the copies of the load before: the step that reads them may still run
        loaded = [self._load(batch, index, bucket) for index, batch in enumerate(batches)]
        if self._static:
            self._uploaded = self._device.mark()
        return loaded

    def _load(self, batch: Batch, index: int, bucket: Bucket | None) -> Loaded:
        tokens, targets = (bucket.tokens, bucket.targets) if bucket else (batch.num_tokens, batch.num_targets)
        lengths = dict(zip(_FIELDS, (tokens, tokens, tokens, targets, targets), strict=True))
        fields = {
            name: self._fill(f"{name}.{index}", getattr(batch, name), length, fill=-1 if name == "targets" else 0)
            for name, length in lengths.items()
        }
        count = self._fill(f"count.{index}", torch.tensor([batch.num_targets]), 1)
        rows: Sequence[int] | RowBounds = batch.cu_seqlens
        if self._static:
            bounds = RowBounds.of(batch.cu_seqlens, tokens)
            start, end = (
                self._fill(f"{name}.{index}", part, tokens)
                for name, part in zip(_BOUNDS, (bounds.start, bounds.end), strict=True)
            )
            rows = RowBounds(start, end)
        return Loaded(
            **fields, count=count[0], rows=rows, cu_seqlens=batch.cu_seqlens,
            embedded=self._embedded(batch, index, tokens),
        )  # fmt: skip

    def _fill(self, slot: str, values: torch.Tensor, length: int, fill: int = 0) -> torch.Tensor:
        """The first `length` rows of a slot: `values`, and behind them the filler."""
        target, n = self._arena[slot][:length], values.shape[0]
        if not self._static:
            return target.copy_(values)
        staged = self._staged(slot)[:length]
        staged[:n] = values
        staged[n:] = fill
        return target.copy_(staged, non_blocking=True)

    def _embedded(self, batch: Batch, index: int, tokens: int) -> torch.Tensor | None:
        if self._embed is None:
            return None
        own = f"embedded.{index}"
        slot = own if own in self._arena else self._embedded_slot
        staged, n = self._staged(slot)[:tokens], batch.num_tokens
        torch.index_select(self._embed, 0, batch.ids, out=staged[:n])
        staged[n:] = 0
        return self._arena[slot][:tokens].copy_(staged, non_blocking=True)

    def _staged(self, slot: str) -> torch.Tensor:
        if slot not in self._staging:
            like = self._arena[slot]
            self._staging[slot] = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._device.pinned)
        return self._staging[slot]
