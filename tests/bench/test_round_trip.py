"""The round trip on the real model, cut short: four requests learned by heart, asked again of everything it became."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp's Python binding: pip install quatrain[llamacpp]")


def test_what_was_learned_is_in_every_export(tmp_path: Path, root: Path, smollm2_path: Path) -> None:
    """L5, L7: Hugging Face folder, GGUF and Ollama folder answer as the adapter does, from the ids of the training."""
    lines = (root / "examples" / "smart_home" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:4]), encoding="utf-8")
    words = ["--model", str(smollm2_path), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "run")]
    words += [
        "--max-steps",
        "14",
        "--batch-size",
        "4",
        "--lr",
        "1.5e-3",
        "--schedule",
        "constant",
        "--warmup-steps",
        "0",
    ]
    subprocess.run([sys.executable, "-m", "quatrain.cli", "train", *words, "--max-seq-len", "128"], check=True)
    script = [sys.executable, str(root / "bench" / "round_trip.py"), "--run", str(tmp_path / "run")]
    script += [
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert result["exact_match"] == {"adapter": 1.0, "hf": 1.0, "gguf": 1.0, "ollama": 1.0}
