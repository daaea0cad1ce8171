"""Text generation, as token ids: sampling, end tokens, limits, and groups of rows that share each step.

What a row becomes does not depend on the rows beside it: nothing is padded, and each row draws from a generator of its
own, seeded by `config.seed` and the row's number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from quatrain.config import GenerateConfig
from quatrain.errors import DataError
from quatrain.model.decoder import Decoder, cache_bytes, position_limit
from quatrain.model.params import ModelParams

CACHE_BYTES = 256 << 20
"""Rows are decoded together as long as their keys and values stay near this size."""

Finish = Literal["end", "stop", "length", "positions"]
StopWhen = Callable[[Sequence[int]], bool]


@dataclass
class Generation:
    """One row: the new ids (the end token left out), and why it ended: an end token, `stop_when`, `max_new_tokens`, or
    the model's last position."""

    prompt: list[int]
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None


class TokenSource(Protocol):
    """What continues a group of rows, one token a row at a time."""

    params: ModelParams

    def holds(self, lengths: Sequence[int], slots: int) -> bool:
        """Whether prompts of these lengths, each of which may grow to `slots` tokens, make one group."""

    def begin(self, rows: Sequence[Generation], config: GenerateConfig, slots: int) -> list[int]:
        """Forgets the rows before; the token after each prompt. Raises PlanError when there is no room."""

    def advance(self) -> list[int]:
        """The next token of each row."""

    def drop(self, index: int) -> None:
        """Row `index` is done: the last row takes its place."""


class HostSampling:
    """Tokens picked on the host from a decoder's logits, with each row's own generator."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.params = decoder, decoder.params
        self._rows: list[Generation] = []

    def holds(self, lengths: Sequence[int], slots: int) -> bool:
        small = cache_bytes(self.params, slots * len(lengths)) <= CACHE_BYTES
        return small and self._decoder.fits(lengths, slots)

    def begin(self, rows: Sequence[Generation], config: GenerateConfig, slots: int) -> list[int]:
        self._rows, self._config = list(rows), config
        return self._pick(self._decoder.start([row.prompt for row in rows], slots))

    def advance(self) -> list[int]:
        return self._pick(self._decoder.step([row.ids[-1] for row in self._rows]))

    def drop(self, index: int) -> None:
        self._decoder.drop(index)
        self._rows[index] = self._rows[-1]
        self._rows.pop()

    def _pick(self, logits: torch.Tensor) -> list[int]:
        with self._decoder.running():
            return [pick(scores, self._config, row.generator) for row, scores in zip(self._rows, logits, strict=True)]


def generate(
    decoder: Decoder | TokenSource,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    *,
    end_ids: Collection[int] = (),
    stop_when: StopWhen | None = None,
) -> list[Generation]:
    """Continues every prompt. `end_ids` are the end tokens of model and template; `stop_when` looks at a row's new ids.

    Raises DataError for a prompt that is empty, has ids outside the vocabulary, or fills all positions of the model."""
    source = _source(decoder)
    rows = [_row(source, number, prompt, config) for number, prompt in enumerate(prompts)]
    for group in _groups(source, rows, config):
        for _ in _decode(source, group, config, frozenset(end_ids), stop_when):
            pass
    return rows


def stream(
    decoder: Decoder | TokenSource, prompt: Sequence[int], config: GenerateConfig, *, end_ids: Collection[int] = ()
) -> Iterator[int]:
    """New ids of one prompt, each as soon as it is known. Raises as `generate`."""
    source = _source(decoder)
    row = _row(source, 0, prompt, config)
    for _ in _decode(source, [row], config, frozenset(end_ids), None):
        if row.finish != "end":
            yield row.ids[-1]


def pick(logits: torch.Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """One token id from logits [V]: the likeliest at temperature 0, else a draw among top-k and top-p."""
    if config.temperature == 0:
        return int(logits.argmax())
    scores, order = (logits.double() / config.temperature).sort(descending=True, stable=True)
    if config.top_k:
        scores = scores[: config.top_k]
    probabilities = scores.softmax(-1)
    # The smallest set with mass top_p: a token stays while those before it have not reached top_p.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities[before < config.top_p]
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _source(decoder: Decoder | TokenSource) -> TokenSource:
    return HostSampling(decoder) if isinstance(decoder, Decoder) else decoder


def _row(source: TokenSource, number: int, prompt: Sequence[int], config: GenerateConfig) -> Generation:
    spec, limit = source.params.spec, position_limit(source.params.spec)
    bad = next((i for i in prompt if not 0 <= i < spec.vocab_size), None)
    if bad is not None:
        raise DataError(f"prompt {number}: token id {bad} is outside the embedding's {spec.vocab_size} rows")
    if not prompt:
        raise DataError(f"prompt {number}: it has no tokens", hint="start with the BOS token, or with some text")
    if len(prompt) >= limit:
        raise DataError(
            f"prompt {number}: {len(prompt)} tokens leave no room in the model's {limit} positions",
            hint="shorten the prompt, or drop the oldest turns of the chat",
        )
    return Generation(list(prompt), torch.Generator().manual_seed(config.seed + number))


def _slots(source: TokenSource, row: Generation, config: GenerateConfig) -> int:
    return min(len(row.prompt) + config.max_new_tokens, position_limit(source.params.spec))


def _groups(source: TokenSource, rows: list[Generation], config: GenerateConfig) -> Iterator[list[Generation]]:
    """Consecutive rows that the source holds together, all at the size of the longest."""
    group: list[Generation] = []
    longest = 0
    for row in rows:
        longest = max(longest, _slots(source, row, config))
        if group and not source.holds([len(other.prompt) for other in (*group, row)], longest):
            yield group
            group, longest = [], _slots(source, row, config)
        group.append(row)
    if group:
        yield group


def _decode(
    source: TokenSource,
    rows: list[Generation],
    config: GenerateConfig,
    end_ids: frozenset[int],
    stop_when: StopWhen | None,
) -> Iterator[None]:
    """One step of all unfinished rows at a time, until every row has its `finish`."""
    limit = position_limit(source.params.spec)
    active = list(rows)
    tokens = source.begin(active, config, max(_slots(source, row, config) for row in active))
    while active:
        for row, token in zip(active, tokens, strict=True):
            _extend(row, token, config, limit, end_ids, stop_when)
        yield
        for i in reversed(range(len(active))):
            if active[i].finish is not None:
                source.drop(i)
                active[i] = active[-1]
                active.pop()
        if active:
            tokens = source.advance()


def _extend(
    row: Generation,
    token: int,
    config: GenerateConfig,
    limit: int,
    end_ids: frozenset[int],
    stop_when: StopWhen | None,
) -> None:
    if token in end_ids:
        row.finish = "end"
        return
    row.ids.append(token)
    if stop_when is not None and stop_when(row.ids):
        row.finish = "stop"
    elif len(row.ids) == config.max_new_tokens:
        row.finish = "length"
    elif len(row.prompt) + len(row.ids) == limit:
        row.finish = "positions"
