"""The demo, cut short: two steps and three requests on the real model, and everything it promises to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KEYS = {
    "exact_match_before", "exact_match_after", "train_seconds", "peak_memory_mb", "planned_memory_mb", "adapter",
}  # fmt: skip


def test_a_short_demo_writes_its_numbers_and_its_adapter(tmp_path: Path, root: Path, smollm2_path: Path) -> None:
    demo = [sys.executable, str(root / "examples" / "demo.py"), "--out", str(tmp_path)]
    done = subprocess.run([*demo, "--steps", "2", "--requests", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert set(result) == KEYS
    assert result["exact_match_before"] == 0.0, "the model knew the commands before it was taught"
    assert 0 < result["peak_memory_mb"] <= 1500
    assert result["peak_memory_mb"] <= result["planned_memory_mb"] * 1.05, "the plan does not hold what it promised"
    assert (Path(result["adapter"]) / "adapter_model.safetensors").is_file()
    for text in ("Five held-out requests", "planned for training", str(tmp_path), "2 optimizer steps"):
        assert text in done.stdout, f"not shown: {text}"
