"""Where a step's time goes, by layer and by op. Free when off: the engine then calls the ops themselves.

A profiler that is on wraps every op in a timer and notes its bytes (each tensor argument once, twice where it is
updated in place: the least traffic the op can cause) and, for the products, its FLOPs. `report` sums them;
`profile.limits` measures what the hardware could do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

OpsT = TypeVar("OpsT")
FlopCount = Callable[[tuple[Any, ...]], float]


@dataclass
class Span:
    """Sums over the calls of one op in one part ("forward", "recompute", "backward", ...) of one layer (None: not in
    a block)."""

    part: str
    layer: int | None
    op: str
    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0


class Profiler:
    """`enabled` may be switched at any time; it takes effect at once because the timers stay in place once asked
    for."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.wait: Callable[[], None] = lambda: None
        """Waits for the device; set by an engine whose ops return before they are done."""
        self._part = "other"
        self._layer: int | None = None
        self._spans: dict[tuple[str, int | None, str], Span] = {}
        self.part_seconds: dict[str, float] = {}
        """Wall seconds of each part while enabled: its ops, and what lies between them on the host."""

    def timed(self, ops: OpsT) -> OpsT:
        """`ops` (a dataclass of callables) with every member timed while the profiler is enabled."""
        timed = {f.name: self._timer(f.name, getattr(ops, f.name)) for f in fields(ops)}  # type: ignore[arg-type]
        return replace(ops, **timed)  # type: ignore[type-var]

    def _timer(self, name: str, op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            start = time.perf_counter()
            op(*args, **more)
            if self.enabled:
                self.wait()
                self._add(name, time.perf_counter() - start, args)

        return call

    @contextmanager
    def part(self, part: str, layer: int | None = None) -> Iterator[None]:
        """Names what the ops called inside belong to."""
        outer = self._part, self._layer
        self._part, self._layer = part, layer
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.enabled:
                self.part_seconds[part] = self.part_seconds.get(part, 0.0) + time.perf_counter() - start
            self._part, self._layer = outer

    def clear(self) -> None:
        self._spans.clear()
        self.part_seconds.clear()

    def spans(self) -> list[Span]:
        """All spans, in the order of their first call."""
        return list(self._spans.values())

    def by_op(self) -> list[Span]:
        """Summed over parts and layers, slowest first."""
        return self._summed(lambda span: ("", None, span.op))

    def by_layer(self) -> list[Span]:
        """Summed over ops, by part and layer."""
        return self._summed(lambda span: (span.part, span.layer, ""))

    def _summed(self, key: Callable[[Span], tuple[str, int | None, str]]) -> list[Span]:
        sums: dict[tuple[str, int | None, str], Span] = {}
        for span in self._spans.values():
            total = sums.setdefault(key(span), Span(*key(span)))
            total.calls += span.calls
            total.seconds += span.seconds
            total.bytes += span.bytes
            total.flops += span.flops
        return sorted(sums.values(), key=lambda span: -span.seconds)

    def _add(self, name: str, seconds: float, args: tuple[Any, ...]) -> None:
        key = (self._part, self._layer, name)
        span = self._spans.setdefault(key, Span(*key))
        span.calls += 1
        span.seconds += seconds
        twice = _READ_AND_WRITTEN.get(name, 0)
        span.bytes += sum(_nbytes(arg) for arg in (*args, *args[:twice]))
        span.flops += _FLOPS[name](args) if name in _FLOPS else 0.0


def _nbytes(arg: Any) -> float:
    if hasattr(arg, "element_size"):
        return float(arg.numel() * arg.element_size())
    if isinstance(arg, list | tuple):
        return float(sum(_nbytes(item) for item in arg))
    weight = getattr(arg, "weight", None)  # a Linear
    if weight is not None:
        return float(weight.nbytes() if callable(getattr(weight, "nbytes", None)) else _nbytes(weight))
    return 0.0


def _linear_flops(tokens: int, linears: Any, passes: int) -> float:
    """2 T N K for the weight; 2 T r (N + K) for an adapter, `passes` times (forward 1; backward 2: its own dx and dA,
    dB)."""
    total = 0.0
    for linear in linears:
        n, k = linear.weight.shape
        total += 2.0 * tokens * n * k
        if linear.lora is not None:
            total += 2.0 * tokens * linear.lora.rank * (n + k) * passes
    return total


def _down_flops(x: Any, linears: Any) -> float:
    """2 T r K for each adapter."""
    return float(2 * x.numel() * sum(linear.lora.rank for linear in linears if linear.lora is not None))


def _bounds(rows: Any) -> Any:
    """cu_seqlens, also of rows whose bounds are on the device (`ops.attention.RowBounds`)."""
    return [0, *sorted(set(rows.end[rows.start < rows.end].tolist()))] if hasattr(rows, "end") else rows


def _attention_flops(q: Any, cu_seqlens: Any, window: int | None, products: int) -> float:
    """2 D for each visible pair of a query head and a key, for each of the products."""
    pairs = 0
    for start, end in pairwise(_bounds(cu_seqlens)):
        n = end - start
        w = n if window is None else min(window, n)
        pairs += n * w - w * (w - 1) // 2
    return float(2 * pairs * q.shape[1] * q.shape[2] * products)


def _head_flops(args: tuple[Any, ...]) -> float:
    _, d_hidden, hidden, rows, _, head, _ = args
    return float(2 * rows.shape[0] * hidden.shape[1] * head.shape[0] * (1 if d_hidden is None else 2))


_READ_AND_WRITTEN = {"rope_forward": 1, "rope_backward": 1, "adamw_step": 3}
"""How many of an op's first arguments it updates in place."""

_FLOPS: dict[str, FlopCount] = {
    "linear_lora_forward": lambda a: _linear_flops(a[2].shape[0], a[3], 1),
    "linear_lora_decode": lambda a: _linear_flops(a[2].shape[0], a[3], 1),
    "linear_lora_backward": lambda a: _linear_flops(a[2].shape[0], a[4], 2),
    "lora_down_forward": lambda a: _down_flops(a[1], a[2]),
    "attention_forward": lambda a: _attention_flops(a[2], a[5], a[7], 2),
    "attention_backward": lambda a: _attention_flops(a[6], a[9], a[11], 5),
    "head_loss": _head_flops,
}
