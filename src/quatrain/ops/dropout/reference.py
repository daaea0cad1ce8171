"""Counter dropout in plain torch: 32-bit arithmetic in int64 tensors (a wrapped product keeps its low 32 bits)."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def dropout_keys(
    keys: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, step: torch.Tensor, seed: int
) -> None:
    """keys int64 [T] = from row_ids, positions int64 [T] and step int64 []."""
    base = _mix(_mix(step) ^ (seed & _MASK))
    keys.copy_(_mix(_mix(base ^ _mix(row_ids + 1)) ^ _mix(positions + (1 << 20))))


def dropout_mask(keys: torch.Tensor, index: int, width: int, p: float, dtype: torch.dtype) -> torch.Tensor:
    """[T, width] of 0 and 1 / (1 - p), for keys int64 [T] and the adapter numbered `index`."""
    token = _mix(keys ^ _mix(torch.full_like(keys[:1], index)))
    feature = _mix(torch.arange(width, device=keys.device))
    bits = _mix(token[:, None] ^ feature[None, :])
    return (bits >= int(p * 2**32)).to(dtype).mul_(1 / (1 - p))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
