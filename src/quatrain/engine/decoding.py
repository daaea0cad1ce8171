"""Text generation on a GPU: the key/value cache lies in the memory of a training step, which is idle meanwhile, and a
token for every row is one captured step.

Legend: B rows, S tokens that a row may grow to, T tokens of the packed prompts, H hidden, V vocabulary.

Prompts run packed, filled up to a bucket, and leave their keys and values in the cache. A step then reads from the
device where every row stands, adds the token that the step before it has chosen, and chooses the next: one captured
step serves all lengths up to S, and B and S come in buckets too. Prompts are not captured: each runs once.

The sampler is on the device, because a step needs the token of the one before: only token ids cross the bus, each to
a pinned slot of its own, and the host waits for that copy alone while the next step is already running. Where the
embedding is on the host, the next step waits for the token instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from quatrain.engine.device import Wait
from quatrain.engine.device_layout import TILE, head_slots
from quatrain.engine.graphs import StepKey
from quatrain.engine.streamed_head import streamed_head
from quatrain.errors import ConfigError, KernelError
from quatrain.memory.arena import bytes_of
from quatrain.memory.plan import Slot
from quatrain.model.block import Stream
from quatrain.model.decoder import (
    Attention,
    cache_slots,
    decoding_sizes,
    forward_slots,
    prefill_parts,
    require_room,
    run_blocks,
)
from quatrain.model.rope import inverse_frequencies
from quatrain.ops.attention import RowBounds
from quatrain.ops.linear_lora import Linear
from quatrain.ops.select import Ops
from quatrain.ops.triton_sizes import CACHE_PART

if TYPE_CHECKING:
    from quatrain.config import GenerateConfig
    from quatrain.engine.step import StepEngine
    from quatrain.model.generate import Generation

MOST_ROWS = 64
"""Rows that are decoded together, at most."""
PROMPT = "prompt."
"""The prefix of the slots that only prompts use."""


class DeviceDecoder:
    """A `model.generate.TokenSource` in the memory of an engine. A step of the engine ends a generation that is still
    going on: its next token raises KernelError."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine, self.params, self._backend = engine, engine.params, engine.layout.backend
        self._spec, self._dtype = engine.params.spec, engine.layout.compute_dtype
        self._device = engine.device
        self._embed_on_host, self._head_tile = engine.layout.embed_on_host, engine.layout.head_tile
        self._host = torch.empty((2, MOST_ROWS), dtype=torch.int64, pin_memory=self._device.pinned)

    def holds(self, lengths: Sequence[int], slots: int) -> bool:
        return len(lengths) <= MOST_ROWS and self._engine.arena.could_lend(self._slots(lengths, slots))

    def begin(self, rows: Sequence[Generation], config: GenerateConfig, slots: int) -> list[int]:
        prompts = [row.prompt for row in rows]
        self._require_fixed_frequencies(slots)
        self._shape = _rows_bucket(len(rows)), _slots_bucket(slots)
        wanted = self._slots([len(prompt) for prompt in prompts], slots)
        if not self._engine.arena.could_lend(wanted):
            require_room(bytes_of(wanted), self._engine.arena.nbytes, slots)
        with self._engine.running():
            self._arena = self._engine.lend_arena(wanted, self)
            self._prompt_ops, self._ops = (
                self._backend.bind(self._arena[f"{prefix}op scratch"]) for prefix in (PROMPT, "")
            )
            self._places = list(range(len(rows)))
            self._sent: deque[tuple[torch.Tensor, Wait]] = deque()
            self._steps = 0
            self._set_rows(rows, config)
            self._prefill(prompts)
            self._send()
        if not self._embed_on_host:
            self._launch(None)
        return self._receive()

    def advance(self) -> list[int]:
        if not self._engine.lends_to(self):
            raise KernelError(
                "a training or evaluation step ran while text was being generated, in the same memory",
                hint="finish a generation before the next step",
            )
        self._launch(self._known)
        return self._receive()

    def drop(self, index: int) -> None:
        place = self._places[index]
        self._places[index] = self._places[-1]
        self._places.pop()
        if self._engine.lends_to(self):
            with self._engine.running():
                for name in ("alive", "lengths"):
                    self._arena[name][place].zero_()

    # Between host and device.

    def _set_rows(self, rows: Sequence[Generation], config: GenerateConfig) -> None:
        """What the steps read: where each row stands, its draws, how to sample. The rest of a bucket has no tokens."""
        rows_bucket, slots = self._shape
        lengths, alive = torch.zeros(rows_bucket, dtype=torch.int64), torch.zeros(rows_bucket, dtype=torch.int64)
        draws = torch.zeros(rows_bucket, slots)
        for place, row in enumerate(rows):
            n = len(row.prompt)
            lengths[place], alive[place] = n, 1
            draws[place, n - 1 :] = torch.rand(slots - n + 1, generator=row.generator)
        sampling = torch.tensor([config.temperature, config.top_k, config.top_p])
        frequencies, self._scaling = inverse_frequencies(self._spec.rope, 0)
        values = {"lengths": lengths, "alive": alive, "draws": draws, "sampling": sampling, "frequencies": frequencies}
        for name, value in values.items():
            self._upload(name, value)

    def _upload(self, slot: str, values: torch.Tensor) -> torch.Tensor:
        """The head of a slot =, by way of pinned memory, which torch keeps until the copy is done."""
        staged = torch.empty(values.shape, dtype=self._arena[slot].dtype, pin_memory=self._device.pinned)
        staged.copy_(values)
        return self._arena[slot][: len(values)].copy_(staged, non_blocking=True)

    def _launch(self, tokens: list[int] | None) -> None:
        """A step. `tokens` [B] are the ones that it adds, where the host has to look up their embedding."""
        with self._engine.running():
            if self._embed_on_host and tokens is not None:
                self._upload("x", self.params.embed[torch.tensor(tokens)])
            self._engine.run(StepKey(*self._shape, 1, "decode"), self._step)
            self._send()

    def _send(self) -> None:
        """The tokens that were chosen last, to the host, behind the step."""
        chosen = self._arena["ids"]
        sent = self._host[self._steps % 2, : len(chosen)]
        self._steps += 1
        sent.copy_(chosen, non_blocking=True)
        self._sent.append((sent, self._device.mark()))

    def _receive(self) -> list[int]:
        """The oldest tokens that were sent, of the rows that are not done."""
        sent, wait = self._sent.popleft()
        wait()
        self._known = sent.tolist()
        return [self._known[place] for place in self._places]

    # Work on the device. A step is captured: it reads nothing on the host.

    def _step(self) -> None:
        arena, ops, (rows, _) = self._arena, self._ops, self._shape
        lengths, positions = arena["lengths"], arena["positions"]
        lengths.add_(arena["alive"])
        torch.sub(lengths, 1, out=positions)
        positions.clamp_(min=0)
        ops.rope_tables(arena["cos"], arena["sin"], positions, arena["frequencies"], self._scaling)
        if not self._embed_on_host:
            ops.embedding_forward(arena["x"], arena["ids"], self.params.embed)

        def attention(layer: int) -> Attention:
            keys, values = arena[f"keys.{layer}"], arena[f"values.{layer}"]

            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                bounds: object, scale: float, window: int | None,
            ) -> None:  # fmt: skip
                ops.cached_attention_forward(out, q, k, v, keys, values, lengths, scale, window)

            return attend

        few = replace(ops, linear_lora_forward=ops.linear_lora_decode)
        stream = Stream(few, self._spec, (), arena["cos"], arena["sin"], None)
        self._choose(few, run_blocks(self.params, arena, "", stream, rows, attention))

    def _choose(self, ops: Ops, final: torch.Tensor) -> None:
        """ids [B] = the next tokens from the final norm's output [B, H]."""
        arena, logits = self._arena, self._arena["logits"]
        if self._head_tile:
            tiles = [arena[f"head tile.{i}"] for i in range(2)]
            for first, tile in streamed_head(self.params.head, tiles, self._device).tiles():
                torch.mm(final, tile.T, out=logits[:, first : first + len(tile)])
        else:
            ops.linear_lora_forward([logits], [None], final, [Linear(self.params.head)], None)
        ops.sample_tokens(arena["ids"], arena["logits"], arena["draws"], arena["lengths"], arena["sampling"])

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Runs all prompts; their keys and values go to the cache, and `ids` are their next tokens."""
        last = self._arena["last"]
        last.zero_()  # of the bucket's rows that are none
        for part in prefill_parts([len(prompt) for prompt in prompts]):
            self._prefill_part(last[part.start : part.stop], part, [prompts[i] for i in part])
        self._choose(replace(self._ops, linear_lora_forward=self._ops.linear_lora_decode), last)

    def _prefill_part(self, last: torch.Tensor, part: range, prompts: list[Sequence[int]]) -> None:
        """last [rows, H] = the final norm's output at each prompt's last token."""
        arena, ops, ends = self._arena, self._prompt_ops, list(accumulate(map(len, prompts)))
        tokens, starts = _tokens_bucket(ends[-1]), [0, *ends[:-1]]

        def filled(name: str, values: Sequence[int]) -> torch.Tensor:
            return self._upload(f"{PROMPT}{name}", torch.tensor([*values, *[0] * (tokens - len(values))]))

        ids = [token for prompt in prompts for token in prompt]
        positions = filled("positions", [i for prompt in prompts for i in range(len(prompt))])
        bounds = RowBounds.of([0, *ends], tokens)
        rows = RowBounds(self._upload(f"{PROMPT}start", bounds.start), self._upload(f"{PROMPT}end", bounds.end))
        x, cos, sin = (arena[f"{PROMPT}{name}"][:tokens] for name in ("x", "cos", "sin"))
        ops.rope_tables(cos, sin, positions, arena["frequencies"], self._scaling)
        if self._embed_on_host:
            x.zero_()
            self._upload(f"{PROMPT}x", self.params.embed[torch.tensor(ids)])
        else:
            ops.embedding_forward(x, filled("ids", ids), self.params.embed)

        def attention(layer: int) -> Attention:
            keys, values = arena[f"keys.{layer}"], arena[f"values.{layer}"]

            def attend(
                out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object
            ) -> None:
                for i, a, b in zip(part, starts, ends, strict=True):
                    keys[i, : b - a].copy_(k[a:b])
                    values[i, : b - a].copy_(v[a:b])
                ops.attention_forward(out, lse, q, k, v, *rest)

            return attend

        stream = Stream(ops, self._spec, rows, cos, sin, None)
        final = run_blocks(self.params, arena, PROMPT, stream, tokens, attention)
        for i, end in enumerate(ends):
            last[i].copy_(final[end - 1])

    # Memory.

    def _slots(self, lengths: Sequence[int], slots: int) -> list[Slot]:
        """What steps use comes first, so that it lies at the same place whatever the prompts are."""
        rows, slots, wide = _rows_bucket(len(lengths)), _slots_bucket(slots), torch.float32
        tokens = max(_tokens_bucket(sum(lengths[i] for i in part)) for part in prefill_parts(lengths))
        sizes, prompt_sizes = (decoding_sizes(self.params, *s) for s in ((rows, slots), (tokens, tokens)))
        return [
            *[Slot("generation", name, (rows,), torch.int64) for name in ("ids", "lengths", "alive", "positions")],
            Slot("generation", "draws", (rows, slots), wide),
            Slot("generation", "sampling", (3,), wide),
            Slot("generation", "frequencies", (self._spec.rope.rotary_dim // 2,), wide),
            Slot("generation", "logits", (rows, self._spec.vocab_size), self._dtype),
            Slot("generation", "last", (rows, self._spec.hidden_size), self._dtype),
            *head_slots(self._head_tile, self._spec.hidden_size, self._dtype),
            *forward_slots(self.params, rows, self._backend.decode_scratch_bytes(sizes)),
            *cache_slots(self.params, rows, slots),
            *[Slot("generation", f"{PROMPT}{name}", (tokens,), torch.int64) for name in ("ids", "positions")],
            *[Slot("generation", f"{PROMPT}{name}", (tokens,), torch.int32) for name in ("start", "end")],
            *forward_slots(self.params, tokens, self._backend.scratch_bytes(prompt_sizes), PROMPT),
        ]

    def _require_fixed_frequencies(self, slots: int) -> None:
        rope = self._spec.rope
        if rope.kind == "dynamic" and slots > rope.original_max_position:
            raise ConfigError(
                f"dynamic rope beyond {rope.original_max_position} tokens: every step would run the whole row again, "
                f"and up to {slots} tokens were asked for",
                hint="use fewer --max-new-tokens, or --device cpu",
            )


def _rows_bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _slots_bucket(slots: int) -> int:
    """Whole parts of the cached attention, four sizes to each doubling."""
    grain = max(CACHE_PART, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // grain) * grain


def _tokens_bucket(tokens: int) -> int:
    """Whole tiles, four sizes to each doubling."""
    grain = max(TILE, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // grain) * grain
