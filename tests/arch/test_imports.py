"""Imports go one way through the rooms of `src/quatrain`; references and the run time stay free of other packages.

Every import counts, also one inside a function: a lazy import would only hide a wrong direction.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "quatrain"

LEVELS = (
    ("errors",),
    ("config", "memory", "profile"),
    ("ops",),
    ("model", "optim", "data"),
    ("engine", "checkpoint", "distributed", "pages"),
    ("train",),
    ("bench",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ORACLES = {"transformers", "peft", "bitsandbytes", "accelerate"}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file; `from a import b` gives `a.b`. Relative ones are refused."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: relative import, want the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a dotted name or a path inside the package belongs to; None for the package itself."""
    first = name.removeprefix("quatrain.").replace("/", ".").split(".")[0]
    return first if first in LEVEL else None


def violations(source: Path) -> list[str]:
    """One line for each import that breaks a rule of the project."""
    files = sorted(source.rglob("*.py"))
    assert len(files) >= 30, f"only {len(files)} files under {source}: the check would prove nothing"
    found, siblings = [], {}
    for path in files:
        inside = path.relative_to(source)
        room = room_of(inside.as_posix())
        if room is None and inside.as_posix() not in ("__init__.py", "__main__.py"):
            found.append(f"{inside}: in no room of {sorted(LEVEL)}")
        for line, name in imports_of(path):
            where = f"{inside}:{line} imports {name}"
            top = name.split(".")[0]
            if top in ORACLES:
                found.append(f"{where}: a test oracle at run time")
            if inside.name == "reference.py" and not _allowed_in_reference(name):
                found.append(f"{where}: a reference uses torch, the standard library, other references and errors")
            other = room_of(name) if top == "quatrain" else None
            if room is None or other is None or other == room:
                continue
            if LEVEL[other] > LEVEL[room]:
                found.append(f"{where}: {room} is below {other}")
            elif LEVEL[other] == LEVEL[room]:
                siblings[room, other] = where
    found += [f"{where}: {b} imports {a} too" for (a, b), where in siblings.items() if (b, a) in siblings]
    return found


def _allowed_in_reference(name: str) -> bool:
    top = name.split(".")[0]
    return top == "torch" or top in sys.stdlib_module_names or name.startswith(("quatrain.ops.", "quatrain.errors."))


def test_imports_go_one_way() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("errors.py", "import quatrain.config", "errors is below config"),
        ("ops/nf4/reference.py", "from quatrain.model.spec import ModelSpec", "ops is below model"),
        ("data/row.py", "from quatrain.checkpoint import peft", "data is below checkpoint"),
        ("train/loop.py", "def late():\n    from quatrain.cli import main", "train is below cli"),
        ("engine/step.py", "import quatrain.train.loop", "engine is below train"),
        ("train/run.py", "import quatrain.bench.run", "train is below bench"),
        ("pages/shell.py", "import quatrain.train.run", "pages is below train"),
        ("model/params.py", "import quatrain.optim.optimizer", "model imports optim too"),
        ("ops/nf4/reference.py", "import numpy", "a reference uses torch"),
        ("checkpoint/peft.py", "from peft import PeftModel", "a test oracle at run time"),
        ("helpers.py", "", "in no room"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    copy = tmp_path / "quatrain"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / file).open("a", encoding="utf-8") as planted:
        planted.write(f"\n{line}\n")
    found = violations(copy)
    assert found and any(complaint in text for text in found), found


def test_heavy_packages_stay_out_until_needed() -> None:
    code = (
        "import sys, quatrain, quatrain.config, quatrain.errors, quatrain.cli.main\n"
        "heavy = {'torch', 'triton', 'numpy', 'tokenizers', 'gguf', 'transformers', 'peft', 'bitsandbytes', 'pyarrow'}"
        "\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
