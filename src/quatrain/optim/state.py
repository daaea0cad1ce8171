"""The scalars of an optimizer step. They live on the device, so that a captured step reads fresh ones on every
replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class StepState:
    """lr fp64: the learning rate of this step.            step int64: updates done so far.
    tokens int64: supervised tokens of this step so far.   loss_sum fp64: the sum of their losses.
    squares fp64 [segments]: gradient norms squared.       norm, scale fp64, skip bool: see `ops/grad_norm`.
    skipped int64: steps left out for a non-finite gradient or loss."""

    lr: torch.Tensor
    step: torch.Tensor
    tokens: torch.Tensor
    loss_sum: torch.Tensor
    squares: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor
    skip: torch.Tensor
    skipped: torch.Tensor

    @classmethod
    def create(cls, segments: int, device: torch.device | str) -> StepState:
        def scalar(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        return cls(
            lr=scalar(torch.float64),
            step=scalar(torch.int64),
            tokens=scalar(torch.int64),
            loss_sum=scalar(torch.float64),
            squares=torch.zeros(segments, dtype=torch.float64, device=device),
            norm=scalar(torch.float64),
            scale=scalar(torch.float64),
            skip=scalar(torch.bool),
            skipped=scalar(torch.int64),
        )
