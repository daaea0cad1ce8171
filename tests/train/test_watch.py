"""Looking at a model on the way: what is measured is right, what it answers is what `generate` says, and the memory for
it is in the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from oracles import families, hf
from oracles.engine import make_config, open_pipeline
from train.standin import Recorder, Standin, loop_of, rows_of

from quatrain.config import GenerateConfig, InstructConfig, TrainOptions
from quatrain.data.row import IGNORE, Row
from quatrain.memory.arena import Arena
from quatrain.model import decoder
from quatrain.model.adapters import PREFIX, module_name
from quatrain.model.generation_bytes import generation_bytes
from quatrain.train.pipeline import InstructPipeline
from quatrain.train.watch import SAMPLE_TOKENS, SamplePrompt, Watch, sample_prompts

VARIANT = families.BY_NAME["llama-bias"]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize("clip", ["global", "layer", "none"])
def test_norms_are_those_of_each_layer(tmp_path: Path, clip: str) -> None:
    config = make_config(clip=clip, max_grad_norm=0.1, learning_rate=1e-2, compute_dtype="fp64")
    pipeline = open_pipeline(VARIANT, tmp_path, config)
    rows = hf.make_rows([6, 13, 9], families.VOCAB, seed=4)
    assert all(math.isnan(norm) for norm in pipeline.layer_norms()[1])  # no step yet
    gradients = pipeline.loss_and_gradients(rows)[1]
    result = pipeline.train_step(rows)
    changes, norms = pipeline.layer_norms()
    named = pipeline.adapters.named()
    for layer in range(3):
        own = [gradient for name, gradient in gradients.items() if f"layers.{layer}." in name]
        squares = sum(float(gradient.double().square().sum()) for gradient in own)
        assert norms[layer] == pytest.approx(squares**0.5, rel=1e-6)
        moved = 0.0
        for at, linear in pipeline.adapters.modules:
            if at == layer:
                base = PREFIX + module_name(layer, linear)
                product = named[f"{base}.lora_B.weight"].double() @ named[f"{base}.lora_A.weight"].double()
                moved += float((config.lora_scale * product).square().sum())
        assert changes[layer] == pytest.approx(moved**0.5, rel=1e-9) and changes[layer] > 0
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(result.grad_norm, rel=1e-6)
    pipeline.adapters.initialise(0)
    assert pipeline.layer_norms()[0] == [0.0] * 3  # B is zero


def test_prompts_are_the_rows_up_to_what_is_learned() -> None:
    rows = [
        Row((0, 1), (0, 1), "all learned:1"),
        Row((0, 1, 2, 3, 4, 5), (IGNORE, IGNORE, 2, 3, IGNORE, 5), "two answers:2"),
        Row((0, 1), (IGNORE, IGNORE), "nothing learned:3"),
        Row((7, 8), (IGNORE, 8), "short:4"),
        Row((7, 9), (IGNORE, 9), "one too many:5"),
    ]
    prompts = sample_prompts(rows, Letters(), 2)  # type: ignore[arg-type]
    assert prompts == [SamplePrompt((0, 1), "two answers:2", "ab", "cd"), SamplePrompt((7,), "short:4", "h", "i")]
    assert sample_prompts(rows, Letters(), 0) == []  # type: ignore[arg-type]


class Watched(Standin):
    """A stand-in with layers and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[int] = []
        self.asked: list[Sequence[int]] = []
        self.breaks = False

    def layer_norms(self) -> tuple[list[float], list[float]]:
        assert self.unread == 0, "measured while a later step may be running"
        self.measured.append(int(self.counter))
        return [1.0, 2.0], [float("nan"), 1 / 3]

    def generate_ids(self, prompts: Sequence[Sequence[int]], config: GenerateConfig) -> list[list[int]]:
        if self.breaks:
            raise ValueError("no memory")
        assert config.temperature == 0 and config.max_new_tokens == SAMPLE_TOKENS
        self.asked += prompts
        return [[ids[0], 1] for ids in prompts]

    def peak_bytes(self) -> int:
        return 7


def watched_run(folder: Path, pipeline: Watched, **options: Any) -> tuple[list[dict[str, Any]], Recorder]:
    reporter = Recorder()
    loop = loop_of(folder, pipeline, TrainOptions(**options), reporter=reporter)
    prompts = sample_prompts(rows_of(4), Letters(), 2)  # type: ignore[arg-type]
    loop.watch = Watch(pipeline, prompts, Letters(), loop.length.total_steps, reporter.warning)  # type: ignore[arg-type]
    loop.run()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], reporter


@pytest.mark.parametrize("in_flight", [0, 1])
def test_measured_at_evaluations_and_twenty_times_a_run(tmp_path: Path, in_flight: int) -> None:
    pipeline = Watched()
    pipeline.steps_in_flight = in_flight
    lines, _ = watched_run(tmp_path, pipeline, max_steps=60, eval_every=25)
    due = sorted({*range(3, 61, 3), 25, 50})
    assert pipeline.measured == [line["step"] for line in lines if "adapter_norms" in line] == due
    measured = next(line for line in lines if "adapter_norms" in line)
    assert measured["loss"] and measured["adapter_norms"] == [1.0, 2.0]
    assert measured["grad_norms"] == [None, 0.33333] and measured["peak_memory_bytes"] == 7
    answered = [line for line in lines if "samples" in line]
    assert [line["step"] for line in answered] == [25, 50, 60] and all("eval_loss" in line for line in answered)
    assert answered[0]["samples"] == ["ab", "bb"] and len(pipeline.asked) == 6


def test_answers_that_cannot_be_had_are_told_once(tmp_path: Path) -> None:
    pipeline = Watched()
    pipeline.breaks = True
    lines, reporter = watched_run(tmp_path, pipeline, max_steps=4, eval_every=1)
    assert lines[-1]["eval_loss"] and not any("samples" in line for line in lines)
    assert reporter.warnings == ["no sample answers any more: no memory"]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_the_plan_holds_what_an_answer_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: families.Variant, kernels: str
) -> None:
    """The arenas of a decoder and its logits, which are there together, are within the plan's bound, and most of it."""
    pipeline = open_pipeline(variant, tmp_path, make_config(compute_dtype="bf16", kernels=kernels))
    taken: list[int] = []

    class Counted(Arena):
        def __init__(self, slots: Any, *more: Any) -> None:
            super().__init__(slots, *more)
            taken.append(self.nbytes)

    monkeypatch.setattr(decoder, "Arena", Counted)
    tokens = 20 if variant.name == "llama-rope-dynamic" else 60
    pipeline.generate_ids([list(range(tokens - 2))], GenerateConfig(max_new_tokens=2))
    steps, *prompts = [size for size in taken if size]  # dynamic rope runs a row again when it grows
    bound = bound_of(pipeline, tokens=tokens)
    assert steps + max(prompts) <= bound <= 1.2 * (steps + max(prompts)) + 8192


def bound_of(pipeline: InstructPipeline, tokens: int) -> int:
    ranks = {linear: pipeline.config.lora_rank for _, linear in pipeline.adapters.modules}
    layout = pipeline.layout
    return generation_bytes(
        pipeline.spec, ranks, layout.compute_dtype, layout.backend,
        quantised=pipeline.config.quantize == "nf4", tokens=tokens,
    )  # fmt: skip


def test_an_answer_has_its_place_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `checkpoint=auto` leaves room for it: one byte less of a budget keeps one block less."""
    from quatrain.engine.setup import choose_layout

    monkeypatch.setattr("quatrain.engine.setup.resident_bytes", lambda: 0)
    pipeline = open_pipeline(VARIANT, tmp_path, make_config())
    config: InstructConfig = pipeline.config
    without = choose_layout(pipeline.spec, config)
    layout = choose_layout(pipeline.spec, config, sample_tokens=40)
    groups = layout.plan.groups()
    assert groups["samples"] == bound_of(pipeline, tokens=40)
    assert layout.plan.total_bytes == without.plan.total_bytes + groups["samples"]
    tight = config.model_copy(update={"memory_budget": layout.plan.total_bytes - 1})
    assert choose_layout(pipeline.spec, tight).first_kept == layout.first_kept == 0
    assert choose_layout(pipeline.spec, tight, sample_tokens=40).first_kept == 1
