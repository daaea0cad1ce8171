"""What `plan` says a run will take: FLOPs as the profiler counts them, knobs as other runs really plan them, a time
that follows the measured rates, and the disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_rows, write_tiny_model

from quatrain.bench import calibrate
from quatrain.cli.main import main
from quatrain.config import InstructConfig
from quatrain.data.row import Row
from quatrain.data.rows import Rows
from quatrain.errors import PlanError
from quatrain.model.shapes import shape_spec
from quatrain.train.forecast import Forecast, Rates
from quatrain.train.reporter import Reporter
from quatrain.train.run import Preparation, prepare_run
from quatrain.train.settings import Settings
from quatrain.train.workload import Load, evaluation_flops, training_flops

RATES = Rates(1e-6, 1e-6, 2e-6, 1e-9, 1e-7, 1e-9, 1e-6, 1.0, 100)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", 40)
    return folder


def words(world: Path, *more: str) -> list[str]:
    quick = ["--compute-dtype", "fp32", "--lora-rank", "4", "--max-seq-len", "64"]
    return ["--model", str(world / "model"), "--data", str(world / "rows.jsonl"), *quick, *more]


def prepared(world: Path, **more: Any) -> Preparation:
    files = {"model": str(world / "model"), "data": str(world / "rows.jsonl")}
    quick = {"compute_dtype": "fp32", "lora_rank": 4, "max_seq_len": 64}
    return prepare_run(Settings.resolve({**files, **quick, **more}), Reporter())


def plan(capsys: pytest.CaptureFixture[str], world: Path, *more: str) -> dict[str, Any]:
    assert main(["plan", *words(world, *more), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", r".*layers\.1\..*(up|down)_proj"])
@pytest.mark.parametrize("checkpoint", ["block", "none"])
def test_flops_are_those_of_the_profiler(world: Path, checkpoint: str, targets: str) -> None:
    """Every product of a training step and of an evaluation, counted on the rows alone."""
    from quatrain.train.pipeline import InstructPipeline

    names: str | Sequence[str] = targets.split(",") if "," in targets else targets
    it = prepared(world, checkpoint=checkpoint, lora_targets=names, batch_size=5, lora_dropout=0.1)
    pipe = InstructPipeline(it.source, it.config, it.layout)
    pipe.profiler.enabled = True
    (rows,) = it.batching.epoch(0)[0]
    pipe.train_micro_batches([rows])
    load, first_kept = Load.of(Rows.of(rows), it.source.spec.windows), it.layout.first_kept
    assert first_kept == (2 if checkpoint == "block" else 0)
    flops = training_flops(load, it.source.spec, it.config, first_kept)
    assert flops.total == sum(span.flops for span in pipe.profiler.spans())
    assert flops.recompute == sum(span.flops for span in pipe.profiler.spans() if span.part == "recompute")
    pipe.profiler.clear()
    pipe.evaluate(rows)
    assert evaluation_flops(load, it.source.spec, it.config) == sum(span.flops for span in pipe.profiler.spans())


def test_sliding_windows_see_fewer_pairs() -> None:
    spec, row = shape_spec("smollm2-135m"), Row(tuple(range(10)), tuple(range(10)))
    assert Load.of(Rows.of([row]), [None, 4]).pairs == {None: 55, 4: 34}  # 1 + 2 + ... + 10; 1 + 2 + 3 + 7 x 4
    windowed = replace(spec, windows=(4,) * spec.num_layers)
    full, less = (
        training_flops(Load.of(Rows.of([row]), s.windows), s, InstructConfig(), 0).forward for s in (spec, windowed)
    )
    assert full - less == (55 - 34) * 30 * 9 * 64 * 2 * 2


def test_tokens_and_evaluations_are_the_run_s(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(capsys, world, "--no-measure", "--epochs", "2", "--val-split", "0.25", "--batch-size", "10")
    it = prepared(world, epochs=2, val_split=0.25, batch_size=10)
    assert facts["time"] is None and facts["total_steps"] == 6 and facts["evaluations"] == 2
    assert facts["tokens"]["epoch"] == sum(map(len, it.prepared.train))
    assert facts["tokens"]["run"] == 2 * facts["tokens"]["epoch"] == 6 * facts["tokens"]["step"]
    assert facts["flops"]["run"] > facts["flops"]["forward"] + facts["flops"]["backward"]
    half = plan(capsys, world, "--no-measure", "--max-steps", "3", "--val-split", "0.25", "--batch-size", "10")
    assert half["tokens"]["run"] == facts["tokens"]["epoch"] and half["epochs"] == 1


def test_time_adds_up_the_parts(world: Path) -> None:
    it = prepared(world, epochs=2, val_split=0.25, batch_size=10, checkpoint="block")
    forecast = Forecast(it)
    tokens, supervised = 2 * forecast.epoch.tokens, 2 * forecast.epoch.supervised
    head = it.source.spec.vocab_size * 1e-9
    want = tokens * (2 * 3e-6 + 2 * 1e-6 + 1e-7) + supervised * head + 6 * forecast.trainable * 1e-9
    want += 6 * 1e-6
    want += 2 * (forecast.validation.tokens * (2 * 1e-6 + 1e-7) + forecast.validation.supervised * head / 2)
    estimate = forecast.time(RATES)
    assert estimate.seconds == pytest.approx(want)
    assert estimate.least < estimate.seconds < estimate.most
    wider = forecast.time(replace(RATES, spread=1.5))
    assert wider.least < estimate.least and wider.most > estimate.most


def test_a_piece_has_the_run_s_shapes_and_stays_small() -> None:
    """Two layers, or one, and no more tokens than the limit allows; the head's vocabulary is cut where it is huge."""
    rows = [Row(tuple(range(100)), tuple([-100] * 60 + list(range(40)))) for _ in range(9)]
    small, large = shape_spec("smollm2-135m"), shape_spec("qwen3-8b")
    piece = calibrate.piece_of(small, InstructConfig(), rows, 1e12)
    assert piece.spec.num_layers == 2 and piece.tokens == 900 and piece.spec.vocab_size == 7281
    assert sum(row.num_supervised for row in piece.rows) == 9 * 40
    piece = calibrate.piece_of(large, InstructConfig(lora_targets=r".*layers\.30\..*q_proj"), rows, 2e11)
    assert piece.spec.num_layers == 2 and 32 <= piece.tokens < 150 and piece.spec.vocab_size == 1024
    assert piece.config.lora_targets == ["q_proj"]  # layer 30 is not in the piece
    assert calibrate.piece_of(large, InstructConfig(), rows, 1e9).tokens == calibrate.LEAST_TOKENS


def test_rates_are_those_of_the_moment(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a busy hour gave is not used in a quiet one: every start measures, and nothing of it is kept."""
    measured: list[int] = []
    monkeypatch.setattr(calibrate, "calibrate", lambda piece, layout: measured.append(piece.tokens) or RATES)
    cache = ["--cache-dir", str(tmp_path / "cache")]
    for out in ("a", "b"):
        assert main(["train", *words(world, *cache), "--max-steps", "1", "--out", str(tmp_path / out)]) == 0
        assert "for training and evaluation" in capsys.readouterr().out
    assert len(measured) == 2
    assert plan(capsys, world, *cache)["time"]["rates"]["tokens"] == 100 and len(measured) == 3
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".rows", ".safetensors"}


def test_time_says_what_it_leaves_out(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sample answers at the evaluations come on top of the estimate; where there are none, nothing is said."""
    evaluated = words(world, "--val-split", "0.25", "--epochs", "2", "--batch-size", "10")
    assert main(["plan", *evaluated]) == 0
    assert "not in it: 6 sample answers of up to 48 tokens (--samples 0: none)" in capsys.readouterr().out
    assert main(["plan", *evaluated, "--samples", "0"]) == 0
    assert "sample answer" not in capsys.readouterr().out


def test_measuring_changes_no_bit_of_a_run(world: Path, tmp_path: Path) -> None:
    """The same losses whether rates were measured before the run (by the command) or not (from Python)."""
    from quatrain.train.run import train

    given = {"model": str(world / "model"), "data": str(world / "rows.jsonl"), "max_steps": 3, "lora_dropout": 0.1}
    train({**given, "out": str(tmp_path / "python"), "compute_dtype": "fp32"}, Reporter())
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", *flags, "--out", str(tmp_path / "command"), "--compute-dtype", "fp32"]) == 0
    one, other = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("python", "command")
    )
    assert one == other and len(one) == 3


def test_a_real_measurement_is_plausible(world: Path) -> None:
    it = prepared(world)
    rates = calibrate.rates_of(it.source.spec, it.layout, it.config, Forecast(it).sample(), most_flops=1e9)
    assert rates is not None and rates.spread >= 1
    assert all(0 < value < 0.1 for value in (rates.forward, rates.recompute, rates.backward, rates.head, rates.update))


def test_no_estimate_where_the_piece_does_not_fit(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise PlanError("too large")

    monkeypatch.setattr(calibrate, "calibrate", full)
    it = prepared(world)
    rows = Forecast(it).sample()
    assert calibrate.rates_of(it.source.spec, it.layout, it.config, rows, most_flops=1e9) is None
    gpu = replace(it.layout, device="cuda")
    assert calibrate.rates_of(it.source.spec, gpu, it.config, rows, most_flops=1e9) is None


def test_every_knob_saves_what_a_run_with_it_plans(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row again as the plan of a run with that flag: the same difference, to the byte."""
    more = ["--no-measure", "--batch-size", "8", "--checkpoint", "none", "--micro-batch-tokens", "512"]
    base = plan(capsys, world, *more)
    seen = set()
    for knob in base["knobs"]:
        seen.add(knob["option"])
        value = ",".join(knob["value"]) if isinstance(knob["value"], list) else str(knob["value"])
        flag = f"--{knob['option'].replace('_', '-')}"
        other = plan(capsys, world, *more, flag, value)
        process = base["groups"]["process"] - other["groups"]["process"]
        assert base["total_bytes"] - other["total_bytes"] - process == knob["saved_bytes"], knob
        assert other["flops"]["run"] / base["flops"]["run"] == pytest.approx(knob["work"], rel=1e-3), knob
    assert seen >= {"checkpoint"}


def test_knobs_of_smollm2_s_shape_and_their_costs(world: Path) -> None:
    """All knobs at a size where each of them makes a difference, on a model that is not there."""
    from quatrain.engine.layout import Layout
    from quatrain.engine.setup import choose_layout
    from quatrain.train.knobs import Setup, knobs

    spec = shape_spec("smollm2-135m")
    config = InstructConfig(memory_budget=64 * 10**9, compute_dtype="fp32")

    def lay(other: InstructConfig, micro_batches: int) -> Layout:
        return choose_layout(spec, other, None, micro_batches)

    found = {knob.option: knob for knob in knobs(Setup(spec, config, lay(config, 1), lay))}
    assert next(iter(found)) == "checkpoint" and list(found)[-1] == "quantize"
    assert set(found) == {"checkpoint", "micro_batch_tokens", "lora_rank", "lora_targets", "clip", "quantize"}
    checkpoint, rank = found["checkpoint"], found["lora_rank"]
    assert checkpoint.value == "block" and checkpoint.work is not None and 1.2 < checkpoint.work < 1.4
    assert rank.value == 8 and rank.work is not None and 0.9 < rank.work < 1
    assert found["quantize"].saved_bytes is not None and found["quantize"].saved_bytes < -300e6
    block = config.model_copy(update={"checkpoint": "block"})
    tight = block.model_copy(update={"memory_budget": lay(block, 1).plan.total_bytes + 50_000_000})
    assert {"checkpoint", "quantize"} == {
        knob.option for knob in knobs(Setup(spec, tight, lay(tight, 1), lay)) if knob.cost == "does not fit"
    }


def test_rows_that_a_shorter_limit_drops_are_counted(world: Path, tmp_path: Path) -> None:
    from quatrain.train.knobs import Setup, knobs
    from quatrain.train.run import layout_of

    rows = [{"instruction": "x" * (10 if i else 4000), "response": "y"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    it = prepared(world, data=str(tmp_path / "rows.jsonl"), max_seq_len=5000, batch_size=1)
    found = knobs(Setup(it.source.spec, it.config, it.layout, lambda c, n: layout_of(it.source, c, n), it.batching))
    (knob,) = [knob for knob in found if knob.option == "max_seq_len"]
    assert knob.value < 100 and knob.cost == "1 rows (2%) are too long and left out"
    assert knob.saved_bytes is not None and knob.saved_bytes > 5e6 and knob.work is not None and knob.work < 0.5


def test_disk_and_the_rest_for_people(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """M3: what the run will write is said beside what is free."""
    facts = plan(capsys, world, "--no-measure", "--keep-checkpoints", "4", "--save-every", "3")
    disk, trainable = facts["disk"], 4 * sum(a + b for a, b in [(32, 32)] * 2 + [(32, 16)] * 2 + [(32, 48)] * 3) * 2
    assert disk["checkpoints"] == 5 and disk["checkpoint_bytes"] == 12 * trainable
    assert disk["run_bytes"] == 5 * 12 * trainable + 2 * disk["adapter_bytes"] and disk["free_bytes"] > 0
    assert main(["plan", *words(world, "--no-measure")]) == 0
    said = capsys.readouterr().out
    assert "tokens an epoch" in said and "TFLOP" in said and "checkpoints of" in said and "time" not in said.split()
    assert main(["plan", "--model", str(world / "model"), "--json"]) == 0
    assert "knobs" in json.loads(capsys.readouterr().out)


def test_the_table_of_plan_opens_every_run(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` shows what `plan` showed, before its first step; a resumed run has no time estimate, the rest again."""
    more = ["--max-steps", "2", "--save-every", "1", "--lora-rank", "64", "--cache-dir", str(tmp_path / "cache")]
    out = ["--out", str(tmp_path / "run")]
    assert main(["plan", *words(world, *more, *out)]) == 0
    planned = _table(capsys.readouterr().out)
    assert list(planned) == ["work", "time", "disk", "knobs"] and len(planned["knobs"]) > 2
    assert main(["train", *words(world, *more, *out)]) == 0
    before, _, after = capsys.readouterr().out.partition("loading the model")
    opened = _table(before)
    assert list(opened) == list(planned) and not _table(after)
    for name in ("work", "knobs"):
        assert opened[name] == planned[name]
    assert opened["disk"][0].partition(";")[0] == planned["disk"][0].partition(";")[0]  # what is free may differ
    assert main(["train", "--resume", *out]) == 0
    again = _table(capsys.readouterr().out)
    assert list(again) == ["work", "disk", "knobs"] and again["work"] == planned["work"]


def _table(said: str) -> dict[str, list[str]]:
    """The blocks of the table in what a command said: label, lines."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in said.splitlines():
        label, text = line[:11].strip(), line[11:].strip()
        if label:
            lines = found.setdefault(label, []) if label in ("work", "time", "disk", "knobs") else []
        lines.append(text)
    return found
