"""The scratch that Triton's ops need, as arithmetic on sizes: a plan for a GPU is made where neither GPU nor Triton is.

Every op cuts its temporaries from the one scratch tensor (`ops/triton_runtime.carve`), so the largest op counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quatrain.ops.select import Sizes

ALIGNMENT = 256
SPLIT_TOKENS = 256
"""A part of the tokens of an adapter's gradient is at least this long."""
SPLIT_PROGRAMS = 256
"""Tokens are split only while the gradients have fewer programs than this."""
GRAD_COLUMNS = 64
"""Columns of such a program."""
NORM_PARTS = 128
"""Programs that share the sum for a norm weight's gradient, at most."""
SQUARES_PARTS = 1024
"""Programs that share a sum of squares, at most."""
LOGITS_BYTES = 256 << 20
"""About the size of a chunk of logits. The fewer chunks, the fewer passes over the head."""

CACHE_PART = 256
"""Slots of a key/value cache that one program of the attention looks at."""

Part = tuple[Sequence[int], "torch.dtype"]
"""Shape and dtype of a temporary."""


def carved_bytes(*parts: Part) -> int:
    """The bytes of these temporaries side by side."""
    return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def token_split(tokens: int, columns: int) -> tuple[int, int]:
    """(parts, tokens of each) of a sum over tokens for gradients of so many columns: a function of the sizes alone, so
    that equal inputs give equal bits."""
    wanted = max(1, SPLIT_PROGRAMS // -(-columns // GRAD_COLUMNS))
    parts = min(wanted, -(-tokens // SPLIT_TOKENS))
    split = -(-tokens // (parts * 64)) * 64
    return -(-tokens // split), split


def lora_partials(tokens: int, columns: int, rank: int) -> Part:
    """Partial sums of an adapter's gradients. `columns`: in_features and out_features together."""
    import torch

    return (token_split(tokens, columns)[0], rank * columns), torch.float32


def norm_partials(features: int) -> Part:
    """Partial sums of a norm weight's gradient."""
    import torch

    return (NORM_PARTS, features), torch.float32


def squares_partials() -> Part:
    """Partial sums of squares."""
    import torch

    return (SQUARES_PARTS,), torch.float64


def attention_statistics(tokens: int, heads: int) -> Part:
    """A number of every score row."""
    import torch

    return (heads, tokens), torch.float32


def cached_attention_parts(rows: int, heads: int, slots: int, head_dim: int) -> list[Part]:
    """Partial sums, maxima and totals of the softmax over a cache."""
    import torch

    parts = -(-slots // CACHE_PART)
    return [((rows, heads, parts, *last), torch.float32) for last in ((head_dim,), (), ())]


def head_parts(rows: int, hidden: int, dtype: torch.dtype, *, tiled: bool) -> list[Part]:
    """The hidden states of a chunk of supervised rows, and then their gradient; for a head in tiles the product with
    one, and the sum of all."""
    import torch

    shape = (rows, hidden)
    return [(shape, dtype), *([(shape, dtype), (shape, torch.float32)] if tiled else [])]


def scratch_bytes(sizes: Sizes, *, weight: bool = True) -> int:
    """The most that any op needs. Without `weight` there is no room for a dequantised weight: products then read NF4
    themselves, which is slower for many tokens."""
    t, needs = sizes.tokens, [carved_bytes(*2 * [attention_statistics(sizes.tokens, sizes.heads)])]
    for k, outs in sizes.groups:
        for n in outs:
            du: Part = ((t, sizes.rank), sizes.dtype)
            needs.append(carved_bytes(du, lora_partials(t, k + n, sizes.rank)))
            if sizes.quantised and (weight or k % 64):
                needs.append(carved_bytes(du, ((n, k), sizes.dtype)))
    needs.append(carved_bytes(norm_partials(max(sizes.hidden, sizes.head_dim))))
    needs.append(carved_bytes(squares_partials()))
    chunk = sizes.head_chunk * sizes.wide.itemsize // sizes.dtype.itemsize
    needs.append(carved_bytes(*head_parts(chunk, sizes.hidden, sizes.dtype, tiled=sizes.head_tiled)))
    return max(needs)


def decode_scratch_bytes(sizes: Sizes) -> int:
    """The same for a decoding step of `tokens` rows over `longest_row` slots."""
    parts = cached_attention_parts(sizes.tokens, sizes.heads, sizes.longest_row, sizes.head_dim)
    return max(scratch_bytes(sizes), carved_bytes(*parts))


def head_chunk(hidden: int, vocab: int) -> int:
    """Rows of the head at a time."""
    return max(256, min(4096, LOGITS_BYTES // (4 * vocab) // 128 * 128))
