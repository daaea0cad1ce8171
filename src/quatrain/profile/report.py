"""The profiler's spans as rows for a table."""

from __future__ import annotations

from quatrain.profile.limits import Limits
from quatrain.profile.spans import Span


def rows(spans: list[Span], limits: Limits) -> list[dict[str, float | int | str | None]]:
    """One row a span: seconds, share, GFLOP/s, GB/s, percent of the limit that binds it (the larger of both), and which
    one that is."""
    total = sum(span.seconds for span in spans) or 1.0
    table: list[dict[str, float | int | str | None]] = []
    for span in spans:
        seconds = max(span.seconds, 1e-12)
        of_flops = span.flops / seconds / limits.flops_per_second
        of_bytes = span.bytes / seconds / limits.bytes_per_second
        table.append(
            {
                "part": span.part,
                "layer": span.layer,
                "op": span.op,
                "calls": span.calls,
                "seconds": span.seconds,
                "share": span.seconds / total,
                "gflops": span.flops / seconds / 1e9,
                "gbytes": span.bytes / seconds / 1e9,
                "percent_of_limit": 100 * max(of_flops, of_bytes),
                "limit": "product" if of_flops >= of_bytes else "memory",
            }
        )
    return table
