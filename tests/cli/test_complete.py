"""Shell completion, as bash asks for it: by environment variables, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; sys.argv[0] = 'quatrain'; from quatrain.cli.main import main; sys.exit(main())"


def ask(folder: Path, instruction: str, words: str = "", *arguments: str) -> list[str]:
    asked = {"_QUATRAIN_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], env={**os.environ, **asked}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("quatrain tr", ["train"]),
        ("quatrain train --learn", ["--learning-rate"]),
        ("quatrain train --schedule ", ["cosine", "linear", "constant"]),
        ("quatrain train --kernels avx", ["avx2", "avx512", "avx512_bf16"]),
        ("quatrain train --eval-every ", ["epoch"]),
        ("quatrain train --model smo", ["smollm2-135m"]),
        ("quatrain train --lora-targets q_proj,v", ["q_proj,v_proj"]),
        ("quatrain train --adapter ", ["runs/a", "runs/b"]),
        ("quatrain train --out runs/", ["runs/a", "runs/b"]),
        ("quatrain chat --model runs/a", ["runs/a"]),
        ("quatrain adapter ru", ["runs/a", "runs/b"]),
        ("quatrain train --data no", []),  # bash then offers file names
    ],
)
def test_bash_is_offered_what_fits(tmp_path: Path, words: str, want: list[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    assert ask(tmp_path, "complete_bash", words) == want


def test_the_script_for_bash(tmp_path: Path) -> None:
    script = " ".join(ask(tmp_path, "source_bash"))
    assert "_QUATRAIN_COMPLETE=complete_bash" in script and script.endswith("quatrain")
