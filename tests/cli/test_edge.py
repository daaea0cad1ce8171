"""The edge of the program: help without torch, one-line errors, exit codes, documents that are current."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from quatrain.cli import docs, errors
from quatrain.cli.main import COMMANDS, main
from quatrain.errors import ConfigError, DataError, PlanError

HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub", "jinja2"}
NAMES = [module.NAME for module in COMMANDS]


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in NAMES)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom quatrain.cli.main import main\n"
        f"code = main({words!r})\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\nassert not loaded, loaded\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: quatrain" in done.stdout


def test_help_fills_its_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A paragraph is broken at the terminal's width alone: of all its lines only the last is short."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["export", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("Merges the adapter"))
    paragraph = lines[begin : lines.index("", begin)]
    assert len(paragraph) > 2 and all(len(line) > 60 for line in paragraph[:-1])


@pytest.mark.parametrize("module", ["quatrain", "quatrain.cli"])
def test_python_m(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("quatrain "), done.stderr


def test_what_standard_output_cannot_hold(tmp_path: Path) -> None:
    """A character that its encoding lacks is written as its code; a full disk is told as one."""
    (tmp_path / "rows ü.jsonl").write_text('{"instruction": "a", "response": "b"}\n' * 2, encoding="utf-8")
    write_tiny_model(tmp_path / "model")
    words = [
        sys.executable,
        "-m",
        "quatrain",
        "check",
        "--model",
        "model",
        "--no-cache",
        "rows ü.jsonl",
        "rows ü.jsonl",
    ]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=tmp_path, env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0 and "rows \\xfc.jsonl" in done.stdout, done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4 and "No space left" in done.stderr and "bug" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    """What would be written there is dropped; the command does its work, and its exit code is that of an open one."""
    for words, code in (("cache --cache-dir folder", 0), ("cache --cache-dir folder --clear none", 2)):
        line = f'"$0" -m quatrain {words} {closed}'
        done = subprocess.run(["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert "bug" not in done.stderr and "Traceback" not in done.stderr


def test_a_name_that_is_too_long_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows, out = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / ("x" * 300)
    write_tiny_model(model)
    rows.write_text('{"instruction": "a", "response": "b"}\n')
    assert main(["train", "--model", str(model), "--data", str(rows), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{out}: File name too long" in said and "a shorter name" in said and "bug" not in said


def test_the_check_of_imports_can_fail() -> None:
    code = f"import sys, torch\nassert not ({HEAVY!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


def test_the_commands_are_these() -> None:
    assert NAMES == [
        "init", "train", "check", "plan", "eval", "chat", "runs", "report", "export", "adapter", "cache", "bench",
        "doctor", "schema",
    ]  # fmt: skip


def test_docs_are_current(root: Path) -> None:
    assert (root / "docs" / "cli.md").read_text() == docs.render(), (
        "write it again: python -m quatrain.cli.docs > docs/cli.md"
    )


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["trian"], "No such command 'trian'", "quatrain --help"),
        (["train", "--lerning-rate", "1"], "No such option: --lerning-rate", "quatrain train --help"),
        (["train", "--epochs"], "'--epochs' requires an argument", "quatrain train --help"),
        (["train"], "nothing given for model, data, out", "--model and --data and --out"),
        (["train", "--lr", "x"], "learning_rate: want a valid number", None),
        (["train", "--config", "none.yaml"], "config: cannot read none.yaml", None),
        (["eval", "--model", "m"], "no data file given", "quatrain eval"),
        (["chat"], "nothing given for model", "--model"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str, hint: str | None
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and lines[0].startswith("error: ") and message in lines[0]
    assert "Traceback" not in said.err
    assert hint is None or any(line.startswith("try: ") and hint in line for line in lines)


def test_the_chain_of_causes_and_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise OSError("disk on fire")
        except OSError as cause:
            raise PlanError("cannot go on", hint="try water") from cause
    except PlanError as error:
        assert errors.report(error, debug=False) == 4
    assert capsys.readouterr().err.splitlines() == [
        "error: cannot go on",
        "cause: OSError: disk on fire",
        "try: water",
    ]


def test_traceback_only_with_debug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("quatrain.cli.doctor.examine", bug)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert (
        "Traceback" not in said
        and "error: unexpected RuntimeError: a bug of ours" in said
        and "bug in Quatrain" in said
    )
    assert main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_path_without_access_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(PermissionError(13, "Permission denied", "shut/rows.jsonl"), debug=False) == 1
    said = capsys.readouterr().err
    assert said == "error: shut/rows.jsonl: Permission denied\ntry: allow access to it and its folders\n"


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("x"), 2), (DataError("x"), 3), (PlanError("x"), 4), (MemoryError(), 4)]
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(error, debug=False) == code


def test_interrupted_before_anything_was_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quatrain.cli.doctor.examine", interrupted)
    assert main(["doctor"]) == 130 and "interrupted" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_accident() -> None:
    code = (
        "import sys\nfrom quatrain.cli import docs, main\n"
        "import quatrain.cli.doctor as doctor\n"
        "doctor.examine = lambda: {str(i): 'x' * 99 for i in range(99999)}\n"
        "sys.exit(main.main(['doctor', '--json']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 1 and said == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("quatrain 0.")


def test_doctor_tells_machines_and_people_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """M5: the build of torch, the driver and why CUDA is not used."""
    import torch

    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {
        "python",
        "system",
        "cpu",
        "memory",
        "disk",
        "torch",
        "kernels",
        "cuda",
        "packages",
        "compiler",
    }
    assert facts["torch"]["build"] == torch.__version__ and facts["memory"]["available_bytes"] > 0
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and facts["cuda"]["usable"] in said
