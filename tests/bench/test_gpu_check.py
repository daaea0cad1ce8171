"""`scripts/gpu_check.py` without a GPU: what it says then, and a rehearsal of its kernel section in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quatrain.bench.cases import Case
from quatrain.ops import triton_configs
from quatrain.ops.select import Backend, Ops

pytest.importorskip("triton.language", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/gpu_sections.py as a module that looks at swiglu alone."""
    spec = importlib.util.spec_from_file_location("gpu_sections", ROOT / "bench/gpu_sections.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    every = module.cases

    def some(*args: Any) -> Iterator[Case]:
        return (case for case in every(*args) if case.name.startswith("swiglu"))

    monkeypatch.setattr(module, "cases", some)
    monkeypatch.setattr(triton_configs, "PRODUCTS", triton_configs.PRODUCTS)  # which the section sets
    return module


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "scripts/gpu_check.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_a_rehearsal_writes_its_report(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.json"
    done = run("--device", "cpu", "--quick", "--only", "kernels_bf16,kernels_fp16,sync", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["device"] == "cpu_rehearsal" and report["quick"] and report["seconds"] > 0
    sections = {section["name"]: section for section in report["sections"]}
    assert {name: section["status"] for name, section in sections.items()} == {
        "kernels_bf16": "skipped", "kernels_fp16": "ok", "sync": "skipped"
    }  # fmt: skip
    rows = {row["check"]: row for row in sections["kernels_fp16"]["rows"]}
    assert {"attention backward", "head and loss", "adamw", "nf4 quantise"} < rows.keys()
    assert {f"gate+up backward, {route}" for route in ("dense", "blas", "fused")} < rows.keys()
    for row in rows.values():
        assert row["ok"] and row["dtype"] == "fp16" and 0 <= row["error"] <= row["bound"], row
    assert any(row["error"] > 0 for row in rows.values())
    assert "nearest to its bound" in done.stdout


def swiglu(op: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[[Any, torch.dtype], Backend]:
    """A `Where.backend` whose swiglu_forward is made from the right one."""

    def backend(where: Any, dtype: torch.dtype) -> Backend:
        right = triton_backend(dtype, "sm_80")

        def bind(scratch: torch.Tensor) -> Ops:
            ops = right.bind(scratch)
            return replace(ops, swiglu_forward=op(ops.swiglu_forward))

        return replace(right, bind=bind)

    from quatrain.ops.select import triton_backend

    return backend


def test_a_wrong_and_a_crashing_kernel_are_rows(sections: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kernel behind them is still looked at."""

    def wrong(right: Callable[..., None]) -> Callable[..., None]:
        def call(out: torch.Tensor, *inputs: torch.Tensor) -> None:
            right(out, *inputs)
            out.mul_(1.1)

        return call

    def crashing(right: Callable[..., None]) -> Callable[..., None]:
        def call(*tensors: torch.Tensor) -> None:
            raise RuntimeError("misaligned address\nand more")

        return call

    where = sections.Where("cpu", True, time.monotonic() + 60)
    found = []
    for op in (lambda right: right, wrong, crashing):
        monkeypatch.setattr(sections.Where, "backend", swiglu(op))
        forward, backward = sections.kernels(where, "fp32")
        assert forward["check"] == "swiglu forward" and backward["ok"] is True
        found.append(forward)
    assert [row["ok"] for row in found] == [True, False, False]
    assert found[1]["error"] == pytest.approx(0.1, rel=0.01)
    assert found[2]["message"] == "RuntimeError: misaligned address"


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("--out", str(tmp_path / "report.json"))
    assert done.returncode == 1 and not (tmp_path / "report.json").exists()
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("gpu_check: no GPU to check: torch ")


def test_an_unknown_section_is_refused() -> None:
    done = run("--only", "kernel,speeed")
    assert done.returncode == 2 and "want some of environment, kernels_bf16" in done.stderr
