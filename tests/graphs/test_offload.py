"""Block inputs on the host: the same bits, in any order of copies that the promises allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from graphs.standin import Tape, open_on_tape, rows_of
from graphs.test_captured_steps import assert_same_bits, bits, train
from oracles import families

from quatrain.errors import PlanError
from quatrain.train.pipeline import InstructPipeline

VARIANT = replace(families.BY_NAME["llama"], options={**families.BY_NAME["llama"].options, "num_hidden_layers": 9})
OPTIONS = {"micro_batch_tokens": 128, "checkpoint": "block", "lora_dropout": 0.3}


@dataclass
class Late(Tape):
    """Every copy happens at the last moment: when somebody waits for it. A missing wait reads or keeps stale rows."""

    open: list[Callable[[], None]] = field(default_factory=list)

    def copy_aside(self, to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            self.open.remove(copy)
            to.copy_(source)

        self.open.append(copy)
        return copy

    def wait(self, handle: Callable[[], None]) -> None:
        handle()


def open_offloading(folder: Path, tape: Tape, count: int, **options: object) -> InstructPipeline:
    """A pipeline that offloads `count` block inputs, by a budget that leaves no other way."""
    plain = open_on_tape(VARIANT, folder / "plain", Tape(), **{**OPTIONS, **options})
    row = next(slot.nbytes for slot in plain.plan().slots if slot.name == "hidden.0")
    budget = plain.plan().total_bytes - (count - 3) * row
    return open_on_tape(VARIANT, folder / "offloading", tape, budget=budget, **{**OPTIONS, **options})


@pytest.mark.parametrize("count", [4, 6, 9])
@pytest.mark.parametrize("device", [Tape, Late])
def test_offloaded_is_kept_bit_for_bit(tmp_path: Path, count: int, device: type[Tape]) -> None:
    tape = device()
    offloading = open_offloading(tmp_path, tape, count, cuda_graph="off" if device is Late else "auto")
    kept = open_on_tape(VARIANT, tmp_path / "kept", Tape(), **OPTIONS)
    assert offloading.layout.offloaded == count and kept.layout.offloaded == 0
    assert f"the inputs of {count} of 9 blocks wait on the host" in " ".join(offloading.layout.choices)
    assert train(offloading) == train(kept)
    offloading.evaluate(rows_of([30, 9], 1))
    assert train(offloading, 2) == train(kept, 2)
    assert_same_bits(bits(offloading), bits(kept))
    if isinstance(tape, Late):
        assert tape.open == []  # a graph could not end with copies that nobody has waited for


@pytest.mark.parametrize("missing", ["before_write", "before_read"])
def test_a_missing_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(f"quatrain.engine.offload.Offload.{missing}", lambda self, layer: None)
    offloading = open_offloading(tmp_path, Late(), 9, cuda_graph="off")
    kept = open_on_tape(VARIANT, tmp_path / "kept", Tape(), **OPTIONS)
    results = train(offloading, 2), train(kept, 2)
    assert results[0] != results[1]


def test_what_offloading_saves_and_where_it_ends(tmp_path: Path) -> None:
    kept = open_on_tape(VARIANT, tmp_path / "a", Tape(), **OPTIONS).plan()
    most = open_offloading(tmp_path, Tape(), 9).plan()
    row = next(slot.nbytes for slot in kept.slots if slot.name == "hidden.0")
    assert kept.total_bytes - most.total_bytes == (9 - 3) * row
    assert next(entry.nbytes for entry in most.host if entry.name == "block inputs") == (9 - 3) * row
    with pytest.raises(PlanError, match="the budget is"):
        open_on_tape(VARIANT, tmp_path / "b", Tape(), budget=most.total_bytes - 1, **OPTIONS)


def test_an_offloaded_input_has_no_slot_of_its_own(tmp_path: Path) -> None:
    arena = open_offloading(tmp_path, Tape(), 5).engine.arena
    names = ("ring.0", "ring.2", "ring.3", "hidden.0", "hidden.4", "hidden.5", "hidden.9")
    assert [name for name in names if name in arena] == ["ring.0", "ring.2", "hidden.5", "hidden.9"]
