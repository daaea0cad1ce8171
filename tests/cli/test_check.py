"""`quatrain check`: the view in the terminal, rows by place, tokens, JSON, the page, --strict, and what train says."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_model import write_tiny_model

from quatrain.cli import console as terminal
from quatrain.cli.main import main

COLOURS = ("red", "blue", "green", "grey")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    rows = [
        {"instruction": f"Paint it {c} in the {n}th room", "response": f"It is {c}, {n}."}
        for n, c in enumerate(COLOURS)
    ]
    write(folder / "rows.jsonl", rows)
    write(folder / "doubled.jsonl", [*rows, rows[1]])
    write(folder / "rendered.jsonl", [row | {"response": row["response"] + "<|im_end|>"} for row in rows])
    return folder


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(world: Path, *words: str) -> int:
    return main(["check", "--model", str(world / "model"), *words])


def in_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 80) -> io.StringIO:
    """What is printed to a coloured terminal of that width."""
    shown = io.StringIO()
    coloured = Console(
        file=shown, force_terminal=True, width=width, color_system="standard", highlight=False, markup=False
    )
    monkeypatch.setattr(terminal, "stdout", lambda: coloured)
    return shown


def test_findings_have_places_and_advice(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(world, str(world / "doubled.jsonl")) == 0
    said = capsys.readouterr().out
    assert "warning    duplicates: 1 of 5 rows (20%) are copies of an earlier row" in said
    assert f"{world}/doubled.jsonl:5: see {world}/doubled.jsonl:2" in said and "→ leave the copies out" in said
    assert "learn an end token last  5" in said
    assert check(world, str(world / "rows.jsonl")) == 0
    assert "findings   nothing looks wrong" in capsys.readouterr().out


def test_strict_makes_warnings_an_exit_code(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(world, str(world / "doubled.jsonl"), "--strict") == 3
    assert capsys.readouterr().err == "error: warnings, and --strict is given: duplicates\n"
    assert check(world, str(world / "rows.jsonl"), "--strict") == 0
    words = ("--validation", str(world / "doubled.jsonl"), "--strict")
    assert check(world, str(world / "rows.jsonl"), *words) == 3
    assert capsys.readouterr().err.endswith("overlap, duplicates\n")


def test_rows_by_place_and_token_by_token(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(world, str(world / "rows.jsonl"), "--row", "rows.jsonl:3", "--row", "rows.jsonl:1", "--tokens") == 0
    said = capsys.readouterr().out
    assert re.findall(r"^sample +(\S+)$", said, re.MULTILINE) == [f"{world}/rows.jsonl:3", f"{world}/rows.jsonl:1"]
    table = [line.split(maxsplit=3) for line in said.split("rows.jsonl:1\n")[-1].splitlines()]
    assert table[0] == ["place", "id", "label", "text"]
    texts = "".join(row[3][1:-1] for row in table[1:])
    assert texts.startswith("<|im_start|>user\\nPaint it red") and texts.endswith("It is red, 0.<|im_end|>\\n")
    learned = [row for row in table[1:] if row[2] != "-100"]
    assert all(row[1] == row[2] for row in learned) and learned[-1][3] == '"<|im_end|>"'
    assert "".join(row[3][1:-1] for row in learned) == "It is red, 0.<|im_end|>"


def test_a_place_may_be_spelled_as_a_shell_does(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    for place in ("./rows.jsonl:3", f"{world}/rows.jsonl:3"):
        assert check(world, "rows.jsonl", "--row", place) == 0
        assert "sample     rows.jsonl:3 " in capsys.readouterr().out
    assert check(world, "rows.jsonl", "--row", "") == 2


def test_a_row_that_is_not_there(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(world, str(world / "rows.jsonl"), "--row", "rows.jsonl:99") == 2
    assert "error: row: no row that is used is at rows.jsonl:99" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 2, 9])
def test_as_many_samples_as_asked_for(world: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert check(world, str(world / "rows.jsonl"), "--samples", str(number)) == 0
    assert capsys.readouterr().out.count("\nsample ") == min(number, 4)


def test_long_lines_wrap_below_their_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far in as they begin, and an option stays whole."""
    shown = in_terminal(monkeypatch, 40)
    terminal.block(terminal.stdout(), "rows", ["  f.jsonl:1: a number; use --json-fields response"])
    _, *below = re.sub(r"\x1b\[[\d;]*m", "", shown.getvalue()).splitlines()
    assert below == [" " * 13 + "--json-fields response"]


def test_in_a_terminal_of_80_columns(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours and nothing beyond the margin; what is learned is green, special tokens are magenta."""
    shown = in_terminal(monkeypatch)
    assert check(world, str(world / "doubled.jsonl"), "--max-seq-len", "128") == 0
    said = shown.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", said)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b[1;33mwarning" in said and "\x1b[1;32mIt" in said.replace("\x1b[0m\x1b[1;32m", "")
    assert "\x1b[1;7;32m<|im_end|>" in said and "\x1b[35m<|im_end|>" in said and "[[" not in plain
    assert "── max_seq_len 128: 0 rows longer ──" in plain
    assert "█" in plain


def test_a_terminal_is_not_at_the_mercy_of_the_data(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"instruction": "a\x1b[2J\x07\u202eb", "response": "c\x1b]0;title\x07 [[not learned]] [bold]"}
    write(tmp_path / "rows.jsonl", [hostile])
    assert check(world, str(tmp_path / "rows.jsonl")) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "\u202e" not in said
    assert (
        "a\\u001b[2J\\u0007\\u202eb" in said and "[[c\\u001b]0;title\\u0007 [[not learned]] [bold]<|im_end|>]]" in said
    )
    shown = in_terminal(monkeypatch)
    assert check(world, str(tmp_path / "rows.jsonl"), "--tokens") == 0
    assert not re.search("\x1b(?!\\[[\\d;]*m)|\x07|\u202e", shown.getvalue())


def test_json_holds_all_of_it(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(world / "rows.jsonl"), "--json", "--validation", str(world / "doubled.jsonl"), "--samples", "1"]
    assert check(world, *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(f["kind"], f["severity"], f["count"]) for f in facts["findings"]] == [("overlap", "warning", 5)]
    assert [f["kind"] for f in facts["validation_report"]["findings"]] == ["duplicates"]
    assert sum(facts["histogram"]["rows"]) == facts["used"] == 4 and facts["problem"] is None
    assert facts["token_counts"]["learn an end token last"] == 4 and facts["max_seq_len"] == 512
    (sample,) = facts["samples"]
    assert "".join(t["text"] for t in sample["tokens"]) == "".join(s["text"] for s in sample["segments"])
    assert check(world, str(world / "rendered.jsonl"), "--json") == 3
    assert "template-twice" in json.loads(capsys.readouterr().out)["problem"]


def test_without_a_row_nothing_is_said_to_be_right(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"a": "b"}\n')
    assert check(world, str(tmp_path / "odd.jsonl"), "--html", str(tmp_path / "page.html")) == 3
    shown = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    assert all("here is no row to look at" in said and "othing looks wrong" not in said for said in shown)


def test_the_page_is_written(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert check(world, str(world / "rendered.jsonl"), "--html", str(page)) == 3
    assert f"page       {page}" in capsys.readouterr().out
    assert "cannot be trained on" in page.read_text(encoding="utf-8")
    assert check(world, str(world / "rows.jsonl"), "--html", str(tmp_path / "no" / "page.html")) == 2
    assert "html: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--dump"])
def test_no_data_file_is_written_over(
    world: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a training file nor a validation file, however it is spelled."""
    rows, held = (world / name for name in ("rows.jsonl", "doubled.jsonl"))
    before = rows.read_bytes(), held.read_bytes()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(held)
    for target in (str(rows), f"{world}/../{world.name}/rows.jsonl", "link"):
        assert check(world, f"{rows}@2", "--validation", str(held), option, target) == 2
        assert f"{option[2:]}: {target} is a data file" in capsys.readouterr().err
    assert (rows.read_bytes(), held.read_bytes()) == before


def test_a_name_that_is_not_utf_8(world: Path, tmp_path: Path) -> None:
    """A surrogate stands for the odd byte in JSON, as Python reads it."""
    data, dump = tmp_path / os.fsdecode(b"\xff.jsonl"), tmp_path / "rows.tok"
    data.write_bytes((world / "rows.jsonl").read_bytes())
    assert check(world, str(data), "--dump", str(dump)) == 0
    assert json.loads(dump.read_text().splitlines()[0])["source"] == f"{data}:1"


def test_train_says_what_was_found_and_refuses_what_is_certainly_wrong(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, B16: a template applied twice stops the run before weights are read, unless it is allowed by name."""

    def train(name: str, *more: str) -> int:
        words = ["--model", str(world / "model"), "--data", str(world / name), "--out", str(tmp_path / "out")]
        return main(["train", *words, "--max-steps", "1", "--compute-dtype", "fp32", "--lora-rank", "4", *more])

    assert train("doubled.jsonl") == 0
    assert "1 warning: duplicates (1); `quatrain check` shows where" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("quatrain.checkpoint.load.load_params", lambda *_, **__: pytest.fail("weights were read"))
        assert train("rendered.jsonl", "--overwrite") == 3
    said = capsys.readouterr().err
    assert said.startswith("error: template-twice: 4 of 4 rows (100%)") and "rendered.jsonl:1" in said
    assert "--allow template-twice" in said
    assert train("rendered.jsonl", "--overwrite", "--allow", "template-twice") == 0
    assert "1 error: template-twice (4)" in capsys.readouterr().out
