"""An output head that stays in (pinned) host memory and crosses the bus tile by tile, one tile ahead of its use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from quatrain.engine.device import Device
from quatrain.ops.head_loss import HeadTiles


def streamed_head(head: torch.Tensor, buffers: Sequence[torch.Tensor], device: Device) -> HeadTiles:
    """`head` [V, H] on the host, by way of two buffers [n, H] on the device."""
    return HeadTiles((head.shape[0], head.shape[1]), partial(_tiles, head, buffers, device))


def _tiles(head: torch.Tensor, buffers: Sequence[torch.Tensor], device: Device) -> Iterator[tuple[int, torch.Tensor]]:
    rows = buffers[0].shape[0]

    def fetch(first: int) -> tuple[torch.Tensor, Any]:
        """Into the buffer of the tile before the last, behind all that reads it."""
        source = head[first : first + rows]
        tile = buffers[first // rows % 2][: len(source)]
        return tile, device.copy_aside(tile, source)

    coming = fetch(0)
    for first in range(0, head.shape[0], rows):
        tile, handle = coming
        if first + rows < head.shape[0]:
            coming = fetch(first + rows)
        device.wait(handle)
        yield first, tile
