"""The smart home data set: the files are what the script writes, and held-out rows are new in words and in meaning."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

KEYS = ["device", "room", "action", "value"]


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_smart_home", root / "scripts" / "make_smart_home.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, list[dict[str, str]]]:
    """The committed files, read without the script's help."""
    folder = root / "examples" / "smart_home"
    names = ("train", "held_out")
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")] for name in names}


def test_the_files_are_what_the_script_writes(script: ModuleType, root: Path) -> None:
    for name, examples in zip(("train", "held_out"), script.make(), strict=True):
        written = (root / "examples" / "smart_home" / f"{name}.jsonl").read_bytes()
        assert written == script.jsonl(examples).encode(), f"{name}.jsonl is stale: run `make data`"
    assert script.make(seed=8) != script.make(), "the seed has no effect"


def test_enough_different_rows(rows: dict[str, list[dict[str, str]]]) -> None:
    requests = {name: [row["instruction"] for row in part] for name, part in rows.items()}
    assert len(requests["train"]) >= 400 and 100 <= len(requests["held_out"]) <= 120
    for part in requests.values():
        assert len(set(part)) == len(part)


def test_held_out_phrasings_and_combinations_are_recorded_as_new(script: ModuleType) -> None:
    train, held_out = script.make()
    assert not {example.phrasing for example in train} & {example.phrasing for example in held_out}
    assert not {example.combination for example in train} & {example.combination for example in held_out}
    # Each part of a held-out command has been taught, only never together.
    for part in ("device", "room", "action", "value"):
        assert {getattr(example, part) for example in held_out} <= {getattr(example, part) for example in train}


def test_held_out_phrasings_and_combinations_are_new_in_the_files(rows: dict[str, list[dict[str, str]]]) -> None:
    """The same without what the script says about itself: commands compared as text, sentences without their room and
    value."""
    assert not {row["response"] for row in rows["train"]} & {row["response"] for row in rows["held_out"]}
    assert not {skeleton(row) for row in rows["train"]} & {skeleton(row) for row in rows["held_out"]}


def skeleton(row: dict[str, str]) -> str:
    command = json.loads(row["response"])
    text = row["instruction"].lower().replace(command["room"], "ROOM")
    return re.sub(rf"\b{re.escape(str(command['value']))}\b", "VALUE", text)


def test_commands_are_strict_json(rows: dict[str, list[dict[str, str]]]) -> None:
    for row in rows["train"] + rows["held_out"]:
        command = json.loads(row["response"])
        assert list(command) == KEYS
        assert json.dumps(command, separators=(",", ":")) == row["response"]
        assert command["room"] in row["instruction"].lower()
        assert command["value"] is None or str(command["value"]) in row["instruction"].lower()
