"""Which row of PRODUCTS the measuring script prints, and a rehearsal of it in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_products", root / "scripts" / "measure_products.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("tokens", "work"), [(64, 2.0**34), (0, 0.0), (256, float("inf")), (16, 2.0**24)])
def test_the_row_behind_the_times_is_found(script: ModuleType, tokens: int, work: float) -> None:
    """Times in which each way is the fastest just where that row takes it: nothing is lost."""
    times = []
    for t in script.TOKENS:
        for n, k in ((1024, 4096), (4096, 12288), (2048, 1024)):
            fastest = "fused" if t <= tokens else "blas" if t * n * k >= work else "dense"
            times.append(script.Timed(t, n, k, {way: 1.0 if way == fastest else 1.5 for way in script.WAYS}))
    row = script.best_row(times)
    assert script.loss(row, times) == 1.0 and row[0] == tokens
    assert script.loss((512, 2.0**30), times) > 1.01
    assert all(timed.taken(row) == timed.taken((tokens, work)) for timed in times)


def test_rows_are_written_as_the_table_has_them(script: ModuleType) -> None:
    rows = [(64, 2.0**34), (0, 0.0), (16, float("inf"))]
    assert [script.written(row) for row in rows] == ["(64, 2**34)", "(0, 0)", '(16, float("inf"))']
    assert [eval(script.written(row)) for row in rows] == rows


def test_a_rehearsal(root: Path) -> None:
    words = [sys.executable, "scripts/measure_products.py", "--device", "cpu", "--dtype", "fp32"]
    done = subprocess.run(words, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +\d+ +\d+ +\d+ +[\d,.]+ +[\d,.]+ +[\d,.]+$", done.stdout, re.M)) == 4
    assert re.search(r'^    "ampere/fp32": \(\d+, (0|2\*\*\d+|float\("inf"\))\),$', done.stdout, re.M), done.stdout
