"""`quatrain init`: a file that `train` takes as it is, made from what the data shows; the schema it points to."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_model import write_rows, write_tiny_model

from quatrain.cli import init
from quatrain.cli.main import main
from quatrain.cli.options import read_yaml
from quatrain.cli.schema import schema
from quatrain.cli.starter import NOT_IN_A_FILE, scalar
from quatrain.config import DataOptions
from quatrain.errors import ConfigError
from quatrain.train.settings import OPTION_SETS, Settings

FIELDS = {name: field for options in OPTION_SETS for name, field in options.model_fields.items()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "my rows.jsonl", 48)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*more: str) -> int:
    return main(["init", "run.yaml", "--model", "model", "--data", "my rows.jsonl", *more])


def test_train_takes_the_file_unchanged(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P3: what the file says is what the run does; a flag beats it, also one that says the same thing otherwise."""
    assert start("--out", "runs/a: b") == 0
    said = capsys.readouterr().out
    assert "48 rows read, 48 usable" in said and "max_seq_len: 64 (the longest row has" in said
    assert "quatrain train --config run.yaml" in said
    assert main(["train", "--config", "run.yaml"]) == 0
    assert json.loads((world / "runs/a: b/run.json").read_text())["options"]["epochs"] == 3
    assert main(["train", "--config", "run.yaml", "--max-steps", "2", "--overwrite"]) == 0
    options = json.loads((world / "runs/a: b/run.json").read_text())["options"]
    want = {"model": "model", "data": ["my rows.jsonl"], "max_seq_len": 64, "val_split": 0.1, "lora_rank": 16}
    assert {name: options[name] for name in want} == want
    assert options["max_steps"] == 2 and options["epochs"] is None  # epochs is 3 in the file


def test_every_option_is_there_with_its_description_and_its_default(world: Path) -> None:
    """P3: taking the comment marks away changes nothing: the defaults shown are the defaults."""
    assert start() == 0
    text = (world / "run.yaml").read_text()
    for name, field in FIELDS.items():
        shown = f"\n{name}:" in text or f"\n# {name}:" in text
        assert shown == (name not in NOT_IN_A_FILE), name
        assert shown <= (field.description.split()[0] in text)
    bare = [line.removeprefix("# ") for line in text.splitlines()]
    (world / "all.yaml").write_text("\n".join(line for line in bare if line.partition(":")[0] in FIELDS))
    given, full = read_yaml(world / "run.yaml"), read_yaml(world / "all.yaml")
    assert len(full) == len(FIELDS) - len(NOT_IN_A_FILE) > len(given) + 20
    assert Settings.resolve(full).resolved() == Settings.resolve(given).resolved()


def test_nothing_is_overwritten_unasked(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P6: neither an earlier file nor a foreign one under the schema's name."""
    (world / "run.yaml").write_text("mine\n")
    assert start() == 2 and "run.yaml exists" in capsys.readouterr().err
    assert (world / "run.yaml").read_text() == "mine\n" and not (world / "quatrain.schema.json").exists()
    assert start("--overwrite") == 0
    (world / "run.yaml").unlink()
    assert start() == 0  # the schema of the first time is ours, and written again
    (world / "run.yaml").unlink()
    (world / "quatrain.schema.json").write_text('{"title": "mine"}')
    assert start() == 2 and "is no schema of Quatrain's" in capsys.readouterr().err
    assert not (world / "run.yaml").exists()


def test_a_folder_is_no_file(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["init", ".", "--model", "model", "--data", "my rows.jsonl"], ["schema", "."]):
        assert main([*words, "--overwrite"]) == 2
        assert ". is a folder" in capsys.readouterr().err


def test_a_data_file_whose_name_is_not_utf_8(world: Path) -> None:
    name = os.fsdecode(b"\xff.jsonl")
    (world / "my rows.jsonl").rename(world / name)
    assert main(["init", "--model", "model", "--data", name]) == 0
    assert read_yaml(world / "quatrain.yaml")["data"] == [name]


def test_without_a_terminal_flags_are_needed(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["init"]) == 2
    assert "give --model and --data" in capsys.readouterr().err
    assert main(["init", "--yes", "--model", "model"]) == 2
    assert "give --data FILE" in capsys.readouterr().err
    assert list(world.glob("*.yaml")) == []


def test_in_a_terminal_it_asks(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("model\n'my rows.jsonl'\n\n"))
    assert main(["init"]) == 0
    given = read_yaml(world / "quatrain.yaml")
    assert (given["model"], given["data"], given["out"]) == ("model", ["my rows.jsonl"], "runs/my rows")


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"question": "a", "answer": "b", "id": 1}, {"prompt_field": "question", "response_field": "answer"}),
        ({"Question ": "a", "Answer": "b"}, {"prompt_field": "Question ", "response_field": "Answer"}),
        ({"instruction": "a", "output": {"x": 1}, "tags": [1]}, {"json_fields": ["output"]}),
        (
            {"query": "a", "label": ["b"]},
            {"prompt_field": "query", "response_field": "label", "json_fields": ["label"]},
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {}),
        ({"instruction": "a", "response": "b"}, {}),
    ],
    ids=lambda value: ",".join(value),
)
def test_fields_are_found(world: Path, row: dict[str, Any], want: dict[str, Any]) -> None:
    (world / "odd.jsonl").write_text((json.dumps(row) + "\n") * 3)
    assert main(["init", "--model", "model", "--data", "odd.jsonl"]) == 0
    given = read_yaml(world / "quatrain.yaml")
    assert {name: value for name, value in given.items() if name in DataOptions.model_fields} == {
        **want, "val_split": "0",
    }  # fmt: skip
    assert main(["check", "--config", "quatrain.yaml"]) == 0


def test_fields_that_mean_nothing_are_said(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "odd.jsonl").write_text('{"a": "b", "c": "d"}\n')
    assert main(["init", "--model", "model", "--data", "odd.jsonl"]) == 3
    assert "no row of odd.jsonl can be used" in capsys.readouterr().err
    assert not (world / "quatrain.yaml").exists()


def test_one_row_after_one_without_fields(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fields are those of the first row that has any."""
    (world / "odd.jsonl").write_text('{}\n{"question": "q", "answer": "a"}\n')
    (world / "one.jsonl").write_text('{"instruction": "q", "output": "a"}\n')
    assert main(["init", "odd.yaml", "--model", "model", "--data", "odd.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "prompt_field: question" in said and "1 of 2 rows cannot be used" in said
    assert main(["init", "one.yaml", "--model", "model", "--data", "one.jsonl", "--overwrite"]) == 0
    assert "1 row read, 1 usable" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", ["yes", "null", "a: b", "a #b", "- x", "", "007", "a, b", "it's", '"', "x\ny", "[", "1e-4", "ü", "~"]
)
def test_text_stays_text_in_every_yaml(tmp_path: Path, value: str) -> None:
    """P1: quoted where a reader of YAML might take it for something else."""
    text = f"system: {scalar(value)}\ndata: [{scalar(value)}]\n"
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text) == {"system": value, "data": [value]}


@pytest.mark.parametrize("value", [1e-8, 2e-4, 0.0, 1.0, 0.03, 1e22])
def test_numbers_are_numbers_in_every_yaml(value: float) -> None:
    """P1: also in YAML 1.1, which takes 1e-08 for text."""
    assert yaml.safe_load(scalar(value)) == value


# The schema


def accepted(values: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft7Validator(schema()).iter_errors(values))


def test_the_starter_file_fits_its_schema(world: Path) -> None:
    assert start() == 0
    lines = (world / "run.yaml").read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=quatrain.schema.json"
    written = json.loads((world / "quatrain.schema.json").read_text())
    assert written == schema()
    jsonschema.Draft7Validator.check_schema(written)
    jsonschema.validate(yaml.safe_load((world / "run.yaml").read_text()), written)


GOOD: list[dict[str, Any]] = [
    {},
    {"model": "m", "data": "rows.jsonl", "out": "o"},
    {"data": ["a", "b"], "lora_targets": ["q_proj"], "json_fields": ["a"]},
    {"data": {"path": "a", "weight": 2}},
    {"data": ["b", {"path": "a"}]},
    {"lora_targets": "all-linear", "lr": 1e-4, "betas": [0.9, 0.95]},
    {"learning_rate": 1, "lora_alpha": 32, "seed": 0, "max_steps": None, "epochs": 3},
    {"epochs": None, "max_steps": 9},
    {"memory_budget": "1.5GB", "eval_every": 20, "save_every": "epoch"},
    {"memory_budget": "1400 MiB", "checkpoint": "block", "val_split": 0.99},
    {"memory_budget": 1_500_000_000, "template_date": "2024-01-02", "warmup_steps": 3, "use_rslora": True},
    {"batch_tokens": 400, "adapter": "runs/first", "micro_batch_tokens": 4096},
]
BAD: list[dict[str, Any]] = [
    {"learning_rat": 1e-4},
    {"learning_rate": 0},
    {"learning_rate": "fast"},
    {"lora_rank": 0},
    {"lora_rank": 1.5},
    {"lora_dropout": 1},
    {"checkpoint": "blocks"},
    {"data": {"train": "a"}},
    {"data": ["b", {"path": "a", "weight": 0}]},
    {"betas": [0.9]},
    {"betas": [0.9, 1.0]},
    {"eval_every": 0},
    {"eval_every": "step"},
    {"memory_budget": "much"},
    {"memory_budget": 0},
    {"template_date": "today"},
    {"epochs": 3, "max_steps": 9},
    {"batch_size": 4, "batch_tokens": 400},
    {"seed": -1},
    {"cache": 3},
    {"format": "xml"},
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_the_schema_takes_what_a_run_takes(values: dict[str, Any]) -> None:
    """P3, P4: no sane file is marked as wrong."""
    Settings.resolve({"learning_rate" if name == "lr" else name: value for name, value in values.items()})
    assert accepted(values)


@pytest.mark.parametrize("values", BAD, ids=str)
def test_the_schema_refuses_what_a_run_refuses(values: dict[str, Any]) -> None:
    """P3, P4: an unknown key, a wrong type, a number out of range, a contradiction."""
    with pytest.raises(ConfigError):
        Settings.resolve(values)
    assert not accepted(values)


def test_every_option_is_described_and_its_default_is_accepted() -> None:
    properties = schema()["properties"]
    assert set(properties) == {*FIELDS, "lr"}
    for name, field in FIELDS.items():
        assert properties[name]["description"] == field.description
        assert accepted({name: json.loads(json.dumps(field.get_default(call_default_factory=True)))}), name


def test_the_command_prints_and_writes_it(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert main(["schema", "here.json"]) == 0 and json.loads((world / "here.json").read_text()) == schema()
    assert main(["schema", "my rows.jsonl"]) == 2
    assert "is no schema of Quatrain's" in capsys.readouterr().err
