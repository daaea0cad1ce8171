"""Looking at a model while it trains: how far its layers have moved, and what it answers. Nothing here changes a bit of
the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from quatrain.config import GenerateConfig
from quatrain.data.row import IGNORE, Row
from quatrain.memory.process import peak_resident_bytes

if TYPE_CHECKING:
    from quatrain.data.tokenizer import Tokenizer

MEASUREMENTS = 20  # of a run, besides those at its evaluations
SAMPLE_TOKENS = 48


class Watched(Protocol):
    """What is asked of an engine; `InstructPipeline` is one."""

    def layer_norms(self) -> tuple[list[float], list[float]]: ...
    def generate_ids(self, prompts: Sequence[Sequence[int]], config: GenerateConfig) -> list[list[int]]: ...
    def peak_bytes(self) -> int: ...


@dataclass(frozen=True)
class SamplePrompt:
    """The start of a validation row up to its first learned token, and that learned part."""

    ids: tuple[int, ...]
    source: str
    prompt: str
    answer: str

    def as_json(self) -> dict[str, str]:
        return {"source": self.source, "prompt": self.prompt, "answer": self.answer}


def sample_prompts(rows: Sequence[Row], tokenizer: Tokenizer, number: int) -> list[SamplePrompt]:
    """Of the first `number` rows that have a prompt."""
    prompts: list[SamplePrompt] = []
    for row in rows:
        if len(prompts) == number:
            break
        learned = [at for at, label in enumerate(row.labels) if label != IGNORE]
        if not learned or learned[0] == 0:
            continue
        start = learned[0]
        end = next((at for at in range(start, len(row)) if row.labels[at] == IGNORE), len(row))
        texts = (tokenizer.decode(row.input_ids[a:b]) for a, b in ((0, start), (start, end)))
        prompts.append(SamplePrompt(tuple(row.input_ids[:start]), row.source, *texts))
    return prompts


def sample_tokens(prompts: Sequence[SamplePrompt]) -> int:
    """Of the longest prompt with its answer; 0 without prompts."""
    return max((len(prompt.ids) + SAMPLE_TOKENS for prompt in prompts), default=0)


class Watch:
    """Measures at evaluations and about `MEASUREMENTS` times a run; answers the prompts at evaluations. When an answer
    cannot be had, that is told once and no other is tried."""

    def __init__(
        self,
        pipeline: Watched,
        prompts: Sequence[SamplePrompt],
        tokenizer: Tokenizer,
        total_steps: int,
        warn: Callable[[str], None],
    ) -> None:
        self.pipeline, self.tokenizer, self.prompts, self._warn = pipeline, tokenizer, list(prompts), warn
        self.every = max(1, total_steps // MEASUREMENTS)

    def is_due(self, step: int) -> bool:
        """Whether to measure after `step`, evaluation or not: a function of the step alone, so that a resumed run
        measures where the unbroken one does."""
        return step % self.every == 0

    def measure(self) -> dict[str, Any]:
        """`adapter_norms`: of what the adapters add to each layer; `grad_norms`: of each layer's gradient in the last
        step, before clipping; null where it was not finite. `peak_memory_bytes` so far."""
        changes, gradients = self.pipeline.layer_norms()
        return {
            "adapter_norms": _short(changes),
            "grad_norms": _short(gradients),
            "peak_memory_bytes": self.pipeline.peak_bytes(),
        }

    def answers(self) -> dict[str, Any]:
        """`samples`: the likeliest answer to each prompt, cut after `SAMPLE_TOKENS` tokens. Empty without prompts."""
        if not self.prompts:
            return {}
        config = GenerateConfig(max_new_tokens=SAMPLE_TOKENS)
        try:  # one at a time: that is what the memory plan holds
            rows = [self.pipeline.generate_ids([prompt.ids], config)[0] for prompt in self.prompts]
        except Exception as error:  # noqa: BLE001 - a look at the model must not end its training
            self._warn(f"no sample answers any more: {error}")
            self.prompts = []
            return {}
        return {"samples": [self.tokenizer.decode(ids) for ids in rows]}


def peak_bytes(device: str) -> int:
    """The most memory that was taken so far of where the run is: of the GPU, or by this process."""
    if device == "cpu":
        return peak_resident_bytes()
    import torch

    return int(torch.cuda.max_memory_reserved())


def _short(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
