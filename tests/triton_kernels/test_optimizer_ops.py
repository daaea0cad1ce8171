"""Norm, clip and AdamW: the oracles of tests/ops; gradients and their state are fp32 whatever the compute dtype."""

from __future__ import annotations

import pytest
import torch
from ops import test_optimizer_ops as oracle
from ops.memory import GuardedMemory
from ops.test_optimizer_ops import (  # these ask for fp32_ops: collected again, with this folder's fixtures
    test_a_skipped_step_changes_no_bit,
    test_no_tokens_skips,
    test_non_finite_gradient_or_loss_skips,
    test_the_norm_does_not_overflow_in_fp32,
    test_zero_gradient_is_an_update_not_a_skip,
)

from quatrain.ops.adamw.triton import adamw_step
from quatrain.ops.select import Ops

__all__ = [
    "test_a_skipped_step_changes_no_bit",
    "test_no_tokens_skips",
    "test_non_finite_gradient_or_loss_skips",
    "test_the_norm_does_not_overflow_in_fp32",
    "test_zero_gradient_is_an_update_not_a_skip",
]


@pytest.mark.parametrize(("size", "max_norm"), [(0.5, 1.0), (1.0, 1.0), (100.0, 3.0)])
def test_clip_is_clip_grad_norm(
    memory: GuardedMemory, fp32_ops: Ops, random: torch.Generator, size: float, max_norm: float
) -> None:
    oracle.test_clip_is_clip_grad_norm(memory, fp32_ops, torch.float32, random, size, max_norm)


def test_a_sum_with_more_blocks_than_programs(
    memory: GuardedMemory, fp32_ops: Ops, random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quatrain.ops.grad_norm.triton.SQUARES_PARTS", 4)
    oracle.test_clip_is_clip_grad_norm(memory, fp32_ops, torch.float32, random, 2.0, 1.0)


def test_more_segments_than_the_kernel_reads_at_once(memory: GuardedMemory, fp32_ops: Ops) -> None:
    grads = [torch.full((1,), float(i)) for i in range(150)]
    want = sum(i * i for i in range(150)) ** 0.5 / 5
    assert oracle.clip(memory, fp32_ops, grads, 5, 1.0)[1] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("size", [1, 37, 2100])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_three_steps_equal_torch_adamw(
    memory: GuardedMemory, fp32_ops: Ops, random: torch.Generator, size: int, weight_decay: float
) -> None:
    oracle.test_three_steps_equal_torch_adamw(memory, fp32_ops, torch.float32, random, size, weight_decay)


def test_late_steps_and_other_betas(memory: GuardedMemory, fp32_ops: Ops) -> None:
    """The bias corrections in closed form: with m = v = 0 before step t, the first update is
    lr (1 - b1) / (1 - b1^t) / (sqrt((1 - b2) / (1 - b2^t)) + eps) for a gradient of 1."""
    lr, eps = 1e-2, 1e-6
    for t, (b1, b2) in ((1, (0.9, 0.999)), (1000, (0.9, 0.999)), (7, (0.0, 0.5)), (10**7, (0.99, 0.9999))):
        param, m, v = (memory.holding(torch.zeros(3)) for _ in range(3))
        scalars = torch.tensor(1.0).double(), torch.tensor(False), torch.tensor(lr).double(), torch.tensor(t - 1)
        fp32_ops.adamw_step(param, m, v, torch.ones(3), *scalars, (b1, b2), eps, 0.0)
        want = lr * (1 - b1) / (1 - b1**t) / (((1 - b2) / (1 - b2**t)) ** 0.5 + eps)
        assert -param[1].item() == pytest.approx(want, rel=1e-6), t  # ten roundings of fp32


def test_the_compute_copy_follows_and_a_skipped_step_leaves_it(memory: GuardedMemory, random: torch.Generator) -> None:
    for skip in (False, True):
        param, m, v = (memory.holding(torch.rand(9, generator=random)) for _ in range(3))
        copy = memory.holding(torch.full((9,), -3.0, dtype=torch.float16))
        one = torch.tensor(1.0).double()
        scalars = one, torch.tensor(skip), one, torch.tensor(4)
        adamw_step(param, m, v, torch.ones(9), *scalars, (0.9, 0.99), 1e-8, 0.0, copy)
        assert torch.equal(copy, torch.full_like(copy, -3.0) if skip else param.half())
