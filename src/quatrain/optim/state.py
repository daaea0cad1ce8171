"""The scalars of an optimizer step. They live on the device, so that a captured step reads fresh ones on every
replay, and its outcome waits there until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

HISTORY = 8
"""Outcomes that are kept."""


@dataclass
class StepState:
    """lr fp64: the learning rate of this step.            step int64: updates done so far.
    tokens int64: supervised tokens of this step so far.   loss_sum fp64: the sum of their losses.
    squares fp64 [segments]: gradient norms squared.       norm, scale fp64, skip bool: see `ops/grad_norm`.
    skipped int64: steps left out for a non-finite gradient or loss.
    loss_scale fp64: what gradients are multiplied by in the backward (`optim/loss_scale.py`); good int64: updates since
    it last changed.                                       outcomes fp64 [8, 5]: of the last steps, see `record`.
    steps int64 [1]: recorded so far, modulo 8.            partial, wide fp64, flag bool: scratch."""

    lr: torch.Tensor
    step: torch.Tensor
    tokens: torch.Tensor
    loss_sum: torch.Tensor
    squares: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor
    skip: torch.Tensor
    skipped: torch.Tensor
    loss_scale: torch.Tensor
    good: torch.Tensor
    outcomes: torch.Tensor
    steps: torch.Tensor
    partial: torch.Tensor
    flag: torch.Tensor
    row: torch.Tensor

    @classmethod
    def create(cls, segments: int, device: torch.device | str) -> StepState:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            lr=zeros(torch.float64),
            step=zeros(torch.int64),
            tokens=zeros(torch.int64),
            loss_sum=zeros(torch.float64),
            squares=zeros(torch.float64, segments),
            norm=zeros(torch.float64),
            scale=zeros(torch.float64),
            skip=zeros(torch.bool),
            skipped=zeros(torch.int64),
            loss_scale=torch.ones((), dtype=torch.float64, device=device),
            good=zeros(torch.int64),
            outcomes=zeros(torch.float64, HISTORY, 5),
            steps=zeros(torch.int64, 1),
            partial=zeros(torch.float64),
            flag=zeros(torch.bool),
            row=zeros(torch.float64, 1, 5),
        )

    def end_step(self) -> None:
        """Counts the step, as an update or as skipped, and records its outcome: (loss_sum, norm, lr, step, skip)."""
        torch.logical_not(self.skip, out=self.flag)
        self.step += self.flag
        self.skipped += self.skip
        for column, value in enumerate((self.loss_sum, self.norm, self.lr, self.step, self.skip)):
            self.row[0, column].copy_(value)
        self.outcomes.index_copy_(0, self.steps, self.row)
        self.steps.add_(1).remainder_(HISTORY)

    def snapshot(self) -> list[torch.Tensor]:
        """Copies of everything, for `restore`."""
        return [getattr(self, field.name).clone() for field in fields(self)]

    def restore(self, snapshot: list[torch.Tensor]) -> None:
        for field, saved in zip(fields(self), snapshot, strict=True):
            getattr(self, field.name).copy_(saved)
