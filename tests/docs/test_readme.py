"""README is run: its make targets exist, its commands and its Python work, its links and files are there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """An empty folder with a small rows.jsonl, as a reader would have."""
    folder = tmp_path_factory.mktemp("reader")
    rows = (root / "examples" / "smart_home" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str, program: str) -> list[list[str]]:
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program + " ")]


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_make_targets_exist(readme: str, root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[1] for words in commands(readme, "make")} | set(re.findall(r"`make ([a-z]+)`", readme))
    assert {"demo", "test"} <= named <= targets
    assert len(targets) <= 8, "small on purpose"


def test_the_commands_run_in_order(readme: str, workplace: Path, smollm2_path: Path) -> None:
    listed = commands(readme, "quatrain")
    assert {words[1] for words in listed} == {
        "check",
        "plan",
        "train",
        "eval",
        "chat",
        "runs",
        "export",
        "cache",
        "doctor",
    }
    for words in listed:
        output = run([sys.executable, "-m", "quatrain.cli", *words[1:]], workplace)
        assert output.strip(), f"{shlex.join(words)} said nothing"
    assert (workplace / "runs" / "first" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_python_runs(readme: str, workplace: Path, smollm2_path: Path) -> None:
    (code,) = blocks(readme, "python")
    lines = run([sys.executable, "-c", code], workplace).splitlines()
    losses = [float(line) for line in lines[:3]]
    assert losses[2] < losses[0], f"three steps on one row did not lower its loss: {losses}"
    assert (workplace / "adapter" / "adapter_config.json").is_file()


def test_links_and_named_files_exist(readme: str, root: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    files = re.findall(r"`((?:bench|scripts|src|docs|examples)/[\w./]+)`", readme)
    assert len(links) >= 5 and len(files) >= 3
    missing = [name for name in links + files if not (root / name).exists()]
    assert missing == []
