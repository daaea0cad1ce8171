"""The layout of a step on a GPU: as `layout`, with what a captured graph needs (static inputs for every micro-batch of
a step), slots that share memory where they are never alive together, and choices that trade a little time for memory
until the plan fits.

In the order in which they are tried: fewer rows of the head at a time; the inputs of blocks, from the first block on,
wait in pinned host memory for their backward; the output head stays there too and is read tile by tile. An embedding of
its own (not tied to the head) is always on the host: a step needs a few of its rows, which cross the bus while the step
before is running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quatrain.config import InstructConfig
from quatrain.engine.inputs import batch_slots, stream_slots
from quatrain.engine.layout import Layout, adapter_ranks, adapters_held, choose_kept, weights_held
from quatrain.errors import PlanError
from quatrain.memory.plan import Held, MemoryPlan, Slot, overlay
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import intermediate_slots, op_sizes, scratch_slots
from quatrain.ops.select import Backend

RING = 3
"""Device buffers for the inputs of offloaded blocks: one that is read, one that is written, one on its way."""

CARDS = (8, 12, 16, 24, 32, 48, 80, 96, 141, 192)
"""Usual sizes of GPU memory in GiB, for plans without a device."""
CARD_SHARE = 0.95
"""Of a card's memory, what a run can count on: the driver and the display keep some."""

HEAD_TILE_BYTES = 64 << 20
"""Of a tile of a head on the host; two are on the device."""

TILE = 128
"""Tokens of a micro-batch come in multiples of this."""
MIB = 1 << 20


@dataclass(frozen=True)
class DeviceCosts:
    """Bytes that a process holds on a GPU besides its tensors."""

    context: int = 450 * MIB  # the CUDA context with the compiled kernels
    cublas: int = 33 * MIB  # torch's default workspace of cuBLAS on compute capability 9.0; 8 MiB before
    graphs: int = 128 * MIB  # captured graphs: the cache evicts beyond this
    measured: bool = False


@dataclass(frozen=True)
class DeviceRequest:
    """What a plan is made for. `budget` bytes of the device, `baseline` bytes that the process holds on the host."""

    spec: ModelSpec
    config: InstructConfig
    compute_dtype: torch.dtype
    backend: Backend
    budget: int
    baseline: int
    nf4_nested: bool | None
    costs: DeviceCosts
    input_sets: int = 1
    head_on_host: bool = False

    @property
    def tokens(self) -> int:
        """The capacity of a micro-batch, a whole number of kernel tiles."""
        return -(-self.config.capacity // TILE) * TILE

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def embed_on_host(self) -> bool:
        return self.head_on_host or not self.spec.tie_word_embeddings

    @property
    def head_tile(self) -> int:
        """Rows of the head that are read at a time from the host; 0 where it is on the device."""
        row = self.spec.hidden_size * self.compute_dtype.itemsize
        return min(self.spec.vocab_size, max(1, HEAD_TILE_BYTES // row)) if self.head_on_host else 0


def lay_out_on_smallest_card(request: Callable[[int], DeviceRequest]) -> Layout:
    """For a plan without a device: the layout on the first of `CARDS` that holds the run; `request` makes the request
    for a budget. Raises PlanError when the largest does not."""
    for size in CARDS:
        try:
            layout = lay_out_on_device(request(int(size * CARD_SHARE * 1024**3)))
        except PlanError:
            if size == CARDS[-1]:
                raise
            continue
        line = f"planned for a GPU with {size} GiB, the smallest usual one that holds it"
        return replace(layout, choices=(line, *layout.choices))
    raise AssertionError("CARDS is empty")


def lay_out_on_device(request: DeviceRequest) -> Layout:
    """The layout that fits `request.budget`. Raises PlanError when no choice makes it fit."""
    r = request
    top = r.spec.num_layers
    asked = min(r.tokens, r.backend.head_chunk(r.spec.hidden_size, r.spec.vocab_size))
    least_kept = 0 if r.config.checkpoint == "none" else top
    chunk, offloaded = asked, 0

    def fits(r: DeviceRequest, chunk: int, offloaded: int) -> bool:
        return _plan(r, least_kept, offloaded, chunk).total_bytes <= r.budget

    def fewest(r: DeviceRequest, chunk: int) -> int:
        """The fewest block inputs that have to leave."""
        if least_kept < top or fits(r, chunk, 0):
            return 0
        return next((n for n in range(RING + 1, top + 1) if fits(r, chunk, n)), top)

    if not fits(r, chunk, 0):
        chunk = _chunk_in_workspace(r, asked)
        offloaded = fewest(r, chunk)
    streaming = replace(r, head_on_host=True)
    if not fits(r, chunk, offloaded) and 2 * streaming.head_tile < r.spec.vocab_size:
        r, offloaded = streaming, fewest(streaming, chunk)
    choices = _told(r, asked, chunk, offloaded)
    _plan(r, least_kept, offloaded, chunk).require(r.budget)
    first_kept = least_kept
    if r.config.checkpoint == "auto" and not offloaded:
        room = r.budget - _plan(r, least_kept, 0, chunk).total_bytes
        first_kept = choose_kept(r.config, [sum(s.nbytes for s in _kept_slots(r, layer)) for layer in range(top)], room)
        if first_kept == 0:
            choices.append("every block keeps its intermediates, none is recomputed")
        elif first_kept == top:
            choices.append("every block is recomputed: there is no room for the intermediates of one")
        else:
            choices.append(f"{top - first_kept} of {top} blocks keep their intermediates, the others are recomputed")
    plan = _plan(r, first_kept, offloaded, chunk)
    return Layout(
        r.tokens, first_kept, chunk, r.compute_dtype, r.backend, plan, device="cuda", static=True,
        input_sets=r.input_sets, offloaded=offloaded, embed_on_host=r.embed_on_host, head_tile=r.head_tile,
        graph_bytes=r.costs.graphs, choices=tuple(choices),
    )  # fmt: skip


def _told(r: DeviceRequest, asked: int, chunk: int, offloaded: int) -> list[str]:
    """The choices so far, a line each."""
    told = []
    if r.head_on_host:
        told.append(
            "the output head stays on the host: every pass over it, two for each chunk of rows and one for each "
            f"generated token, copies it in tiles of {r.head_tile} rows"
        )
    if r.embed_on_host:
        told.append("the embedding stays on the host: a step uploads the rows it needs")
    if chunk < asked:
        told.append(f"the head works on {chunk} rows at a time instead of {asked}, inside the workspace")
    if offloaded:
        told.append(f"the inputs of {offloaded} of {r.spec.num_layers} blocks wait on the host for their backward")
    return told


def _plan(r: DeviceRequest, first_kept: int, offloaded: int, chunk: int) -> MemoryPlan:
    spec, tokens = r.spec, r.tokens
    weights = weights_held(spec, r.compute_dtype, r.wide, r.nf4_nested)
    *adapters, saved_file = adapters_held(spec, r.config, r.compute_dtype, r.wide)
    heads = ("embedding" if spec.tie_word_embeddings else "output head",) if r.head_on_host else ()
    pinned = [Held("pinned", entry.name, _pinned(entry.nbytes)) for entry in weights if entry.name in heads]
    left = [entry for entry in weights if entry.name == "embedding" and r.embed_on_host and entry.name not in heads]
    weights = [entry for entry in weights if entry.name not in heads and entry not in left]
    sizes = op_sizes(
        spec, tokens=tokens, longest_row=min(r.config.max_seq_len, tokens), rank=r.config.lora_rank,
        quantised=r.nf4_nested is not None, dropout=r.config.lora_dropout > 0, head_chunk=chunk, dtype=r.compute_dtype,
    )  # fmt: skip
    sizes = replace(sizes, head_tiled=r.head_on_host)
    source = "measured" if r.costs.measured else "typical"
    held = [
        Held("device", f"CUDA context and kernels ({source})", r.costs.context),
        Held("device", "cuBLAS workspace", r.costs.cublas),
        *([Held("device", "captured graphs", r.costs.graphs)] if r.config.cuda_graph != "off" else []),
        *weights,
        *adapters,
        Held("temporaries", "largest op", r.backend.temporary_bytes(sizes)),
    ]
    row = spec.hidden_size * r.compute_dtype.itemsize
    inputs = [slot for index in range(r.input_sets) for slot in batch_slots(tokens, static=True, index=index)]
    embedded = _embedded_slots(r)
    host = [
        Held("process", "python and libraries", r.baseline),
        *left,
        *pinned,
        saved_file,
        Held("pinned", "input staging", sum(_pinned(slot.nbytes) for slot in (*inputs, *embedded))),
        *([Held("pinned", "block inputs", (offloaded - RING) * _pinned(tokens * row))] if offloaded else []),
    ]
    slots = [
        *inputs,
        *embedded,
        *stream_slots(tokens, spec.rope.rotary_dim // 2, r.wide),
        *_hidden_slots(r, offloaded),
        *_shared_slots(r, chunk),
        *head_slots(r.head_tile, spec.hidden_size, r.compute_dtype),
        Slot("scratch", "op scratch", (r.backend.scratch_bytes(sizes),), torch.uint8),
        *(slot for layer in range(first_kept, spec.num_layers) for slot in _kept_slots(r, layer)),
    ]
    return MemoryPlan(tuple(slots), tuple(held), tuple(host))


def head_slots(rows: int, hidden: int, dtype: torch.dtype) -> list[Slot]:
    """Where the tiles of a head on the host arrive; none for 0 rows."""
    return [Slot("head tiles", f"head tile.{i}", (rows, hidden), dtype) for i in range(2)] if rows else []


def _pinned(nbytes: int) -> int:
    """What torch takes for a pinned tensor: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def _embedded_slots(r: DeviceRequest) -> list[Slot]:
    """Where the host's embedding rows arrive; one micro-batch's go to hidden.0 at once."""
    if not r.embed_on_host or r.input_sets == 1:
        return []
    shape = (r.tokens, r.spec.hidden_size)
    return [Slot("inputs", f"embedded.{index}", shape, r.compute_dtype) for index in range(r.input_sets)]


def _hidden_slots(r: DeviceRequest, offloaded: int) -> list[Slot]:
    """Block inputs, and the gradients that go back and forth. The loss leaves d_hidden.1; by the time d_hidden.0 is
    written, the final norm's output is no longer needed."""
    shape, tokens = (r.tokens, r.spec.hidden_size), r.tokens

    def rows(group: str, name: str) -> Slot:
        return Slot(group, name, shape, r.compute_dtype)

    return [
        *(rows("block inputs", f"ring.{i}") for i in range(RING if offloaded else 0)),
        *(rows("block inputs", f"hidden.{i}") for i in range(offloaded, r.spec.num_layers + 1)),
        *overlay("step", "final or gradient", [rows("step", "final")], [rows("step", "d_hidden.0")]),
        Slot("step", "final_rstd", (tokens,), r.wide),
        rows("step", "d_hidden.1"),
    ]


def _shared_slots(r: DeviceRequest, chunk: int) -> list[Slot]:
    """The workspace of recomputed blocks. The head runs while it is idle, so its logits lie there too; and in a block's
    backward the first gradient (of the MLP's activation) is used up before the others are made."""
    return overlay("workspace", "workspace", _workspace(r), [_logits(r, chunk)])


def _workspace(r: DeviceRequest) -> list[Slot]:
    spec, tokens = r.spec, r.tokens
    _, widest = adapter_ranks(spec, r.config)
    scratch = scratch_slots(spec, tokens, r.compute_dtype, "workspace", "scratch")
    first = [slot for slot in scratch if slot.name == "scratch.d_act"]
    return [
        *intermediate_slots(spec, widest, tokens, r.compute_dtype, r.wide, "workspace", "shared"),
        *overlay("workspace", "block gradients", first, [slot for slot in scratch if slot not in first]),
    ]


def _logits(r: DeviceRequest, chunk: int) -> Slot:
    return Slot("workspace", "logits", (chunk, r.spec.vocab_size if r.backend.keeps_logits else 0), r.wide)


def _chunk_in_workspace(r: DeviceRequest, most: int) -> int:
    """Rows of logits that lie inside the workspace, in steps of 128."""
    room = sum(slot.nbytes for slot in _workspace(r) if not slot.within)
    rows = room // max(1, _logits(r, 1).nbytes) // 128 * 128
    return min(most, max(128, rows))


def _kept_slots(r: DeviceRequest, layer: int) -> list[Slot]:
    ranks = adapter_ranks(r.spec, r.config)[0][layer]
    return intermediate_slots(r.spec, ranks, r.tokens, r.compute_dtype, r.wide, "kept blocks", f"kept.{layer}")
