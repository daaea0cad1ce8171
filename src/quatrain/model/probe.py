"""Logits of one short row, with one block's weights in memory at a time: how an exported model is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.model.block import Stream, block_forward
from quatrain.model.params import BlockParams
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import intermediate_slots, intermediates, op_sizes
from quatrain.ops.select import Backend, select_backend


def probe_logits(
    spec: ModelSpec,
    ids: Sequence[int],
    read: Callable[[str], torch.Tensor],
    block: Callable[[int], BlockParams],
    ranks: Mapping[str, int],
) -> torch.Tensor:
    """fp32 logits [T, V] of the row `ids`, computed in fp32.

    `read` gives "embed", "final_norm" and "head" when asked, `block` the weights of a layer; what they return is let go
    of after use. `ranks` are the adapters' by linear name.
    """
    backend = select_backend("cpu", torch.float32, "auto", torch.get_num_threads())
    arena = Arena(_slots(spec, backend, ranks, len(ids)))
    stream = Stream(backend.bind(arena["op scratch"]), spec, [0, len(ids)], arena["cos"], arena["sin"], None)
    x, out, final = arena["x"], arena["out"], arena["final"]
    with backend.running():
        inv_freq, scaling = inverse_frequencies(spec.rope, len(ids))
        stream.ops.rope_tables(stream.cos, stream.sin, torch.arange(len(ids)), inv_freq, scaling)
        stream.ops.embedding_forward(x, torch.tensor(ids), read("embed"))
        saved = intermediates(arena, "probe", len(ids), spec)
        for layer in range(spec.num_layers):
            block_forward(out, x, saved, block(layer), stream, spec.windows[layer])
            arena.release(saved.tensors())
            x, out = out, x
        stream.ops.rms_norm_forward(final, arena["final_rstd"], x, read("final_norm"), spec.rms_norm_eps)
    return final @ read("head").T


def _slots(spec: ModelSpec, backend: Backend, ranks: Mapping[str, int], tokens: int) -> list[Slot]:
    dtype = torch.float32
    sizes = op_sizes(
        spec, tokens=tokens, longest_row=tokens, rank=max(ranks.values(), default=0), quantised=False, dropout=False,
        head_chunk=1, dtype=dtype,
    )  # fmt: skip
    return [
        *[Slot("probe", name, (tokens, spec.hidden_size), dtype) for name in ("x", "out", "final")],
        Slot("probe", "final_rstd", (tokens,), dtype),
        *[Slot("probe", name, (tokens, spec.rope.rotary_dim // 2), dtype) for name in ("cos", "sin")],
        Slot("probe", "op scratch", (backend.scratch_bytes(sizes),), torch.uint8),
        *intermediate_slots(spec, ranks, tokens, dtype, dtype, "probe", "probe"),
    ]
