"""Greedy text with a key/value cache, without one, and by transformers: the same tokens, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import families, hf
from oracles.engine import every_kernels, make_config, open_oracle, open_pipeline

from quatrain.config import GenerateConfig
from quatrain.errors import DataError, PlanError
from quatrain.model import generate as generation
from quatrain.model.decoder import Decoder, position_limit
from quatrain.model.generate import generate, pick, stream
from quatrain.train.pipeline import InstructPipeline

NEW_TOKENS = 40
PROMPT_LENGTHS = [1, 4, 5, 11]  # one token, the window of four, one more, more than two windows


def prompts(lengths: list[int] = PROMPT_LENGTHS) -> list[list[int]]:
    return [list(row.input_ids) for row in hf.make_rows(lengths, families.VOCAB, seed=11)]


def greedy_by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    """The whole row through the model for each new token: no cache, no padding."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def greedy_without_cache(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(decoder.start([ids], len(ids))[0].argmax()))
    return ids[len(prompt) :]


def decoder_of(pipeline: InstructPipeline) -> Decoder:
    return Decoder(pipeline.engine.params, pipeline.layout.backend)


@torch.no_grad()
@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_cached_equals_uncached_equals_transformers(tmp_path: Path, variant: families.Variant) -> None:
    """K1, K2: token for token in fp32, past the window, past the length where dynamic rope changes its frequencies."""
    config = make_config()
    oracle = open_oracle(variant, config, fp64=False)
    pipeline = open_pipeline(variant, tmp_path, config)
    count = min(NEW_TOKENS, position_limit(pipeline.spec) - max(PROMPT_LENGTHS))
    ours = generate(decoder_of(pipeline), prompts(), GenerateConfig(max_new_tokens=count))
    for row in ours:
        assert row.ids == greedy_by_transformers(oracle, row.prompt, count), len(row.prompt)
        assert row.ids == greedy_without_cache(decoder_of(pipeline), row.prompt, count)
        assert row.finish in ("length", "positions")


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-mixed-windows"])
def test_a_second_turn_on_the_same_cache(tmp_path: Path, name: str) -> None:
    """K2: six tokens, a window of four and ten new ones; then a longer prompt that begins with all of these."""
    pipeline = open_pipeline(families.BY_NAME[name], tmp_path, make_config())
    decoder, config = decoder_of(pipeline), GenerateConfig(max_new_tokens=10)
    (prompt,) = prompts([6])
    for _ in range(2):
        (row,) = generate(decoder, [prompt], config)
        assert row.ids == greedy_without_cache(decoder_of(pipeline), prompt, 10)
        prompt = [*prompt, *row.ids, 7, 30, 7]


@torch.no_grad()
@pytest.mark.parametrize("kernels", every_kernels())
def test_every_instruction_set_says_what_transformers_says(tmp_path: Path, kernels: str) -> None:
    variant, config = families.BY_NAME["qwen3-mixed-windows"], make_config(kernels=kernels)
    oracle = open_oracle(variant, config, fp64=False)
    for row in generate(
        decoder_of(open_pipeline(variant, tmp_path, config)), prompts(), GenerateConfig(max_new_tokens=20)
    ):
        assert row.ids == greedy_by_transformers(oracle, row.prompt, 20), len(row.prompt)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", every_kernels()[1:])  # the order of torch's sums depends on the shape
def test_a_row_alone_has_the_same_logits(tmp_path: Path, kernels: str, dtype: str) -> None:
    """Bit for bit: packed, captured, after rows have left, and at every length."""
    pipeline = open_pipeline(families.BY_NAME["llama"], tmp_path, make_config(kernels=kernels, compute_dtype=dtype))
    together, rows = decoder_of(pipeline), prompts([3, 9, 1, 20])
    decoders = [decoder_of(pipeline) for _ in rows]
    logits = together.start(rows, 40)
    want = [decoder.start([row], 40) for decoder, row in zip(decoders, rows, strict=True)]
    for step in range(9):
        assert all(torch.equal(got, alone[0]) for got, alone in zip(logits, want, strict=True)), step
        if step in (3, 6):
            together.drop(0)
            decoders[0], want[0] = decoders[-1], want[-1]
            del decoders[-1], want[-1]
        tokens = [7 * step + i for i in range(len(want))]
        logits = together.step(tokens)
        want = [decoder.step([token]) for decoder, token in zip(decoders, tokens, strict=True)]


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_cached_logits_equal_full_ones(tmp_path: Path, variant: families.Variant) -> None:
    """K1: the logits of every step, with and without the cache."""
    pipeline = open_pipeline(variant, tmp_path, make_config(compute_dtype="fp64"))
    rows = prompts([3, 9])
    cached, full = decoder_of(pipeline), decoder_of(pipeline)
    logits = cached.start(rows, 20)
    for token in (7, 50, 9, 100, 3, 21):
        assert torch.allclose(logits, full.start(rows, 20), rtol=0, atol=1e-10)
        rows = [[*row, token] for row in rows]
        logits = cached.step([token, token])


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, in groups of a small cache, and sampled: the same ids; rows end at different times."""
    variant = families.BY_NAME["qwen3-mixed-windows"]
    pipeline = open_pipeline(variant, tmp_path, make_config())
    rows, ends = prompts([2, 7, 7, 3, 12, 5]), {5, 17, 29, 41, 53, 65, 77}
    for sampling in (GenerateConfig(max_new_tokens=20), GenerateConfig(max_new_tokens=20, temperature=1.5, top_k=50)):
        together = generate(decoder_of(pipeline), rows, sampling, end_ids=ends)
        assert len({len(row.ids) for row in together}) > 1
        monkeypatch.setattr(generation, "CACHE_BYTES", 40_000)
        assert [row.ids for row in generate(decoder_of(pipeline), rows, sampling, end_ids=ends)] == [
            row.ids for row in together
        ]
        monkeypatch.undo()
        alone = list(stream(decoder_of(pipeline), rows[0], sampling, end_ids=ends))
        assert alone == together[0].ids


def test_dropout_is_off_and_training_goes_on_as_before(tmp_path: Path) -> None:
    """I8: two greedy runs are equal with dropout 0.5, and generating between two steps changes no gradient."""
    variant = families.BY_NAME["llama"]
    rows = hf.make_rows([9, 5], families.VOCAB)
    pipeline = open_pipeline(variant, tmp_path, make_config(lora_dropout=0.5))
    plain = open_pipeline(variant, tmp_path, make_config())
    before = pipeline.loss_and_gradients(rows)[1]
    config = GenerateConfig(max_new_tokens=8)
    first = pipeline.generate_ids(prompts(), config)
    assert first == pipeline.generate_ids(prompts(), config) == plain.generate_ids(prompts(), config)
    after = pipeline.loss_and_gradients(rows)[1]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_stops_at_end_tokens_and_limits(tmp_path: Path) -> None:
    """K7: prompt 60 of 64 positions and 20 new tokens: four are made; a prompt that fills all positions is refused."""
    pipeline = open_pipeline(families.BY_NAME["llama"], tmp_path, make_config())
    decoder, config = decoder_of(pipeline), GenerateConfig(max_new_tokens=20)
    (row,) = generate(decoder, prompts([60]), config)
    assert (len(row.ids), row.finish) == (4, "positions")
    with pytest.raises(DataError, match="64 tokens leave no room in the model's 64 positions"):
        generate(decoder, prompts([64]), config)
    with pytest.raises(DataError, match="prompt 1: it has no tokens"):
        generate(decoder, [[3], []], config)
    with pytest.raises(DataError, match="token id 113 is outside"):
        next(stream(decoder, [113], config))

    (free,) = generate(decoder, prompts([3]), config)
    end = free.ids[5]
    at = free.ids.index(end)
    (ended,) = generate(decoder, prompts([3]), config, end_ids=[end, 112])
    assert (ended.ids, ended.finish) == (free.ids[:at], "end")
    assert list(stream(decoder, prompts([3])[0], config, end_ids=[end])) == free.ids[:at]
    (stopped,) = generate(decoder, prompts([3]), config, stop_when=lambda ids: len(ids) == 3)
    assert (stopped.ids, stopped.finish) == (free.ids[:3], "stop")
    (short,) = generate(decoder, prompts([3]), GenerateConfig(max_new_tokens=1))
    assert (short.ids, short.finish) == (free.ids[:1], "length")


def test_what_the_plan_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """Cache and working memory count against the budget; rows that fit one by one are decoded one by one."""
    pipeline = open_pipeline(families.BY_NAME["llama"], tmp_path, make_config())
    decoder, rows = decoder_of(pipeline), prompts([9, 7, 5])
    want = pipeline.generate_ids(rows, GenerateConfig(max_new_tokens=4))
    one = max(decoder.bytes_for([len(row)], len(row) + 4) for row in rows)
    layout = pipeline.layout
    planned = pipeline.plan(GenerateConfig(max_new_tokens=4))
    assert planned.total_bytes - layout.plan.total_bytes == decoder.bytes_for([63], 64) > one
    pipeline._layout = replace(layout, budget=layout.plan.total_bytes + one)
    assert layout.plan.total_bytes <= pipeline.layout.budget < 1 << 32
    arena = pipeline.engine.arena.nbytes
    assert pipeline.layout.generation_room(False) == one + arena  # nothing has used the arena yet
    pipeline.engine.stepped = True
    assert pipeline.generate_ids(rows, GenerateConfig(max_new_tokens=4)) == want
    with pytest.raises(PlanError, match=r"generating up to 64 tokens needs .* MB, the plan leaves"):
        pipeline.generate_ids(rows, GenerateConfig(max_new_tokens=60))


def test_end_tokens_come_from_the_source(tmp_path: Path) -> None:
    pipeline = open_pipeline(families.BY_NAME["llama"], tmp_path, make_config())
    free = pipeline.generate_ids(prompts([3]), GenerateConfig(max_new_tokens=10))[0]
    pipeline.source.eos_token_ids = (free[2],)
    assert pipeline.generate_ids(prompts([3]), GenerateConfig(max_new_tokens=10))[0] == free[: free.index(free[2])]


LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.5, -1.0, 0.0])


def draws(count: int, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    config = GenerateConfig(**options)
    return torch.tensor([pick(LOGITS, config, generator) for _ in range(count)])


def test_sampling_follows_the_distribution() -> None:
    counts = draws(4000, temperature=2.0).bincount(minlength=6) / 4000
    want = (LOGITS / 2).softmax(-1)
    assert float((counts - want).abs().max()) < 4 * (0.25 / 4000) ** 0.5  # four standard deviations of a coin
    top = draws(4000, temperature=1.0, top_k=2).bincount(minlength=6) / 4000
    assert top.nonzero().flatten().tolist() == [1, 3]
    assert top[3].item() == pytest.approx(LOGITS[[3, 1]].softmax(-1)[0].item(), abs=0.03)


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    mass = LOGITS.softmax(-1)[[3, 1, 2]].cumsum(-1).tolist()  # of the likeliest, the two likeliest, three
    for top_p, kept in (
        (1e-9, [3]),
        (mass[0] - 1e-3, [3]),
        (mass[0] + 1e-3, [1, 3]),
        (mass[1] + 1e-3, [1, 2, 3]),
        (1.0, list(range(6))),
    ):
        seen = draws(3000, temperature=1.0, top_p=top_p).unique().tolist()
        assert seen == kept, top_p


def test_greedy_and_seeded() -> None:
    assert draws(3).tolist() == [3, 3, 3]
    assert draws(20, temperature=1.0, top_k=1).unique().tolist() == [3]
    assert torch.equal(draws(50, temperature=1.0), draws(50, temperature=1.0))
