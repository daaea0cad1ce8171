"""Captured steps, one for each shape of a step.

A captured step reads everything that differs from step to step from device memory, so a replay is as right as a run.
Capturing runs nothing: the graph is launched afterwards, also for the step that captured it. The first step of a shape
runs as it is, which compiles its kernels and sets up the libraries; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quatrain.engine.device import Device, Replay
from quatrain.errors import KernelError, QuatrainError

Work = Callable[[], None]


@dataclass(frozen=True, order=True)
class StepKey:
    """The shape of a step: everything that a captured one has baked in. Larger steps sort higher."""

    tokens: int
    targets: int
    micro_batches: int
    kind: str  # "train"; "from" for a caller's own gradient; "decode": a token for each row, see engine/decoding.py


@dataclass
class GraphCache:
    """Runs steps, captured where possible. `budget` bytes of device memory at most stay with captured steps: the one
    that was not used for longest goes first.

    A capture that fails changes nothing: the step runs uncaptured, as do all later ones that are not captured yet, and
    `reason` says why. With `required` it is an error."""

    device: Device
    budget: int
    required: bool = False
    reason: str | None = None
    on_refused: Callable[[str], None] | None = None
    """Called once with the reason when steps are no longer captured."""
    replays: int = 0
    _warm: set[StepKey] = field(default_factory=set)
    _captured: dict[StepKey, Replay] = field(default_factory=dict)  # least recently used first

    def run(self, key: StepKey, work: Work) -> None:
        """Does `work`, whose shape is `key`: by replay, by capture and launch, or as it is."""
        replay = self._captured.pop(key, None)
        if replay is None and key in self._warm and self.reason is None:
            replay = self._capture(key, work)
            self._make_room(replay)
        if replay is None:
            work()
            self._warm.add(key)
            return
        self._captured[key] = replay
        self.replays += 1
        replay.launch()

    def prepare(self, works: Sequence[tuple[StepKey, Work]]) -> None:
        """Warms and captures steps before they are needed, largest first, so that smaller ones fit in the memory of
        larger ones. Each work runs once, so it must leave no trace."""
        for key, work in sorted(works, key=lambda item: item[0], reverse=True):
            work()
            self._warm.add(key)
            replay = self._capture(key, work)
            if replay is None or self._bytes() + replay.nbytes > self.budget:
                return
            self._captured[key] = replay

    def refuse(self, reason: str) -> None:
        """Captures nothing from now on. Raises KernelError when capture is required."""
        if self.required:
            raise KernelError(
                f"cuda_graph on: {reason}", hint="--cuda-graph auto runs steps uncaptured where they cannot be captured"
            )
        if self.reason is None:
            self.reason = reason
            if self.on_refused is not None:
                self.on_refused(reason)

    def report(self) -> dict[str, Any]:
        """For `run.json`: what is captured, how often it was replayed, and why nothing more was captured."""
        shapes = [
            {"kind": k.kind, "micro_batches": k.micro_batches, "tokens": k.tokens, "targets": k.targets}
            for k in sorted(self._captured, reverse=True)
        ]
        return {"captured": shapes, "replays": self.replays, "reason": self.reason}

    def _capture(self, key: StepKey, work: Work) -> Replay | None:
        try:
            replay = self.device.capture(work)
        except (RuntimeError, QuatrainError) as error:
            self.refuse(f"the capture of a step of {key.tokens} tokens failed: {error}")
            return None
        if replay.nbytes > self.budget:
            self.refuse(
                f"a captured step of {key.tokens} tokens takes {replay.nbytes / 1e6:.0f} MB, "
                f"the plan has {self.budget / 1e6:.0f} MB for graphs"
            )
            return None
        return replay

    def _make_room(self, replay: Replay | None) -> None:
        if replay is None or self._bytes() + replay.nbytes <= self.budget:
            return
        self.device.synchronize()  # a graph that still runs must not be destroyed
        while self._bytes() + replay.nbytes > self.budget:
            del self._captured[next(iter(self._captured))]

    def _bytes(self) -> int:
        return sum(replay.nbytes for replay in self._captured.values())
