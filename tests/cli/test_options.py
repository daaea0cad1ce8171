"""Flags and YAML: one meaning for a value however it is written, and nothing that is silently ignored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quatrain.cli import chat, check, evaluate, plan, train
from quatrain.cli.options import Group, read_yaml, with_options
from quatrain.config import GenerateConfig
from quatrain.errors import ConfigError
from quatrain.train.settings import OPTION_SETS, Settings

REQUIRED = {"model": "m", "data": ["d.jsonl"], "out": "o"}


def yaml_of(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_yaml(path)


def resolve(tmp_path: Path, text: str) -> Settings:
    return Settings.resolve({**REQUIRED, **yaml_of(tmp_path, text)})


@pytest.mark.parametrize("written", ["1e-4", "1.0e-4", '"1e-4"', ".0001", "0.0001", "1E-4"])
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    """P1: 1e-4 is a number in YAML too, which alone would call it text."""
    assert resolve(tmp_path, f"learning_rate: {written}").engine.learning_rate == 1e-4
    assert resolve(tmp_path, f"lr: {written}").engine.learning_rate == 1e-4


def test_a_broken_number_is_refused_by_key(tmp_path: Path) -> None:
    """P1: what is no number is refused with its option."""
    with pytest.raises(ConfigError, match=r"learning_rate: .*'1e-4x'"):
        resolve(tmp_path, "learning_rate: 1e-4x")


def test_another_trainer_s_switch_is_refused_with_our_name_for_it(tmp_path: Path) -> None:
    """P1: `bf16: yes` is no option here; the one that says it is named."""
    with pytest.raises(ConfigError, match="unknown option 'bf16', did you mean 'compute_dtype'"):
        resolve(tmp_path, "bf16: yes")


@pytest.mark.parametrize(
    ("text", "name", "want"),
    [
        ("use_rslora: yes", "use_rslora", True),
        ("use_rslora: off", "use_rslora", False),
        ("seed: 010", "seed", 10),
        ("seed: 12", "seed", 12),
        ("system: 007", "system", "007"),
        ("system: 2024-01-02", "system", "2024-01-02"),
        ("system: yes", "system", "yes"),
        ('system: "null"', "system", "null"),
        ("max_steps: null", "max_steps", None),
        ("max_steps: ~", "max_steps", None),
        ("max_steps:", "max_steps", None),
        ("memory_budget: 1.5GB", "memory_budget", 1_500_000_000),
        ("lora_targets: [q_proj, v_proj]", "lora_targets", ["q_proj", "v_proj"]),
        ("betas: [0.9, 0.95]", "betas", [0.9, 0.95]),
        ("eval_every: 20", "eval_every", 20),
        ("eval_every: epoch", "eval_every", "epoch"),
        ("batch-size: 3", "batch_size", 3),
        ("data: one.jsonl", "data", ["one.jsonl"]),
        ("data: [a.jsonl@2, {path: b@1, weight: 0.5}]", "data", ["a.jsonl@2", {"path": "b@1", "weight": 0.5}]),
        ("data: {path: b.jsonl}", "data", [{"path": "b.jsonl", "weight": 1.0}]),
    ],
)
def test_the_declared_type_decides(tmp_path: Path, text: str, name: str, want: object) -> None:
    """P1: yes and 010 mean what the option wants: true, ten, or that very text."""
    assert resolve(tmp_path, text).resolved()[name] == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "want `option: value` lines"),
        ("seed: 1\nseed: 2", r"run.yaml:2: key 'seed' is given twice"),
        ("batch-size: 1\nbatch_size: 2", "batch_size is given twice"),
        ("lr: 1\nlearning_rate: 2", "learning_rate is given twice"),
        ("seed: [1", r"run.yaml:1"),
        ("seed: !!python/object/apply:os.system [ls]", "run.yaml:1"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        yaml_of(tmp_path, text)


def test_nested_options_and_lists_are_refused_with_what_was_meant(tmp_path: Path) -> None:
    """P4: all at once, one line for each option, items of lists by their place."""
    text = """
        lora: {rank: 8, dropout: 0.1}
        training: {lerning_rate: 1e-4, epochs: 2}
        lora_rnk: 3
        json_fields: [a, [b]]
        lora_targets: {a: b}
        batch_size: [4]
        save_every: [1]
    """
    with pytest.raises(ConfigError) as error:
        resolve(tmp_path, text)
    said = str(error.value).removeprefix("options: ").split("; ")
    assert said == [
        "unknown option 'lora': options are not nested",
        "write lora_rank, lora_dropout at the top level",
        "unknown option 'training': options are not nested",
        "write learning_rate, epochs at the top level",
        "unknown option 'lora_rnk', did you mean 'lora_rank'?",
        "batch_size: want a valid integer (got ['4'])",
        "save_every: want 'epoch' or a number of optimizer steps of at least 1 (got ['1'])",
        "lora_targets: want a valid string or a valid list (got {'a': 'b'})",
        "json_fields[1]: want a valid string (got ['b'])",
    ]


def test_an_empty_file_gives_nothing_and_a_missing_one_is_named(tmp_path: Path) -> None:
    assert yaml_of(tmp_path, "# nothing\n") == {}
    with pytest.raises(ConfigError, match="cannot read"):
        read_yaml(tmp_path / "none.yaml")


def run_flags(*words: str) -> dict[str, Any]:
    """What a command with all of train's options receives."""
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @with_options(*train.GROUPS)
    def command(given: dict[str, Any]) -> None:
        seen.update(given)

    app.command()(command)
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    """P3: a flag goes before the file, the file before the default."""
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 5\nbatch_size: 3\nuse_rslora: yes\n")
    given = run_flags("--config", str(path), "--epochs", "7", "--no-use-rslora")
    settings = Settings.resolve({**REQUIRED, **given})
    assert settings.train.epochs == 7 and settings.train.batch_size == 3 and settings.train.accumulation == 1
    assert settings.engine.use_rslora is False


def test_flags_of_lists(tmp_path: Path) -> None:
    given = run_flags(
        "--data", "a.jsonl", "--data", "b, c.jsonl", "--lora-targets", "q_proj,v_proj", "--betas", "0.9,0.95"
    )
    assert given == {"data": ["a.jsonl", "b, c.jsonl"], "lora_targets": ["q_proj", "v_proj"], "betas": ["0.9", "0.95"]}
    assert (
        run_flags("--lora-targets", r"model\.layers\.\d{1,2}\.q_proj")["lora_targets"]
        == r"model\.layers\.\d{1,2}\.q_proj"
    )


OTHER_VALUES: dict[str, str] = {
    "model": "other", "data": "other.jsonl", "out": "other", "threads": "3", "epochs": "4", "max_steps": "9",
    "batch_size": "2", "accumulation": "2", "batch_tokens": "99", "schedule": "linear", "warmup_steps": "3",
    "warmup_ratio": "0.2", "lr_floor": "0.1", "eval_every": "7", "patience": "3", "save_every": "7",
    "keep_checkpoints": "5", "max_skipped_steps": "9", "track": "wandb", "samples": "1", "format": "csv",
    "row_schema": "messages", "prompt_field": "q",
    "response_field": "a", "system_field": "s", "system": "Be kind.", "json_fields": "a", "chat_template": "chatml",
    "template_date": "2024-01-02", "truncation": "truncate", "train_on_eos": "last", "on_bad_row": "skip",
    "max_unsupervised": "0.7", "val_split": "0.1", "validation": "v.jsonl", "lora_rank": "4", "lora_alpha": "4",
    "lora_targets": "q_proj", "lora_dropout": "0.1", "learning_rate": "1e-3", "weight_decay": "0.5", "betas": "0.8,0.9",
    "adam_eps": "1e-6", "max_seq_len": "64", "max_grad_norm": "2", "clip": "none", "quantize": "none",
    "compute_dtype": "fp32", "checkpoint": "block", "device": "cpu", "seed": "7", "micro_batch_tokens": "4096",
    "memory_budget": "1GB", "kernels": "reference", "cache_dir": "elsewhere", "cuda_graph": "off",
    "system_policy": "fold",
    "allow": "two-bos",
    "adapter": "a",
}  # fmt: skip
WITH = {"prompt_field": {"response_field": "a"}, "response_field": {"prompt_field": "q"}, "override": {"resume": True}}
ALL_OPTIONS = {name: field for options in OPTION_SETS for name, field in options.model_fields.items()}


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_every_key_changes_what_is_resolved_by_flag_and_by_file(tmp_path: Path, name: str) -> None:
    """P3: no option is parsed and lost on either way."""
    base = Settings.resolve(REQUIRED).resolved()[name]
    flag = "--" + name.replace("_", "-")
    if ALL_OPTIONS[name].annotation is bool:
        words = [f"--no-{flag[2:]}" if ALL_OPTIONS[name].default else flag]
        text = f"{name}: {'no' if ALL_OPTIONS[name].default else 'yes'}"
    else:
        words, text = [flag, OTHER_VALUES[name]], f"{name}: {OTHER_VALUES[name]}"
        text = text.replace("betas: 0.8,0.9", "betas: [0.8, 0.9]").replace("json_fields: a", "json_fields: [a]")
        text = text.replace("allow: two-bos", "allow: [two-bos]")
    more = WITH.get(name, {})
    by_flag = Settings.resolve({**REQUIRED, **more, **run_flags(*words)}).resolved()[name]
    by_file = Settings.resolve({**REQUIRED, **more, **yaml_of(tmp_path, text)}).resolved()[name]
    assert by_flag == by_file != base


def test_every_option_is_read_somewhere(root: Path) -> None:
    """P3: an option that no code reads would be accepted and ignored."""
    sources = [path.read_text() for path in (root / "src").rglob("*.py") if path.name != "config.py"]
    assert len(sources) > 50
    everything = "\n".join(sources)
    names = [*ALL_OPTIONS, *GenerateConfig.model_fields]
    unread = [name for name in names if not re.search(rf"\.{name}\b|\"{name}\"", everything)]
    # These are read through a property of their set: `capacity`, `lora_scale`, `num_epochs`.
    assert set(unread) <= {"micro_batch_tokens", "lora_alpha", "epochs"}


def test_no_two_groups_of_a_command_share_an_option() -> None:
    for groups in (train.GROUPS, plan.GROUPS, check.GROUPS, chat.command.groups, evaluate.command.groups):  # type: ignore[attr-defined]
        names = [name for group in groups for name in group.fields()]
        assert len(names) == len(set(names)) > 3


def test_a_group_takes_some_fields_of_a_set() -> None:
    assert list(Group("Sampling", GenerateConfig, ("top_k",)).fields()) == ["top_k"]


@pytest.mark.parametrize("entry", ["{pth: a.jsonl}", "{path: a.jsonl, weight: 0}", "{path: a.jsonl, weight: half}"])
def test_a_data_entry_that_cannot_be_is_refused_in_one_line(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"data: want \{path: FILE, weight: NUMBER\}, weight above 0") as error:
        resolve(tmp_path, f"data: [ok.jsonl, {entry}]")
    assert str(error.value).count("want") == str(error.value).count("got") == 1


def test_a_day_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="template_date: month must be in"):
        resolve(tmp_path, "template_date: 2024-13-01")
