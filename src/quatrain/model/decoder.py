"""Next-token logits with a key/value cache: the block of training, with another attention behind the same call.

Legend: B rows, T tokens of the packed stream, S slots a row of the cache, Hk key/value heads, D head_dim, V vocabulary.

Prompts run packed, without padding, and leave their keys and values in the cache; from then on every row adds one
token a step, and each weight is dequantised once a step for all rows. Windowed layers keep all keys and look at the
last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.model.block import Stream, block_forward
from quatrain.model.params import ModelParams
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import ModelSpec
from quatrain.model.workspace import intermediate_slots, intermediates, op_sizes
from quatrain.ops.attention.cached import cached_attention_forward
from quatrain.ops.linear_lora import Linear
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.select import Backend, Ops

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
    """The cache of a group of rows, and the forward that fills and reads it. Dropout is never on."""

    def __init__(self, params: ModelParams, backend: Backend) -> None:
        self.params, self._backend = params, backend
        self._spec, self._dtype = params.spec, params.embed.dtype
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._rows: list[list[int]] = []
        self._keys: list[torch.Tensor] = []  # a layer each: [B, S, Hk, D]
        self._values: list[torch.Tensor] = []

    def start(self, prompts: Sequence[Sequence[int]], slots: int) -> torch.Tensor:
        """Forgets the rows before; logits [B, V] of the token after each prompt. A row may grow to `slots` tokens."""
        spec = self._spec
        self._rows = [list(prompt) for prompt in prompts]
        shape = (len(prompts), slots, spec.num_kv_heads, spec.head_dim)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=self._dtype) for _ in range(spec.num_layers)] for _ in range(2)
        )
        with self._backend.running():
            return self._prefill()

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Adds one token to each row; logits [B, V] of the next."""
        with self._backend.running():
            return self._step(tokens)

    def _step(self, tokens: Sequence[int]) -> torch.Tensor:
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        if self._spec.rope.kind == "dynamic" and max(map(len, self._rows)) > self._spec.rope.original_max_position:
            return self._prefill()  # the frequencies of all positions change with the length: no key stays valid
        lengths = torch.tensor([len(row) for row in self._rows])
        ids, places = torch.tensor(tokens), torch.arange(len(tokens))

        def attention(layer: int, _: Ops) -> Attention:
            keys, values = self._keys[layer], self._values[layer]

            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                cu_seqlens: Sequence[int], scale: float, window: int | None,
            ) -> None:  # fmt: skip
                keys[places, lengths - 1], values[places, lengths - 1] = k, v
                cached_attention_forward(out, q, keys, values, lengths, scale, window)

            return attend

        return self._forward(ids, lengths - 1, list(range(len(tokens) + 1)), attention)

    def drop(self, index: int) -> None:
        """Row `index` is done: the last row takes its place."""
        last = len(self._rows) - 1
        self._rows[index] = self._rows[last]
        self._rows.pop()
        for cache in (self._keys, self._values):
            for layer, tensor in enumerate(cache):
                tensor[index] = tensor[last]
                cache[layer] = tensor[:last]

    def _prefill(self) -> torch.Tensor:
        """Runs all rows from their first token; their keys and values go to the cache."""
        return torch.cat([self._prefill_rows(part) for part in _parts([len(row) for row in self._rows])])

    def _prefill_rows(self, part: range) -> torch.Tensor:
        rows = [self._rows[i] for i in part]
        bounds = [0, *accumulate(map(len, rows))]
        ids = torch.tensor([token for row in rows for token in row])
        positions = torch.cat([torch.arange(len(row)) for row in rows])

        def attention(layer: int, ops: Ops) -> Attention:
            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object
            ) -> None:
                for i, a, b in zip(part, bounds[:-1], bounds[1:], strict=True):
                    self._keys[layer][i, : b - a] = k[a:b]
                    self._values[layer][i, : b - a] = v[a:b]
                ops.attention_forward(out, lse, q, k, v, *rest)

            return attend

        return self._forward(ids, positions, bounds, attention)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, bounds: list[int], attention: Callable[[int, Ops], Attention]
    ) -> torch.Tensor:
        """Logits [rows, V] at each row's last token; `attention(layer, ops)` takes the place of the op."""
        params, spec, tokens = self.params, self._spec, len(ids)
        arena = Arena(self._slots(tokens, max(end - start for start, end in pairwise(bounds))))
        ops = self._backend.bind(arena["op scratch"])
        x, out, final = arena["x"], arena["out"], arena["final"]
        stream = Stream(ops, spec, bounds, arena["cos"], arena["sin"], None)
        self._rope_tables(stream, positions)
        ops.embedding_forward(x, ids, params.embed)
        saved = intermediates(arena, "generate", tokens, spec)
        for layer, block in enumerate(params.blocks):
            with_cache = replace(stream, ops=replace(ops, attention_forward=attention(layer, ops)))
            block_forward(out, x, saved, block, with_cache, spec.windows[layer])
            arena.release(saved.tensors())
            x, out = out, x
        ops.rms_norm_forward(final, arena["final_rstd"], x, params.final_norm, spec.rms_norm_eps)
        last = final[[end - 1 for end in bounds[1:]]]
        logits = last.new_empty(len(last), spec.vocab_size)
        ops.linear_lora_forward([logits], [None], last, [Linear(params.head)], None)
        return logits.to(self._wide)

    def _rope_tables(self, s: Stream, positions: torch.Tensor) -> None:
        """cos and sin of the stream. Dynamic frequencies go by each row's length; cached steps are all below the length
        where that begins to matter."""
        for start, end in pairwise(s.cu_seqlens):
            inv_freq, scaling = inverse_frequencies(self._spec.rope, end - start)
            part = slice(start, end)
            s.ops.rope_tables(s.cos[part], s.sin[part], positions[part], inv_freq, scaling)

    def _slots(self, tokens: int, longest_row: int) -> list[Slot]:
        spec, dtype, wide = self._spec, self._dtype, self._wide
        linears = [linear for block in self.params.blocks for linear in block.linears.values()]
        ranks = {
            name: linear.lora.rank
            for block in self.params.blocks
            for name, linear in block.linears.items()
            if linear.lora is not None
        }
        sizes = op_sizes(
            spec, tokens=tokens, longest_row=longest_row, rank=max(ranks.values(), default=0),
            quantised=any(isinstance(linear.weight, Nf4Tensor) for linear in linears), dropout=False, head_chunk=1,
            dtype=dtype,
        )  # fmt: skip
        return [
            *[Slot("generate", name, (tokens, spec.hidden_size), dtype) for name in ("x", "out", "final")],
            Slot("generate", "final_rstd", (tokens,), wide),
            *[Slot("generate", name, (tokens, spec.rope.rotary_dim // 2), wide) for name in ("cos", "sin")],
            Slot("generate", "op scratch", (self._backend.scratch_bytes(sizes),), torch.uint8),
            *intermediate_slots(spec, ranks, tokens, dtype, wide, "generate", "generate"),
        ]


def _parts(lengths: list[int]) -> Iterator[range]:
    """Consecutive rows that together have about PREFILL_TOKENS tokens."""
    start = total = 0
    for i, length in enumerate(lengths):
        if i > start and total + length > PREFILL_TOKENS:
            yield range(start, i)
            start, total = i, 0
        total += length
    yield range(start, len(lengths))
