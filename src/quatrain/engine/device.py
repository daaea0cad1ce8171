"""What a step needs of the device it runs on besides kernels: order between streams, pinned memory, capture.

The engine's work on a GPU goes to one stream of its own, because the default one cannot be captured. All of it is about
order among pieces of enqueued work; the host waits only where a docstring says so.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quatrain.errors import KernelError

Wait = Callable[[], None]

MOST_OUTSIDE = 64 << 20
"""Of the memory that went while a step was captured, what counts as the graph's at most: on a shared GPU some of it is
another process's."""


@dataclass(frozen=True)
class Replay:
    """Captured work. `launch` enqueues it; `nbytes` is what it holds on the device."""

    launch: Callable[[], None]
    nbytes: int


class Device(Protocol):
    """The device of an engine; `pinned` says that host memory of transfers must be pinned."""

    pinned: bool

    def running(self) -> AbstractContextManager[None]:
        """Around the engine's work: it starts after what the caller has enqueued before, and what the caller enqueues
        afterwards starts after it."""

    def mark(self) -> Wait:
        """A call by which the host waits for everything that is enqueued now."""

    def synchronize(self) -> None:
        """The host waits for everything."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Records what `work` enqueues and runs none of it. Raises what `work` raises, or KernelError, and leaves no
        capture open then."""

    def copy_aside(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Copies after all that is enqueued now, beside what is enqueued next, until `wait` for the returned handle."""

    def wait(self, handle: Any) -> None:
        """What the engine enqueues next starts after the copy."""


class HostDevice:
    """The CPU: when a call returns, it has happened."""

    pinned = False

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Wait:
        return self.synchronize

    def synchronize(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Replay:
        raise KernelError("the CPU captures no graphs")

    def copy_aside(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def wait(self, handle: None) -> None:
        pass


class CudaDevice:
    """A GPU through torch. Never run without one: untested on hardware."""

    pinned = True

    def __init__(self) -> None:
        self._stream, self._side = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._broken: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also what follows an exception must not overtake what was enqueued before it
            caller.wait_stream(self._stream)

    def mark(self) -> Wait:
        return self._event().synchronize

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, work: Callable[[], None]) -> Replay:
        gc.collect()  # a tensor that is freed during the capture would invalidate it
        torch.cuda.synchronize()
        before = _free_and_reserved()
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch gives up a pool with its last graph and does not take it again
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            self._end_broken(graph)
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._clear(graph)
            raise
        self._graphs.add(graph)
        torch.cuda.synchronize()
        free, reserved = (b - a for a, b in zip(before, _free_and_reserved(), strict=True))
        return Replay(graph.replay, reserved + min(MOST_OUTSIDE, max(0, -free - reserved)))

    @staticmethod
    def _event() -> torch.cuda.Event:
        """Happens when everything that is enqueued now is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _end_broken(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed; an invalidated one says so when it is ended, which is no news."""
        with torch.cuda.stream(self._side):
            forked = torch.cuda.is_current_stream_capturing()
        with suppress(RuntimeError):
            if forked:  # a copy that nobody has waited for yet: a capture cannot end before it
                torch.cuda.current_stream().wait_stream(self._side)
        with suppress(RuntimeError):
            graph.capture_end()
        self._clear(graph)

    def _clear(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that did not become a graph. Where its end failed, torch's allocators were not told and go on
        asking the graph which memory is its own: they are told now, and the graph stays."""
        self._broken.append(graph)
        with suppress(RuntimeError):  # they were told before
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        graph.reset()

    def copy_aside(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)
            return self._event()

    def wait(self, handle: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(handle)


def _free_and_reserved() -> tuple[int, int]:
    """Bytes that the GPU has left, and bytes that torch holds of it."""
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
