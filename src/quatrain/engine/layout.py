"""The layout of a step: every tensor it will touch, before the first weight is read.

`lay_out` turns a model's numbers and the options into a memory plan, and decides how many blocks keep their
intermediates (`checkpoint`). Formulas are upper bounds at full capacity: a shorter micro-batch uses the head of each
slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quatrain.config import InstructConfig
from quatrain.engine.inputs import batch_slots, stream_slots
from quatrain.memory.plan import Held, MemoryPlan, Slot
from quatrain.model.adapters import match_targets, norm_sizes
from quatrain.model.generation_bytes import generation_bytes
from quatrain.model.spec import LINEARS, ModelSpec
from quatrain.model.workspace import intermediate_slots, op_sizes, scratch_slots
from quatrain.ops.nf4 import BLOCK, NESTED_BLOCK
from quatrain.ops.select import Backend


@dataclass(frozen=True)
class Layout:
    """`tokens` is the capacity of a micro-batch; blocks `first_kept` and above keep their intermediates.

    `static`: a step's shapes are those of its bucket and its tail is inert, so that a captured step can be replayed.
    `input_sets` micro-batches can be loaded at once; `graph_bytes` are for captured steps. The inputs of the first
    `offloaded` blocks wait on the host for their backward, and with `embed_on_host` the embedding's rows are gathered
    there. A head on the host is read in tiles of `head_tile` rows (0: it is on the device). `choices` says what was
    chosen to fit, and why."""

    tokens: int
    first_kept: int
    head_chunk: int
    compute_dtype: torch.dtype
    backend: Backend
    plan: MemoryPlan
    device: str = "cpu"
    static: bool = False
    input_sets: int = 1
    offloaded: int = 0
    embed_on_host: bool = False
    head_tile: int = 0
    graph_bytes: int = 0
    budget: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def wide_dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def generation_room(self, stepped: bool) -> int | None:
        """Bytes of the budget that generating on the CPU may take. Memory of the arena counts from the first step on:
        the system gives it when it is first written."""
        if self.budget is None:
            return None
        arena = sum(slot.nbytes for slot in self.plan.slots if not slot.within)
        planned = sum(entry.nbytes for entry in self.plan.held if entry.group == "samples")
        return self.budget - self.plan.total_bytes + planned + (0 if stepped else arena)


def lay_out(
    spec: ModelSpec,
    config: InstructConfig,
    compute_dtype: torch.dtype,
    backend: Backend,
    budget: int,
    baseline: int,
    nf4_nested: bool | None,
    sample_tokens: int = 0,
) -> Layout:
    """The layout that fits `budget` bytes. Raises PlanError when even recomputing every block does not.

    `baseline` is what the process holds before the model (Python, torch). `nf4_nested` says how the linears are held:
    NF4 with or without nested statistics, or None for the compute dtype. `sample_tokens`: of the longest row that is
    generated between steps, with its prompt; 0 for none."""
    wide = torch.promote_types(compute_dtype, torch.float32)
    tokens = config.capacity
    head_chunk = min(tokens, backend.head_chunk(spec.hidden_size, spec.vocab_size))
    sizes = op_sizes(
        spec, tokens=tokens, longest_row=min(config.max_seq_len, tokens), rank=config.lora_rank,
        quantised=nf4_nested is not None, dropout=config.lora_dropout > 0, head_chunk=head_chunk, dtype=compute_dtype,
    )  # fmt: skip
    held = [
        Held("process", "python and libraries", baseline),
        *weights_held(spec, compute_dtype, wide, nf4_nested),
        *adapters_held(spec, config, compute_dtype, wide),
        Held("temporaries", "largest op", backend.temporary_bytes(sizes)),
    ]
    ranks, widest = adapter_ranks(spec, config)
    if sample_tokens:
        size = generation_bytes(
            spec, widest, compute_dtype, backend, quantised=nf4_nested is not None, tokens=sample_tokens
        )
        held.append(Held("samples", "generating one answer", size))
    slots = [
        *batch_slots(tokens, static=False),
        *stream_slots(tokens, spec.rope.rotary_dim // 2, wide),
        *[
            Slot("block inputs", f"hidden.{i}", (tokens, spec.hidden_size), compute_dtype)
            for i in range(spec.num_layers + 1)
        ],
        Slot("step", "final", (tokens, spec.hidden_size), compute_dtype),
        Slot("step", "final_rstd", (tokens,), wide),
        *[Slot("step", f"d_hidden.{i}", (tokens, spec.hidden_size), compute_dtype) for i in range(2)],
        *intermediate_slots(spec, widest, tokens, compute_dtype, wide, "workspace", "shared"),
        *scratch_slots(spec, tokens, compute_dtype, "workspace", "scratch"),
        Slot("scratch", "op scratch", (backend.scratch_bytes(sizes),), torch.uint8),
        Slot("scratch", "logits", (head_chunk, spec.vocab_size if backend.keeps_logits else 0), wide),
    ]
    kept = [
        intermediate_slots(spec, ranks[layer], tokens, compute_dtype, wide, "kept blocks", f"kept.{layer}")
        for layer in range(spec.num_layers)
    ]
    least = MemoryPlan(tuple(slots), tuple(held))
    least.require(budget)
    first_kept = choose_kept(config, [sum(slot.nbytes for slot in block) for block in kept], budget - least.total_bytes)
    slots += [slot for block in kept[first_kept:] for slot in block]
    plan = MemoryPlan(tuple(slots), tuple(held))
    plan.require(budget)
    return Layout(tokens, first_kept, head_chunk, compute_dtype, backend, plan, budget=budget)


def choose_kept(config: InstructConfig, kept_bytes: list[int], room: int) -> int:
    """The first block to keep. It goes from the top: the last block's intermediates are the first that are needed."""
    if config.checkpoint == "block":
        return len(kept_bytes)
    if config.checkpoint == "none":
        return 0
    first = len(kept_bytes)
    while first > 0 and kept_bytes[first - 1] <= room:
        first -= 1
        room -= kept_bytes[first]
    return first


def adapter_ranks(spec: ModelSpec, config: InstructConfig) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Each layer's adapted linears with their rank, and those of a workspace that serves every layer."""
    layers: list[dict[str, int]] = [{} for _ in range(spec.num_layers)]
    for layer, name in match_targets(spec, config.lora_targets):
        layers[layer][name] = config.lora_rank
    return layers, {name: rank for layer in layers for name, rank in layer.items()}


def nf4_bytes(numel: int, nested: bool) -> int:
    """Bytes of an NF4 tensor: 4-bit codes, and a statistic for each 64: fp32, or 8 bits with fp32 for each 256 and an
    offset."""
    blocks = -(-numel // BLOCK)
    statistics = blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks
    return -(-numel // 2) + statistics


def weights_held(spec: ModelSpec, compute: torch.dtype, wide: torch.dtype, nf4_nested: bool | None) -> list[Held]:
    """The frozen weights; the embedding last but for an own head."""
    linears = biases = 0
    for name in LINEARS:
        n, k = spec.linear_shape(name)
        linears += n * k * compute.itemsize if nf4_nested is None else nf4_bytes(n * k, nf4_nested)
        biases += n * compute.itemsize if name in spec.biased else 0
    norms = sum(sum(norm_sizes(spec, layer).values()) for layer in range(spec.num_layers + 1)) * wide.itemsize
    table = spec.vocab_size * spec.hidden_size * compute.itemsize
    kind = "plain" if nf4_nested is None else "NF4, nested" if nf4_nested else "NF4"
    return [
        Held("weights", f"linears ({kind})", linears * spec.num_layers + (1024 if nf4_nested else 0)),
        Held("weights", "norms and biases", norms + biases * spec.num_layers),
        Held("weights", "embedding", table),
        *([] if spec.tie_word_embeddings else [Held("weights", "output head", table)]),
    ]


def adapters_held(spec: ModelSpec, config: InstructConfig, compute: torch.dtype, wide: torch.dtype) -> list[Held]:
    """Masters, gradients, moments, compute copies; last the adapter's file, while it is written and read back."""
    sizes = [0] * (spec.num_layers + 1)
    for layer, name in match_targets(spec, config.lora_targets):
        sizes[layer] += config.lora_rank * sum(spec.linear_shape(name))
    lora = sum(sizes)
    if config.train_norms:
        sizes = [size + sum(norm_sizes(spec, layer).values()) for layer, size in enumerate(sizes)]
    total, copies = sum(sizes), 0 if compute == wide else lora
    return [
        Held("adapters", "masters", total * wide.itemsize),
        Held("adapters", "gradients", (max(sizes) if config.clip == "layer" else total) * wide.itemsize),
        Held("adapters", "moments", 2 * total * wide.itemsize),
        *([Held("adapters", "compute copies", copies * compute.itemsize)] if copies else []),
        Held("adapters", "file being saved and read back", 2 * total * torch.float32.itemsize),
    ]
