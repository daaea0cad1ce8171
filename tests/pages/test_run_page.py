"""The page of a run from its files: what it shows, also of runs that are young, broken, or of another version."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pages.test_shell import HOSTILE, Balanced

from quatrain.pages.metrics import Metrics, read_metrics
from quatrain.pages.run import run_page

RECORD: dict[str, Any] = {
    "started": "2026-11-30T14:04:41+00:00",
    "versions": {"quatrain": "0.1.0", "torch": "2.13"},
    "machine": {"system": "Linux", "processor": "a processor"},
    "model": {"name": "SmolLM2", "family": "llama", "layers": 2},
    "options": {"model": "m.gguf", "learning_rate": 0.001, "clip": "global", "max_grad_norm": 1.0, "track": []},
    "given": {"learning_rate": 0.001, "overwrite": True},
    "notes": ["no evaluation will happen"],
    "model_sha256": "ab" * 32, "data_sha256": "cd" * 32,
    "data": {
        "files": ["rows.jsonl"], "read": 10, "train_rows": 7, "validation_rows": 2, "skipped": {"too long": 1},
        "histogram": {"edges": [0, 5, 10], "rows": [3, 4], "supervised": [7, 0]},
        "lengths": {"min": 3, "median": 5, "mean": 5.0, "p95": 9, "max": 11, "total": 45},
        "samples": [{"source": "rows.jsonl:1", "segments": [{"text": "Say", "supervised": False},
                                                            {"text": "learned", "supervised": True}]}],
        "findings": [{"kind": "twins", "severity": "warning", "count": 3, "text": "3 of 10 rows have equal answers",
                      "places": ["rows.jsonl:4"]}],
    },
    "threads": 2, "kernels": {"name": "avx2", "reason": "the strongest"}, "device": "cpu",
    "steps": {"total": 40, "warmup": 1},
    "modules": {"q_proj": {"modules": 2, "parameters": 1000}},
    "plan": {"total_bytes": 2_000_000_000, "groups": {"weights": 1_500_000_000, "process": 500_000_000}, "choices": []},
    "samples": [{"source": "rows.jsonl:9", "prompt": "Say yes.", "answer": "yes"}],
    "result": {"ending": "running"},
}  # fmt: skip


def a_step(step: int, **more: Any) -> dict[str, Any]:
    line = {"step": step, "epoch": step / 20, "loss": 2.0 / step, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100}
    return {**line, "response_tokens": 50, "tokens_per_s": 200.0, "skipped": False, **more}


def some_metrics() -> Metrics:
    metrics = Metrics()
    for step in range(1, 11):
        metrics.add(a_step(step))
    layers = {"adapter_norms": [0.5, None], "grad_norms": [0.25, 0.125], "peak_memory_bytes": 1_900_000_000}
    metrics.add(a_step(11, loss=None, grad_norm=None, skipped=True, **layers))
    metrics.add({"step": 10, "eval_loss": 0.75, "eval_perplexity": 2.117, "samples": ["an early answer"]})
    metrics.add({"step": 11, "eval_loss": 0.8, "eval_perplexity": 2.2255, "samples": ["a late answer"]})
    return metrics


def test_a_running_page_shows_everything_and_follows_the_run() -> None:
    text = run_page("first", RECORD, some_metrics(), "2026-11-30 14:09:00")
    Balanced(text)
    assert '<meta http-equiv="refresh"' in text and ">running</span>" in text
    for part in (
        "11 of 40", "0.7500", "best, at step 10", "1,900 MB", "planned 2,000 MB", "95%",  # the measured share
        "0:06", "about 0:15 left",  # 11 steps of half a second, and 29 more
        "skipped steps", "no evaluation will happen",
        "warning: 3 of 10 rows have equal answers (rows.jsonl:4)", "0: 3", "5: 4", "0: 7",
        "rows.jsonl:4", "<mark>learned</mark>",
        "left out: too long", "avx2: the strongest", "2026-11-30 14:04", "Say yes.", "an early answer", "a late answer",
        "Gradient norm of each layer", "clipped above", "ab" * 32, "updated 2026-11-30 14:09:00",
    ):  # fmt: skip
        assert part in text, part
    assert text.index("a late answer") < text.index("an early answer")


def test_an_ended_page_stands_still() -> None:
    text = run_page(
        "first", {**RECORD, "result": {"ending": "finished", "peak_memory_bytes": 1_950_000_000}}, Metrics()
    )
    assert "http-equiv" not in text and ">finished</span>" in text and "1,950 MB" in text
    assert "pill bad" in run_page("first", {**RECORD, "result": {"ending": "failed"}}, Metrics())


def test_a_page_of_nothing_is_a_page() -> None:
    """A run folder that another version wrote, or whose run ended at once."""
    text = run_page("first", {}, Metrics())
    Balanced(text)
    assert ">unknown</span>" in text and "no value yet" in text


def test_hostile_text_of_the_data_stays_text() -> None:
    record = json.loads(json.dumps(RECORD).replace("Say", "<script>alert(1)</script>"))
    record["data"]["files"] = [HOSTILE]
    assert "<script" not in run_page(HOSTILE, record, some_metrics())


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(a_step(1)), "{", "[]", '{"step": "x", "loss": 1}', "\x00\xff", json.dumps(a_step(2, loss=None))]
    path.write_text("\n".join(lines) + '\n{"step": 3, "lo')
    metrics = read_metrics(path)
    assert list(metrics.steps) == [1, 2] and metrics.points("loss") == [(1, 2.0), (2, None)]
    assert math.isnan(metrics.columns["loss"][1])
    assert list(read_metrics(tmp_path / "absent").steps) == []
