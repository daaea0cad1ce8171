"""The head's Triton kernels: the oracles of tests/ops, and what only a list of static size has: inert entries."""

from __future__ import annotations

import pytest
import torch
from ops.memory import GuardedMemory
from ops.test_head_loss import CASES, run, test_large_logits_stay_finite, test_losses_alone, test_losses_and_gradient

from quatrain.ops.select import Ops

__all__ = ["test_large_logits_stay_finite", "test_losses_alone", "test_losses_and_gradient"]


@pytest.fixture(autouse=True, params=["shipped", "small"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped blocks, and blocks so small that vocabulary and hidden size cross many."""
    from quatrain.ops.triton_configs import TABLE

    if request.param == "small":
        for key, block in {"head_rows": 32, "cross_entropy": 128}.items():
            monkeypatch.setitem(TABLE, key, {"*": {"BLOCK": block, "num_warps": 4, "num_stages": 1}})


@pytest.mark.parametrize("chunk", [2, 64])
def test_inert_entries_change_nothing(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, chunk: int) -> None:
    """Their row numbers are those of a supervised row, or none at all; their losses are 0, all other bits the same."""
    losses, dhidden, hidden, at, targets, head = run(memory, ops, dtype, CASES["some-out-of-order"], chunk)
    rows, wanted = torch.cat((at, at[:1].repeat(3), torch.tensor([10**6]))), torch.full((8,), -1)
    wanted[:4] = targets
    padded, dpadded = memory.output(8), memory.output(*hidden.shape, dtype=dtype)
    ops.head_loss(padded, dpadded, hidden, rows, wanted, head, memory.output(chunk, len(head)))
    assert torch.equal(padded[:4], losses) and not padded[4:].any()
    assert torch.equal(dpadded, dhidden)


def test_equal_bits_every_time(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    first, second = (run(memory, ops, dtype, CASES["some-out-of-order"], 2)[:2] for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_overflow_shows(memory: GuardedMemory, ops: Ops) -> None:
    """Logits beyond fp16 make a loss that is not finite, never a wrong one."""
    losses, _, *_ = run(memory, ops, torch.float16, CASES["all"], 4, size=6e4)
    assert not torch.isfinite(losses).any()


def test_a_vocabulary_in_bf16(memory: GuardedMemory) -> None:
    """The kernel alone, whose arithmetic is fp32: logits [c, V] become their gradient in place. The interpreter cuts
    off where a GPU rounds: one step of bf16."""
    from quatrain.ops.head_loss.triton import cross_entropy_kernel

    logits = torch.randn(3, 301, generator=torch.Generator().manual_seed(1)).mul_(4).bfloat16()
    targets, losses = torch.tensor([300, -1, 0]), memory.output(3)
    wide = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, targets, ignore_index=-1, reduction="none")
    (gradient,) = torch.autograd.grad(want.sum(), wide)
    in_place = memory.holding(logits)
    cross_entropy_kernel[(3,)](losses, in_place, targets, 301, GRADIENT=True, BLOCK=128)
    assert torch.allclose(losses.double(), want, rtol=1e-5, atol=0) and losses[1] == 0
    assert torch.allclose(in_place.double(), gradient, rtol=2**-7, atol=0)
