"""Ctrl-C and SIGTERM as a request: finish the step, write a checkpoint, then leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Context that turns SIGINT and SIGTERM into a flag. A second signal raises KeyboardInterrupt at once.

    Handlers can be set in the main thread only; elsewhere the flag can still be raised by `request`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, signal._HANDLER] = {}

    def request(self) -> None:
        """Ask the run to stop after the step in progress."""
        self.requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
