"""The arena hands out the plan's slots, exactly, and shows misuse."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from quatrain.errors import PlanError
from quatrain.memory.arena import POISON_INT, Arena
from quatrain.memory.plan import ALIGN, Held, MemoryPlan, Slot, overlay

SLOTS = [
    Slot("a", "x", (3, 5), torch.float32),
    Slot("a", "ids", (7,), torch.int64),
    Slot("b", "y", (1,), torch.bfloat16),
    Slot("b", "none", (0,), torch.float32),
]


def test_slots_have_their_shape_and_dtype_and_do_not_overlap() -> None:
    arena = Arena(SLOTS, poison=False)
    ends = []
    for slot in SLOTS:
        tensor = arena[slot.name]
        assert tensor.shape == slot.shape and tensor.dtype == slot.dtype and tensor.is_contiguous()
        ends.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
    assert all(before[1] <= after[0] for before, after in pairwise(ends[:3]))
    assert arena.nbytes == sum(slot.nbytes for slot in SLOTS) == 3 * ALIGN


def test_poisoned_slots_start_as_nan_and_0xaa() -> None:
    arena = Arena(SLOTS)  # the suite poisons by default
    assert bool(arena["x"].isnan().all()) and bool(arena["y"].isnan().all())
    assert bool((arena["ids"].view(torch.uint8) == POISON_INT).all())


def test_release_poisons_again_and_leaves_the_others() -> None:
    arena = Arena(SLOTS)
    arena["x"].fill_(1.0)
    arena["y"].fill_(2.0)
    arena.release([arena["x"]])
    assert bool(arena["x"].isnan().all()) and arena["y"].item() == 2.0


@pytest.mark.parametrize("offset", [-1, ALIGN])
def test_a_stray_write_beside_a_slot_is_found(offset: int) -> None:
    arena = Arena(SLOTS)
    arena.check_guards()
    block, start = arena._block, arena["x"].data_ptr() - arena._block.data_ptr()
    block[start + offset] = 0
    with pytest.raises(AssertionError, match=r"outside its slot just before: (x|ids)"):
        arena.check_guards()


def test_an_unknown_or_doubled_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        Arena(SLOTS)["z"]
    with pytest.raises(ValueError, match="two slots are named 'x'"):
        Arena([*SLOTS, SLOTS[0]])


def test_plan_adds_up_and_refuses_with_the_largest_groups() -> None:
    plan = MemoryPlan(tuple(SLOTS), (Held("weights", "linears", 10_000_000),))
    assert plan.total_bytes == 10_000_000 + 3 * ALIGN
    assert plan.groups() == {"weights": 10_000_000, "a": 2 * ALIGN, "b": ALIGN}
    plan.require(plan.total_bytes)
    with pytest.raises(PlanError, match=r"needs 10 MB and the budget is 9 MB \(largest: weights 10 MB"):
        plan.require(9_000_000)


def test_an_overlay_is_as_large_as_its_largest_part() -> None:
    early = [Slot("s", "a", (40,), torch.float32), Slot("s", "b", (3,), torch.int64)]
    inner = overlay("s", "late", [Slot("s", "c", (20,), torch.float32)], [Slot("s", "d", (2,), torch.float64)])
    plan = MemoryPlan((*overlay("s", "shared", early, inner), SLOTS[0]), ())
    assert plan.total_bytes == plan.groups()["s"] + ALIGN == 192 + 64 + ALIGN
    arena = Arena(plan.slots)
    assert arena.nbytes == plan.total_bytes
    starts = {name: arena[name].data_ptr() - arena["shared"].data_ptr() for name in ("a", "b", "late", "c", "d")}
    assert starts == {"a": 0, "b": 192, "late": 0, "c": 0, "d": 0}
    assert arena["b"].dtype == torch.int64 and arena["d"].shape == (2,)
    for name in starts:
        arena[name].zero_()
    assert bool(arena["x"].isnan().all())
    arena.check_guards()
