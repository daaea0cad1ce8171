"""What became of the last steps, read from the device when somebody asks and not before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quatrain.engine.device import Device, Wait
from quatrain.optim.state import HISTORY, StepState


@dataclass(frozen=True)
class Outcome:
    """Of one optimizer step. `loss_sum` is over its supervised tokens, `grad_norm` that of their mean gradient."""

    loss_sum: float
    grad_norm: float
    lr: float
    step: int
    skipped: bool


class Pending:
    """The outcome of a step that may still be running."""

    def __init__(self, row: torch.Tensor, wait: Wait) -> None:
        self._row, self._wait = row, wait
        self._outcome: Outcome | None = None

    def result(self) -> Outcome:
        """The outcome; the host waits for it."""
        if self._outcome is None:
            self._wait()
            loss_sum, norm, lr, step, skip = self._row.tolist()
            self._outcome = Outcome(loss_sum, norm, lr, int(step), bool(skip))
        return self._outcome


class Outcomes:
    """Sends each step's outcome to the host behind the step."""

    def __init__(self, state: StepState, device: Device) -> None:
        self._state, self._device = state, device
        self._host = torch.empty(state.outcomes.shape, dtype=torch.float64, pin_memory=device.pinned)
        self._pending: list[Pending | None] = [None] * HISTORY
        self._next = 0  # the host's own count of the state's `steps`

    def take(self) -> Pending:
        """Of the step that was enqueued last. Call it once for each step."""
        at, self._next = self._next, (self._next + 1) % HISTORY
        earlier = self._pending[at]
        if earlier is not None:
            earlier.result()  # before its place is written again
        self._host[at].copy_(self._state.outcomes[at], non_blocking=True)
        pending = self._pending[at] = Pending(self._host[at], self._device.mark())
        return pending
