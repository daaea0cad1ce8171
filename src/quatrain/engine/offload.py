"""Block inputs that wait in host memory for their backward.

The inputs of the first n blocks share three buffers on the device: one is read, one is written, one is on its way. In
the forward each input is copied out beside the computation; in the backward the one that is needed three blocks later
is copied back. The last three are still there when the backward comes to them and never travel.
"""

from __future__ import annotations

from typing import Any

import torch

from quatrain.engine.device import Device
from quatrain.engine.device_layout import RING


class Offload:
    """`ring` are the device buffers [T, H]; block i < `count` has its input in ring[i % 3]."""

    def __init__(self, ring: list[torch.Tensor], count: int, device: Device) -> None:
        self._ring, self._count, self._device = ring, count, device
        self._host = [
            torch.empty(ring[0].shape, dtype=ring[0].dtype, pin_memory=device.pinned)
            for _ in range(max(0, count - RING))
        ]
        self._leaving: dict[int, Any] = {}
        self._coming: dict[int, Any] = {}

    def before_write(self, layer: int) -> None:
        """Before the forward writes the input of block `layer`: its buffer's last tenant has left."""
        handle = self._leaving.pop(layer - RING, None)
        if handle is not None:
            self._device.wait(handle)

    def written(self, layer: int, tokens: int) -> None:
        """After the forward has written the input of block `layer`."""
        if layer < len(self._host):
            self._leaving[layer] = self._device.copy_aside(
                self._host[layer][:tokens], self._ring[layer % RING][:tokens]
            )

    def before_read(self, layer: int) -> None:
        """Before the backward reads the input of block `layer`."""
        handle = self._coming.pop(layer, None)
        if handle is not None:
            self._device.wait(handle)

    def read(self, layer: int, tokens: int) -> None:
        """After the backward of block `layer`: its buffer is free for an earlier one."""
        earlier = layer - RING
        if layer < self._count and earlier >= 0:
            self._coming[earlier] = self._device.copy_aside(
                self._ring[layer % RING][:tokens], self._host[earlier][:tokens]
            )
