"""What generating one row takes besides the model, before there is a model: for the memory plan of a run that samples
answers on the way."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quatrain.memory.plan import Slot
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import intermediate_slots, op_sizes
from quatrain.ops.select import Backend


def generation_bytes(
    spec: ModelSpec, ranks: Mapping[str, int], dtype: torch.dtype, backend: Backend, *, quantised: bool, tokens: int
) -> int:
    """An upper bound for one row that grows to `tokens` tokens, prompt included: the cache, a step, and the pass over
    the prompt, which are there together. `ranks` maps adapted linears to their rank."""
    wide, rank = torch.promote_types(dtype, torch.float32), max(ranks.values(), default=0)
    cache = 2 * tokens * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    tables = 2 * tokens * spec.rope.rotary_dim * wide.itemsize
    logits = spec.vocab_size * (2 * dtype.itemsize + 2 * wide.itemsize)
    total = cache + tables + logits
    for rows in (1, tokens):  # a step adds one token, the prompt is at most all of them
        sizes = op_sizes(
            spec, tokens=rows, longest_row=tokens, rank=rank, quantised=quantised, dropout=False, head_chunk=1,
            dtype=dtype,
        )  # fmt: skip
        slots = [
            *[Slot("", name, (rows, spec.hidden_size), dtype) for name in ("x", "out", "final")],
            *intermediate_slots(spec, ranks, rows, dtype, wide, "", ""),
        ]
        scratch = backend.decode_scratch_bytes(sizes) if rows == 1 else backend.scratch_bytes(sizes)
        total += scratch + sum(slot.nbytes for slot in slots) + rows * wide.itemsize
    return total + 64 * 2 * (spec.num_layers + 16)  # each slot begins at a multiple of 64 bytes
