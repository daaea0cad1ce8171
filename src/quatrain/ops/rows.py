"""Cutting long token streams into row chunks, so that an op's temporaries stay small and their size is known."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 256


def row_chunks(n: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices that cover range(n) in order, `size` rows each, the last one shorter."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
