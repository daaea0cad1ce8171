"""What a run measures of a GPU before it plans, on a torch.cuda that only answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quatrain.engine import setup
from quatrain.memory.ledger import Ledger

GIB = 1 << 30


def test_workspaces_of_another_run_of_the_process_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its captured steps have their addresses. Alone, the measuring product's own workspace is given back."""
    cleared: list[str] = []
    ledger = Ledger(tmp_path / "gpu.json", 100 * GIB)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(setup, "device_ledger", lambda: ledger)
    answers: dict[str, Any] = {
        "synchronize": None, "mem_get_info": (90 * GIB, 100 * GIB), "memory_reserved": 9 * GIB,
        "get_device_capability": (9, 0), "empty_cache": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append("yes"), raising=False)
    assert setup.measured_costs().context == GIB and cleared == ["yes"]
    number = ledger.reserve(GIB, "the first run")
    assert setup.measured_costs().context == GIB and cleared == ["yes"]
    ledger.release(number)
    setup.measured_costs()
    assert cleared == ["yes", "yes"]
