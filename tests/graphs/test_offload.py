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

from quatrain.config import GenerateConfig, InstructConfig
from quatrain.engine.device import HostDevice
from quatrain.engine.device_layout import DeviceCosts, DeviceRequest, lay_out_on_device
from quatrain.engine.layout import Layout
from quatrain.engine.streamed_head import streamed_head
from quatrain.errors import PlanError
from quatrain.model.shapes import shape_spec
from quatrain.ops.select import triton_backend
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


HEADS = [families.BY_NAME["llama"], next(v for v in families.ONE_PER_FAMILY if v.options.get("tie_word_embeddings"))]


@pytest.mark.parametrize("variant", HEADS, ids=str)
@pytest.mark.parametrize("device", [Tape, Late])
def test_a_streamed_head_is_a_resident_one_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: type[Tape], variant: families.Variant
) -> None:
    """Steps, evaluation and generated tokens; with every copy at the last moment as well."""
    monkeypatch.setattr("quatrain.engine.device_layout.HEAD_TILE_BYTES", 5000)
    tape, options = device(), {"micro_batch_tokens": 512, "cuda_graph": "off" if device is Late else "auto"}
    streamed = open_on_tape(variant, tmp_path / "a", tape, head_on_host=True, **options)
    resident = open_on_tape(variant, tmp_path / "b", Tape(), **options)
    tile, vocab = streamed.layout.head_tile, streamed.spec.vocab_size
    assert 0 < 2 * tile < vocab and vocab % tile and streamed.layout.embed_on_host and resident.layout.head_tile == 0
    assert train(streamed) == train(resident)
    assert torch.equal(streamed.token_losses(rows_of([30, 9], 1)), resident.token_losses(rows_of([30, 9], 1)))
    assert_same_bits(bits(streamed), bits(resident))
    prompts, config = [list(row.input_ids) for row in rows_of([4, 9], 2)], GenerateConfig(max_new_tokens=9)
    assert streamed.generate_ids(prompts, config) == resident.generate_ids(prompts, config)
    if isinstance(tape, Late):
        assert tape.open == []
    else:
        assert tape.launches > 10


@pytest.mark.parametrize("broken", ["wait", "buffer"])
def test_a_tile_that_is_used_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without its wait, or where the next one lands in the same buffer."""
    monkeypatch.setattr("quatrain.engine.device_layout.HEAD_TILE_BYTES", 5000)
    tape = Late()
    streamed = open_on_tape(VARIANT, tmp_path / "a", tape, head_on_host=True, cuda_graph="off", **OPTIONS)
    resident = open_on_tape(VARIANT, tmp_path / "b", Tape(), cuda_graph="off", **OPTIONS)
    if broken == "wait":
        monkeypatch.setattr(tape, "wait", lambda handle: None)
    else:
        buffers = streamed.engine.arena["head tile.0"]
        streamed.engine._head = streamed_head(streamed.engine.params.head, [buffers, buffers], HostDevice())
    assert train(streamed, 1) != train(resident, 1)


def test_the_head_goes_last_and_only_where_that_saves() -> None:
    """By budgets: everything resident, the head streamed, and too little for either. Of a small vocabulary two tiles
    would be more than the head."""

    def laid_out(budget: float, shape: str = "qwen3-8b", **changes: object) -> Layout:
        config = InstructConfig(micro_batch_tokens=4096, max_seq_len=2048, checkpoint="block")
        spec = replace(shape_spec(shape), **changes)
        backend = triton_backend(torch.bfloat16, "sm_90")
        return lay_out_on_device(
            DeviceRequest(spec, config, torch.bfloat16, backend, int(budget), 0, True, DeviceCosts())
        )

    def least(shape: str, **changes: object) -> tuple[Layout, Layout]:
        """With all room, and with as little as still works."""
        found = [laid_out(80e9, shape, **changes)]
        for budget in range(int(found[0].plan.total_bytes), 0, -(100 << 20)):
            try:
                found.append(laid_out(budget, shape, **changes))
            except PlanError:
                break
        return found[0], found[-1]

    for shape in ("qwen3-8b", "qwen3-4b"):  # a head of its own, and a tied one
        spec, (roomy, tight) = shape_spec(shape), least(shape)
        tile, head = tight.head_tile * spec.hidden_size * 2, spec.vocab_size * spec.hidden_size * 2
        assert roomy.head_tile == 0 and roomy.offloaded == 0 and tight.offloaded > 0
        assert tight.choices[0].startswith("the output head stays on the host: every pass over it, two for each chunk")
        assert f"tiles of {tight.head_tile} rows" in tight.choices[0] and "embedding stays" in tight.choices[1]
        on_device = {entry.name: entry.nbytes for entry in tight.plan.entries}
        assert not {"embedding", "output head"} & on_device.keys()
        assert on_device["head tile.0"] == on_device["head tile.1"] == tile <= 64 << 20
        pinned = {entry.name: entry.nbytes for entry in tight.plan.host if entry.group == "pinned"}
        assert head <= pinned["output head" if shape == "qwen3-8b" else "embedding"] < 2 * head
    assert least("qwen3-4b", vocab_size=12_000)[1].head_tile == 0
