"""What the launch functions of all Triton kernels share: the check at the door, and scratch cut from one tensor."""

from __future__ import annotations

import math

import torch

from quatrain.errors import KernelError
from quatrain.ops.triton_sizes import Part, aligned, carved_bytes


def contiguous(op: str, *tensors: torch.Tensor | None) -> None:
    """Raises KernelError unless all tensors are contiguous and on one device."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(f"{op}: want contiguous tensors, got {tuple(tensor.shape)} with {tensor.stride()}")
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise KernelError(f"{op}: want tensors on one device, got {', '.join(sorted(map(str, devices)))}")


def carve(op: str, scratch: torch.Tensor, *parts: Part) -> list[torch.Tensor]:
    """Views of the uint8 tensor `scratch` with these shapes and dtypes, one after the other. Raises KernelError when
    it is smaller than `carved_bytes(*parts)`."""
    if scratch.numel() < carved_bytes(*parts):
        raise KernelError(f"{op}: scratch has {scratch.numel()} bytes, want {carved_bytes(*parts)}")
    views, start = [], 0
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        views.append(scratch[start : start + size].view(dtype).view(*shape))
        start += aligned(size)
    return views
