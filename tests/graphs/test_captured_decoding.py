"""Generation as on a GPU, on a device that captures: the CPU decoder's tokens, one captured step for all lengths, and
nothing of it outside the memory of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs.standin import Tape, open_on_tape, rows_of
from graphs.test_captured_steps import assert_same_bits, bits
from oracles import families
from oracles.engine import make_config, open_pipeline

from quatrain.config import GenerateConfig
from quatrain.engine import decoding
from quatrain.errors import ConfigError, KernelError, PlanError
from quatrain.model.generate import generate
from quatrain.ops.sampling.reference import sample_tokens
from quatrain.train.pipeline import InstructPipeline

LLAMA, QWEN3 = families.BY_NAME["llama"], families.BY_NAME["qwen3-mixed-windows"]
GREEDY = GenerateConfig(max_new_tokens=20)
SAMPLED = GenerateConfig(max_new_tokens=20, temperature=1.3, top_k=40, top_p=0.9, seed=5)
OPTIONS = {"micro_batch_tokens": 512}


def prompts(lengths: list[int], seed: int = 11) -> list[list[int]]:
    return [list(row.input_ids) for row in rows_of(lengths, seed)]


def on_tape(variant: families.Variant, folder: Path, tape: Tape | None = None, **options: Any) -> InstructPipeline:
    return open_on_tape(variant, folder, tape or Tape(), **{**OPTIONS, **options})


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_the_cpu_decoders_tokens(tmp_path: Path, variant: families.Variant) -> None:
    """Greedy, rows of one token up to more than two windows, a bucket that is not full, rows that end early; in fp64,
    where a bucket's other shapes change no token. An embedding of its own is on the host."""
    tape = Tape()
    device = on_tape(variant, tmp_path / "device", tape, compute_dtype="fp64")
    host = open_pipeline(variant, tmp_path / "host", make_config(compute_dtype="fp64", **OPTIONS))
    assert device.layout.embed_on_host != device.spec.tie_word_embeddings
    rows = prompts([1, 4, 5, 11, 2])
    assert device.generate_ids(rows, GREEDY) == host.generate_ids(rows, GREEDY)
    ends = {5, 17, 29, 41, 53, 65, 77}
    host.source.eos_token_ids = device.source.eos_token_ids = tuple(ends)
    ended = device.generate_ids(rows, GREEDY)
    assert ended == host.generate_ids(rows, GREEDY) and len(set(map(len, ended))) > 1
    assert list(device.stream(rows[3], GREEDY)) == ended[3]
    assert len(tape.captures) <= 2 < 20 < tape.launches  # of eight rows, and of one


def test_a_captured_step_serves_all_lengths_and_prompts(tmp_path: Path) -> None:
    """Captured and not: equal tokens, greedy and sampled, other prompts and settings on the same graph; a training
    step between them takes the memory and gives it back."""
    tape = Tape()
    captured, plain = on_tape(QWEN3, tmp_path / "on", tape), on_tape(QWEN3, tmp_path / "off", cuda_graph="off")
    assert plain.engine.graphs is None
    for seed, (lengths, config) in enumerate(
        [([7, 3], GREEDY), ([2, 30], SAMPLED), ([9, 9], SAMPLED), ([1, 12], GREEDY), ([20, 6], SAMPLED)]
    ):
        rows = prompts(lengths, seed)
        assert captured.generate_ids(rows, config) == plain.generate_ids(rows, config)
        if seed == 2:
            assert captured.train_step(rows_of([9, 30], 1)) == plain.train_step(rows_of([9, 30], 1))
    assert len(tape.captures) == 1
    assert_same_bits(bits(captured), bits(plain))
    calls = [name for name in tape.captures[0] if not name.startswith("aten::")]
    assert calls.count("cached_attention_forward") == captured.spec.num_layers and calls[-1] == "sample_tokens"


def test_what_a_row_becomes_does_not_depend_on_the_rows_beside_it(tmp_path: Path, monkeypatch: Any) -> None:
    pipeline = on_tape(LLAMA, tmp_path, compute_dtype="fp64")
    rows = prompts([2, 7, 7, 3, 12, 5])
    for config in (GREEDY, SAMPLED):
        together = pipeline.generate_ids(rows, config)
        assert len({tuple(ids) for ids in together}) == len(rows)
        monkeypatch.setattr(decoding, "MOST_ROWS", 2)
        assert pipeline.generate_ids(rows, config) == together
        monkeypatch.undo()
        assert list(pipeline.stream(rows[0], config)) == together[0]


def test_sampled_tokens_follow_the_draws(tmp_path: Path, monkeypatch: Any) -> None:
    """Each token is the one that its row's own draw, the next of its generator, takes from the logits of the row so
    far, run from its first token."""
    pipeline = on_tape(LLAMA, tmp_path, compute_dtype="fp64")
    host = open_pipeline(LLAMA, tmp_path / "host", make_config(compute_dtype="fp64", **OPTIONS))
    rows = prompts([3, 9])
    for number, (row, ids) in enumerate(zip(rows, pipeline.generate_ids(rows, SAMPLED), strict=True)):
        draws = torch.rand(20, generator=torch.Generator().manual_seed(SAMPLED.seed + number))
        for n, token in enumerate(ids):
            logits = host._decoder().start([[*row, *ids[:n]]], 64)  # type: ignore[union-attr]
            sampling = torch.tensor([SAMPLED.temperature, SAMPLED.top_k, SAMPLED.top_p])
            want = torch.zeros(1, dtype=torch.int64)
            sample_tokens(want, logits, draws[n].view(1, 1), torch.tensor([1]), sampling)
            assert int(want) == token, (number, n)


@pytest.mark.parametrize("untied", [False, True])
def test_the_host_reads_tokens_from_their_slots_alone(tmp_path: Path, monkeypatch: Any, untied: bool) -> None:
    """Between the prompt and the last token, the host waits once a token, and where the embedding is on the device the
    next step is under way by then."""
    variant = next(v for v in families.VARIANTS if on_host(v) == untied)
    tape = Tape()
    pipeline = on_tape(variant, tmp_path, tape)
    pipeline.generate_ids(prompts([5]), GREEDY)  # captured
    log: list[str] = []
    mark, launches = tape.mark, tape.launches

    def marked() -> Any:
        log.append("sent")
        return lambda: log.append("waited")

    monkeypatch.setattr(tape, "mark", marked)
    monkeypatch.setattr(tape, "synchronize", lambda: log.append("synchronized"))
    pipeline.generate_ids(prompts([8]), GREEDY)
    ahead = ["sent"] if not untied else []
    assert log == [*ahead, *["sent", "waited"] * 20]
    assert tape.launches - launches == 20 - untied and mark() is not None


def on_host(variant: families.Variant) -> bool:
    return not families.build(variant).config.tie_word_embeddings


def test_it_lies_in_the_memory_of_a_step_and_refuses_what_does_not(tmp_path: Path) -> None:
    pipeline = on_tape(LLAMA, tmp_path, micro_batch_tokens=128)
    arena = pipeline.engine.arena
    seen = []
    decoder = decoding.DeviceDecoder(pipeline.engine)
    lend = pipeline.engine.lend_arena

    def lent(*args: Any) -> Any:
        made = lend(*args)
        seen.append(made["keys.0"].untyped_storage().data_ptr() == arena["hidden.0"].untyped_storage().data_ptr())
        return made

    pipeline.engine.lend_arena = lent  # type: ignore[method-assign]
    generate(decoder, prompts([3]), GenerateConfig(max_new_tokens=2))
    assert seen == [True]
    with pytest.raises(PlanError, match=r"generating up to 40000 tokens needs [0-9]+ MB, the plan leaves [0-9]+ MB"):
        decoder.begin(generate(decoder, prompts([3]), GenerateConfig(max_new_tokens=1)), GREEDY, 40000)


def test_a_step_in_between_ends_a_generation_and_is_right(tmp_path: Path) -> None:
    a, b = (on_tape(QWEN3, tmp_path / name) for name in "ab")
    going = a.stream(prompts([5])[0], GREEDY)
    next(going)
    assert a.train_step(rows_of([9, 12], 3)) == b.train_step(rows_of([9, 12], 3))
    a.engine.arena.check_guards()
    with pytest.raises(KernelError, match="a training or evaluation step ran while text was being generated"):
        next(going)
    first, second = (a.stream(prompts([5])[0], GREEDY) for _ in range(2))
    next(first), next(second)
    with pytest.raises(KernelError):
        next(first)
    assert list(second) == list(b.stream(prompts([5])[0], GREEDY))[1:]


def test_a_failed_capture_generates_as_it_is(tmp_path: Path) -> None:
    tape = Tape(fail_at=9)
    broken, plain = on_tape(LLAMA, tmp_path / "a", tape), on_tape(LLAMA, tmp_path / "b", cuda_graph="off")
    assert broken.generate_ids(prompts([5, 2]), SAMPLED) == plain.generate_ids(prompts([5, 2]), SAMPLED)
    assert tape.launches == 0 and "not permitted" in str(broken.graph_report()["reason"])


def test_dynamic_rope(tmp_path: Path) -> None:
    """Up to its original length one set of frequencies serves; beyond, no key stays valid."""
    variant = families.BY_NAME["llama-rope-dynamic"]
    device = on_tape(variant, tmp_path / "a", compute_dtype="fp64")
    host = open_pipeline(variant, tmp_path / "b", make_config(compute_dtype="fp64", **OPTIONS))
    limit = device.spec.rope.original_max_position
    config = GenerateConfig(max_new_tokens=limit - 4)
    assert device.generate_ids(prompts([4]), config) == host.generate_ids(prompts([4]), config)
    with pytest.raises(ConfigError, match=f"dynamic rope beyond {limit} tokens"):
        device.generate_ids(prompts([5]), config)
