"""A few training steps of a small piece of a run's model, in its shapes, to tell how long the whole will take.

The piece is one or two of its layers with random weights and its micro-batches' own rows. Every op is timed; the sums
by part become the run's `Rates`. They are measured at each start and not kept: on a machine that does other work too
they are those of the moment, and kept ones from a busy hour told 12 minutes of a run that took 1:36.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from quatrain.bench.shapes import RandomWeights
from quatrain.config import InstructConfig
from quatrain.data.row import IGNORE, Row
from quatrain.engine.layout import Layout
from quatrain.errors import QuatrainError
from quatrain.model.adapters import match_targets
from quatrain.model.spec import ModelSpec
from quatrain.train.forecast import Rates
from quatrain.train.pipeline import InstructPipeline
from quatrain.train.workload import Load, training_flops

LAYERS, LEAST_TOKENS, REPEATS = 2, 32, 3
_TABLE = 1 << 22
"""Values of the embedding table at most: a larger vocabulary is cut, and the head's time scaled."""
_UPDATE = ("sum_squares", "clip_scale", "adamw_step")


@dataclass(frozen=True)
class Piece:
    """A small model in a run's shape, and rows like the run's."""

    spec: ModelSpec
    config: InstructConfig
    rows: list[Row]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def piece_of(spec: ModelSpec, config: InstructConfig, rows: Sequence[Row], most_flops: float) -> Piece:
    """Two layers, or one where two take more than `most_flops`, and as many of `rows` as do not."""
    linears = sorted({linear for _, linear in match_targets(spec, config.lora_targets)})
    vocab = min(spec.vocab_size, max(_TABLE // spec.hidden_size, 256))
    for layers in range(min(LAYERS, spec.num_layers), 0, -1):
        small = replace(
            spec, num_layers=layers, windows=spec.windows[:layers], vocab_size=vocab, tie_word_embeddings=True
        )
        one = config.model_copy(update={"lora_targets": linears, "checkpoint": "block", "memory_budget": None})
        per_token = training_flops(Load(1, 1, 0, dict.fromkeys(small.windows, 0.0)), small, one, layers).total
        limit = max(int(most_flops / per_token), LEAST_TOKENS)
        taken = _like(rows, vocab, limit)
        if sum(map(len, taken)) > LEAST_TOKENS:
            break
    sizes = {"micro_batch_tokens": sum(map(len, taken)), "max_seq_len": max(map(len, taken)), "cache": False}
    return Piece(small, one.model_copy(update=sizes), taken)


def _like(rows: Sequence[Row], vocab: int, limit: int) -> list[Row]:
    """Random rows as long, and as much supervised, as the first of `rows`; the last one is cut at `limit` tokens."""
    drawn, taken, left = random.Random(0), [], limit
    for row in rows:
        ids = tuple(drawn.randrange(vocab) for _ in range(min(len(row), left)))
        supervised = max(round(row.num_supervised * len(ids) / len(row)), 1)
        if len(ids) < 2:
            break
        taken.append(Row(ids, (*[IGNORE] * (len(ids) - supervised), *ids[len(ids) - supervised :])))
        left -= len(ids)
    return taken


def calibrate(piece: Piece, layout: Layout, seconds: float = 1.0) -> Rates:
    """The rates of a few training steps of the piece: as many as fit `seconds`, but two at least."""
    began = time.perf_counter()
    pipe = InstructPipeline.from_source(RandomWeights("of the run's layers", piece.spec), piece.config)
    pipe.train_micro_batches([piece.rows])
    pipe.profiler.enabled = True
    walls: list[float] = []
    while len(walls) < 2 or (len(walls) < REPEATS and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        pipe.train_micro_batches([piece.rows])
        walls.append(time.perf_counter() - start)
    rates = _rates(pipe, piece, walls)
    del pipe
    give_back()
    return rates


def give_back() -> None:
    """Returns the piece's memory to the system: the run that follows has planned without it."""
    gc.collect()  # the engine's closures form cycles
    with suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def _rates(pipe: InstructPipeline, piece: Piece, walls: list[float]) -> Rates:
    """By part with what lies between its ops; the update by its ops, which no part holds; the rest is `fixed`."""
    parts = {part: seconds / len(walls) for part, seconds in pipe.profiler.part_seconds.items() if part != "update"}
    update = sum(span.seconds for span in pipe.profiler.spans() if span.op in _UPDATE) / len(walls)
    layers, tokens = piece.spec.num_layers, piece.tokens
    supervised = sum(row.num_supervised for row in piece.rows)
    return Rates(
        forward=parts["forward"] / layers / tokens,
        recompute=parts["recompute"] / layers / tokens,
        backward=parts["backward"] / layers / tokens,
        head=parts["head and loss"] / supervised / piece.spec.vocab_size,
        other=(parts["embedding"] + parts["final norm"]) / tokens,
        update=update / pipe.adapters.num_parameters(),
        fixed=max(sum(walls) / len(walls) - sum(parts.values()) - update, 0.0),
        spread=max(walls) / min(walls),
        tokens=tokens,
    )


def rates_of(
    spec: ModelSpec, layout: Layout, config: InstructConfig, rows: Sequence[Row], *, most_flops: float
) -> Rates | None:
    """The rates of this machine as it is now, for this shape; None where none can be had: on a GPU, whose steps are not
    a sum of ops, and where not even the piece fits."""
    if layout.device != "cpu":
        return None
    try:
        return calibrate(piece_of(spec, config, rows, most_flops), layout)
    except QuatrainError:
        return None
