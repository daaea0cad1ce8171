"""`train --adapter`: a run goes on from an adapter that PEFT, or an earlier run, has saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import hf
from safetensors.torch import load_file, save_file
from tiny_model import write_rows, write_tiny_model
from train.standin import Recorder
from transformers import AutoModelForCausalLM

from quatrain.checkpoint.resume import newest_complete
from quatrain.cli.main import main
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError, ConfigError
from quatrain.train.interrupt import StopRequest
from quatrain.train.run import prepare_run, train
from quatrain.train.settings import Settings

CONFIG = InstructConfig(lora_rank=3, lora_alpha=6.5, use_rslora=True, lora_targets=["q_proj", "v_proj", "down_proj"])
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, and an adapter that PEFT made and saved itself."""
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", 8)
    peft_model(folder).save_pretrained(folder / "peft")
    return folder


def peft_model(world: Path) -> Any:
    return hf.with_adapters(AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32), CONFIG, seed=5)


def given(world: Path, out: Path, **more: Any) -> dict[str, Any]:
    files = {"model": str(world / "model"), "data": str(world / "rows.jsonl"), "out": str(out)}
    quick = {"compute_dtype": "fp32", "quantize": "none", "max_seq_len": 64, "learning_rate": 1e-2}
    return {**files, **quick, "adapter": str(world / "peft"), **more}


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def edited(world: Path, tmp_path: Path, **changes: Any) -> Path:
    folder = Path(shutil.copytree(world / "peft", tmp_path / "edited"))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_the_first_step_has_the_loss_and_norm_of_peft_s_model(world: Path, tmp_path: Path) -> None:
    """I5, I7: rank, alpha, rsLoRA and targets are the file's, without a flag; step 1 starts where PEFT stopped."""
    options = given(world, tmp_path / "out", max_steps=2)
    it = prepare_run(Settings.resolve(options), Recorder())
    assert (it.config.lora_rank, it.config.lora_alpha, it.config.use_rslora) == (3, 6.5, True)
    assert set(it.modules()) == {"q_proj", "v_proj", "down_proj"}
    (rows,) = it.batching.epoch(0)[0]
    want, gradients = hf.loss_and_gradients(peft_model(world), rows)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    train(options, Recorder())
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(want, rel=1e-5) and first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    before = load_file(world / "peft" / WEIGHTS)
    after = load_file(tmp_path / "out" / "adapter" / WEIGHTS)
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)


def test_run_json_says_where_it_came_from_and_the_optimizer_is_fresh(world: Path, tmp_path: Path) -> None:
    notices = Recorder()
    train(given(world, tmp_path / "first", max_steps=2, save_every=1, keep_checkpoints=2), notices)
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    assert record["started_from"]["folder"] == str(world / "peft")
    assert record["started_from"]["base_fingerprint"] is None and len(record["started_from"]["weights_sha256"]) == 64
    assert record["options"]["lora_rank"] == 3 and record["options"]["lora_targets"] == sorted(CONFIG.lora_targets)
    train(given(world, tmp_path / "second", max_steps=1, adapter=str(tmp_path / "first")), Recorder())
    second = json.loads((tmp_path / "second" / "run.json").read_text())
    assert second["started_from"]["base_fingerprint"] == second["model_sha256"]  # ours says which base it is of
    checkpoint, _ = newest_complete(tmp_path / "second" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.tensors()["step"].item() == 1  # not 3: moments and counters of the first run are not carried on


def test_resume_is_the_unbroken_run_and_needs_the_adapter_no_more(world: Path, tmp_path: Path) -> None:
    """Stopping after step 2 and going on gives the bits of never having stopped, although the adapter is gone."""
    adapter = shutil.copytree(world / "peft", tmp_path / "adapter")
    options = {"max_steps": 5, "adapter": str(adapter), "batch_size": 2}
    train(given(world, tmp_path / "whole", **options), Recorder())
    stop = StopRequest()

    class StopAtTwo(Recorder):
        def step(self, record: Any) -> None:
            if record.step == 2:
                stop.request()

    train(given(world, tmp_path / "parts", **options), StopAtTwo(), stop)
    shutil.rmtree(adapter)
    train({"out": str(tmp_path / "parts"), "resume": True}, Recorder())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "adapter" / WEIGHTS) for name in ("parts", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    record = json.loads((tmp_path / "parts" / "run.json").read_text())
    assert record["started_from"]["folder"] == str(adapter)
    with pytest.raises(ConfigError, match=r"adapter: .* in the checkpoint, elsewhere now"):
        train({"out": str(tmp_path / "parts"), "resume": True, "adapter": "elsewhere"}, Recorder())


def test_flags_that_contradict_the_adapter_are_refused_together(world: Path, tmp_path: Path) -> None:
    """I5, I7: rank, scale, targets and dropout belong to the adapter; the same value, said another way, is fine."""
    wrong = {"lora_rank": 8, "lora_alpha": "32", "lora_targets": "all-linear", "use_rslora": "no", "lora_dropout": 0.1}
    with pytest.raises(ConfigError) as error:
        train(given(world, tmp_path / "out", **wrong), Recorder())
    for part in ("lora_rank: 3 there, 8 given", "lora_alpha: 6.5", "lora_targets", "use_rslora", "lora_dropout"):
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()
    same = {"lora_rank": "3", "lora_targets": r".*\.(q_proj|v_proj|down_proj)"}
    prepare_run(Settings.resolve(given(world, tmp_path / "out", **same)), Recorder())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"r": 0}, "r: want a whole number of at least 1"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(
    world: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        train(given(world, tmp_path / "out", adapter=str(edited(world, tmp_path, **changes))), Recorder())
    assert not (tmp_path / "out").exists()


def test_a_tensor_too_many_or_too_few_loads_nothing(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All or nothing: the misfit is named, and the command fails."""
    folder = edited(world, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in given(world, tmp_path / "out").items()]
    assert main(["train", *words, f"--adapter={folder}"]) == 1
    said = capsys.readouterr().err
    assert f"missing {name}" in said and "unexpected base_model.model.lm_head.lora_A.weight" in said


def test_another_base_and_a_folder_without_an_adapter(world: Path, tmp_path: Path) -> None:
    train(given(world, tmp_path / "first", max_steps=1), Recorder())
    other = str(write_tiny_model(tmp_path / "other", seed=9))
    with pytest.raises(CheckpointError, match="was trained on other base weights"):
        train(given(world, tmp_path / "out", model=other, adapter=str(tmp_path / "first")), Recorder())
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        train(given(world, tmp_path / "out", adapter=str(world)), Recorder())


def test_an_adapter_that_stays_as_it_was_is_no_success(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3: its B is not zero, so only a comparison with the start shows that nothing was learned."""
    from quatrain.errors import QuatrainError
    from quatrain.optim.optimizer import Optimizer

    monkeypatch.setattr(Optimizer, "end_step", lambda self: None)
    with pytest.raises(QuatrainError, match="6 adapters did not change at all"):
        train(given(world, tmp_path / "out", max_steps=1), Recorder())


def test_plan_takes_the_adapter_s_options(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without data: three modules a layer of rank 3, not seven of rank 16."""
    plans = []
    for more in ([], ["--data", str(world / "rows.jsonl"), "--no-measure"], None):
        adapter = [] if more is None else ["--adapter", str(world / "peft"), *more]
        assert main(["plan", "--model", str(world / "model"), "--json", *adapter]) == 0
        plans.append(json.loads(capsys.readouterr().out)["groups"]["adapters"])
    assert plans[0] == plans[1] < plans[2] / 10


def test_another_template_is_said(world: Path, tmp_path: Path) -> None:
    train(given(world, tmp_path / "first", max_steps=1, chat_template="chatml"), Recorder())
    same = given(world, tmp_path / "out", adapter=str(tmp_path / "first"), chat_template="chatml")
    assert not [note for note in prepare_run(Settings.resolve(same), Recorder()).notes if "template" in note]
    (tmp_path / "first" / "adapter" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|im_end|>")
    options = given(world, tmp_path / "out", adapter=str(tmp_path / "first"))
    assert any("another chat template" in note for note in prepare_run(Settings.resolve(options), Recorder()).notes)
