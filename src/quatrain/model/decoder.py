"""Next-token logits with a key/value cache: the block of training, with another attention behind the same call.

Legend: B rows, T tokens of the packed stream, S slots a row of the cache, Hk key/value heads, D head_dim, V vocabulary.

Prompts run packed, without padding, and leave their keys and values in the cache; from then on every row adds one
token a step, through ops that read each weight once for all rows and give a row the same bits beside any others. A step
is a list of op calls on tensors that stay where they are: it is captured once and then repeated. Windowed layers keep
all keys and look at the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from quatrain.errors import PlanError
from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.model.block import Stream, block_forward
from quatrain.model.params import ModelParams
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import intermediate_slots, intermediates, op_sizes
from quatrain.ops.linear_lora import Linear
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.rope.reference import rope_tables
from quatrain.ops.select import Backend, Ops, Sizes

PREFILL_TOKENS = 2048
"""Prompts are packed into streams of about this many tokens."""

Attention = Callable[..., None]


def position_limit(spec: ModelSpec) -> int:
    """The longest row the model takes. Linear and dynamic rope scaling stretch the length in the configuration."""
    stretch = spec.rope.factor if spec.rope.kind in ("linear", "dynamic") else 1.0
    return int(spec.max_position_embeddings * stretch)


def cache_bytes(params: ModelParams, tokens: int) -> int:
    """Bytes of keys and values for `tokens` slots."""
    spec = params.spec
    return 2 * tokens * spec.num_layers * spec.num_kv_heads * spec.head_dim * params.embed.element_size()


class Decoder:
    """The cache of a group of rows, and the forward that fills and reads it. Dropout is never on.

    `room`: the bytes that it may take, cache and working memory together; None is no limit."""

    def __init__(self, params: ModelParams, backend: Backend, room: int | None = None) -> None:
        self.params, self._backend, self._room = params, backend, room
        self._spec, self._dtype = params.spec, params.embed.dtype
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._rows: list[list[int]] = []
        self._arena = Arena([])
        self._repeat: Callable[[], None] | None = None
        """The captured step for the present number of rows."""

    def running(self) -> AbstractContextManager[None]:
        """Around all work of a step, sampling included: torch and the kernels do not compete for cores meanwhile."""
        return self._backend.running()

    def start(self, prompts: Sequence[Sequence[int]], slots: int) -> torch.Tensor:
        """Forgets the rows before; logits [B, V] of the token after each prompt. A row may grow to `slots` tokens.
        Raises PlanError when that takes more than there is room for."""
        self._arena = Arena([])
        require_room(self.bytes_for([len(prompt) for prompt in prompts], slots), self._room, slots)
        self._rows = [list(prompt) for prompt in prompts]
        self._arena = Arena(self._step_slots(len(prompts), slots))
        self._repeat = None
        with self.running():
            self._rope_tables(self._arena["cos table"], self._arena["sin table"], torch.arange(slots), 1)
            return self._prefill()

    def fits(self, lengths: Sequence[int], slots: int) -> bool:
        """Whether there is room for prompts of these lengths that may grow to `slots` tokens each."""
        return self._room is None or self.bytes_for(lengths, slots) <= self._room

    def bytes_for(self, lengths: Sequence[int], slots: int) -> int:
        """What prompts of these lengths take that may grow to `slots` tokens each."""
        prefill = max(
            sum(slot.nbytes for slot in self._prefill_slots(sum(part), max(part)))
            for part in ([lengths[i] for i in rows] for rows in prefill_parts(lengths))
        )
        return prefill + sum(slot.nbytes for slot in self._step_slots(len(lengths), slots))

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Adds one token to each row; logits [B, V] of the next."""
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        with self.running():
            if self._spec.rope.kind == "dynamic" and max(map(len, self._rows)) > self._spec.rope.original_max_position:
                return self._prefill()  # the frequencies of all positions change with the length: no key stays valid
            arena, rows = self._arena, len(tokens)
            arena["ids"][:rows] = torch.tensor(tokens)
            arena["lengths"][:rows] = torch.tensor([len(row) for row in self._rows])
            for name in ("cos", "sin"):
                torch.index_select(arena[f"{name} table"], 0, arena["lengths"][:rows] - 1, out=arena[name][:rows])
            if self._repeat is None:
                self._repeat = self._backend.capture(arena["op scratch"], self._step)
            else:
                self._repeat()
            return arena["logits"][:rows].to(self._wide, copy=True)

    def drop(self, index: int) -> None:
        """Row `index` is done: the last row takes its place."""
        last = len(self._rows) - 1
        self._rows[index] = self._rows[last]
        self._rows.pop()
        for layer in range(self._spec.num_layers):
            for cache in self._cache(layer):
                cache[index] = cache[last]
        self._repeat = None

    def _step(self, ops: Ops) -> None:
        """The op calls of one step. Which rows and where they stand is in the arena."""
        arena, rows = self._arena, len(self._rows)

        def attention(layer: int) -> Attention:
            keys, values = (cache[:rows] for cache in self._cache(layer))

            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                cu_seqlens: Sequence[int], scale: float, window: int | None,
            ) -> None:  # fmt: skip
                ops.cached_attention_forward(out, q, k, v, keys, values, arena["lengths"][:rows], scale, window)

            return attend

        few = replace(ops, linear_lora_forward=ops.linear_lora_decode)
        stream = Stream(few, self._spec, range(rows + 1), arena["cos"][:rows], arena["sin"][:rows], None)
        final = self._blocks(arena, stream, arena["ids"][:rows], attention)
        few.linear_lora_forward([arena["logits"][:rows]], [None], final, [Linear(self.params.head)], None)

    def _cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, S, Hk, D]."""
        return self._arena[f"keys.{layer}"], self._arena[f"values.{layer}"]

    def _prefill(self) -> torch.Tensor:
        """Runs all rows from their first token; their keys and values go to the cache."""
        return torch.cat([self._prefill_rows(part) for part in prefill_parts([len(row) for row in self._rows])])

    def _prefill_rows(self, part: range) -> torch.Tensor:
        rows = [self._rows[i] for i in part]
        bounds = [0, *accumulate(map(len, rows))]
        arena = Arena(self._prefill_slots(bounds[-1], max(map(len, rows))))
        ops = self._backend.bind(arena["op scratch"])
        for a, b in pairwise(bounds):
            self._rope_tables(arena["cos"][a:b], arena["sin"][a:b], torch.arange(b - a), b - a)

        def attention(layer: int) -> Attention:
            keys, values = self._cache(layer)

            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object
            ) -> None:
                for i, a, b in zip(part, bounds[:-1], bounds[1:], strict=True):
                    keys[i, : b - a], values[i, : b - a] = k[a:b], v[a:b]
                ops.attention_forward(out, lse, q, k, v, *rest)

            return attend

        stream = Stream(ops, self._spec, bounds, arena["cos"], arena["sin"], None)
        final = self._blocks(arena, stream, torch.tensor([token for row in rows for token in row]), attention)
        last = final[[end - 1 for end in bounds[1:]]]
        logits = last.new_empty(len(last), self._spec.vocab_size)
        ops.linear_lora_forward([logits], [None], last, [Linear(self.params.head)], None)
        return logits.to(self._wide)

    def _blocks(
        self, arena: Arena, stream: Stream, ids: torch.Tensor, attention: Callable[[int], Attention]
    ) -> torch.Tensor:
        stream.ops.embedding_forward(arena["x"][: len(ids)], ids, self.params.embed)
        return run_blocks(self.params, arena, "", stream, len(ids), attention)

    def _rope_tables(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        """cos and sin for a row of `length` tokens. Only dynamic frequencies go by it, and cached steps end where they
        begin to differ from those of one token."""
        rope_tables(cos, sin, positions, *inverse_frequencies(self._spec.rope, length))

    def _step_slots(self, rows: int, slots: int) -> list[Slot]:
        """The memory of the steps of `rows` rows, cache included."""
        spec, wide, half = self._spec, self._wide, self._spec.rope.rotary_dim // 2
        scratch = self._backend.decode_scratch_bytes(decoding_sizes(self.params, rows, slots))
        return [
            *[Slot("generation", name, (rows,), torch.int64) for name in ("ids", "lengths")],
            *[Slot("generation", f"{name} table", (slots, half), wide) for name in ("cos", "sin")],
            Slot("generation", "logits", (rows, spec.vocab_size), self._dtype),
            *forward_slots(self.params, rows, scratch),
            *cache_slots(self.params, rows, slots),
        ]

    def _prefill_slots(self, tokens: int, longest_row: int) -> list[Slot]:
        return forward_slots(
            self.params, tokens, self._backend.scratch_bytes(decoding_sizes(self.params, tokens, longest_row))
        )


def require_room(needed: int, room: int | None, slots: int) -> None:
    """Raises PlanError when generating needs more bytes than there is room for."""
    if room is not None and needed > room:
        raise PlanError(
            f"generating up to {slots} tokens needs {needed / 1e6:.0f} MB, the plan leaves {max(0, room) / 1e6:.0f} MB",
            hint="try fewer --max-new-tokens, a shorter prompt, or a larger --memory-budget",
        )


def run_blocks(
    params: ModelParams,
    arena: Arena,
    prefix: str,
    stream: Stream,
    tokens: int,
    attention: Callable[[int], Attention],
) -> torch.Tensor:
    """The final norm's output [T, H] from the embedded tokens in `x`, in the slots of `forward_slots`;
    `attention(layer)` takes the place of the op."""
    spec, ops = params.spec, stream.ops
    x, out, final = (arena[prefix + name][:tokens] for name in ("x", "out", "final"))
    saved = intermediates(arena, f"{prefix}block", tokens, spec)
    for layer, block in enumerate(params.blocks):
        with_cache = replace(stream, ops=replace(ops, attention_forward=attention(layer)))
        block_forward(out, x, saved, block, with_cache, spec.windows[layer])
        arena.release(saved.tensors())
        x, out = out, x
    ops.rms_norm_forward(final, arena[f"{prefix}final_rstd"][:tokens], x, params.final_norm, spec.rms_norm_eps)
    return final


def forward_slots(params: ModelParams, tokens: int, scratch_bytes: int, prefix: str = "") -> list[Slot]:
    """The memory of a forward over `tokens` tokens that keeps nothing; names begin with `prefix`."""
    spec, dtype = params.spec, params.embed.dtype
    wide = torch.promote_types(dtype, torch.float32)
    slots = [
        *[Slot("generation", name, (tokens, spec.hidden_size), dtype) for name in ("x", "out", "final")],
        Slot("generation", "final_rstd", (tokens,), wide),
        *[Slot("generation", name, (tokens, spec.rope.rotary_dim // 2), wide) for name in ("cos", "sin")],
        Slot("generation", "op scratch", (scratch_bytes,), torch.uint8),
        *intermediate_slots(spec, _ranks(params), tokens, dtype, wide, "generation", "block"),
    ]
    return [replace(slot, name=prefix + slot.name) for slot in slots]


def cache_slots(params: ModelParams, rows: int, slots: int) -> list[Slot]:
    """Keys and values [B, S, Hk, D] of every layer."""
    spec = params.spec
    shape = (rows, slots, spec.num_kv_heads, spec.head_dim)
    return [
        Slot("cache", f"{name}.{layer}", shape, params.embed.dtype)
        for layer in range(spec.num_layers)
        for name in ("keys", "values")
    ]


def decoding_sizes(params: ModelParams, tokens: int, longest_row: int) -> Sizes:
    """The largest sizes of ops without gradients."""
    linears = [linear for block in params.blocks for linear in block.linears.values()]
    return op_sizes(
        params.spec, tokens=tokens, longest_row=longest_row, rank=max(_ranks(params).values(), default=0),
        quantised=any(isinstance(linear.weight, Nf4Tensor) for linear in linears), dropout=False, head_chunk=1,
        dtype=params.embed.dtype,
    )  # fmt: skip


def _ranks(params: ModelParams) -> dict[str, int]:
    return {
        name: linear.lora.rank
        for block in params.blocks
        for name, linear in block.linears.items()
        if linear.lora is not None
    }


def prefill_parts(lengths: Sequence[int]) -> Iterator[range]:
    """Consecutive rows that together have about PREFILL_TOKENS tokens."""
    start = total = 0
    for i, length in enumerate(lengths):
        if i > start and total + length > PREFILL_TOKENS:
            yield range(start, i)
            start, total = i, 0
        total += length
    yield range(start, len(lengths))
