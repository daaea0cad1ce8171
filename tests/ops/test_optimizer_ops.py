"""Norm, clip and AdamW against torch.optim and clip_grad_norm_."""

from __future__ import annotations

import math

import pytest
import tolerances as tol
import torch
from ops import backends
from ops.memory import GuardedMemory

from quatrain.ops.select import Ops

# The optimizer's state is never bf16.
STATES = {name: one for name, one in backends.ALL.items() if one.dtype != torch.bfloat16}
EVERY_STATE = pytest.mark.parametrize("implementation", STATES.values(), ids=STATES)


def clip(
    memory: GuardedMemory, ops: Ops, grads: list[torch.Tensor], tokens: int, max_norm: float | None, loss: float = 1.0
) -> tuple[float, float, bool]:
    """(scale, norm, skip) of the op for gradients summed over `tokens` tokens."""
    squares = memory.output(len(grads), dtype=torch.float64)
    for slot, grad in zip(squares, grads, strict=True):
        ops.sum_squares(slot, grad)
    scale, norm = memory.output(dtype=torch.float64), memory.output(dtype=torch.float64)
    skip = memory.output(dtype=torch.bool)
    ops.clip_scale(scale, norm, skip, squares, torch.tensor(loss, dtype=torch.float64), torch.tensor(tokens), max_norm)
    return scale.item(), norm.item(), bool(skip)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("max_norm", [1.0, 3.0])
@EVERY_STATE
def test_clip_is_clip_grad_norm(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, size: float, max_norm: float
) -> None:
    tokens = 7
    grads = [torch.randn(n, generator=random, dtype=dtype) for n in (1, 13, 70_001)]
    total = torch.cat(grads).norm()
    grads = [grad * (size * tokens / total) for grad in grads]
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad / tokens
    want_norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm).item()

    scale, norm, skip = clip(memory, ops, grads, tokens, max_norm)
    assert norm == pytest.approx(size, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-6) and not skip
    for leaf, grad in zip(leaves, grads, strict=True):
        tol.assert_close(grad * scale, leaf.grad, 1e-6, "clipped gradient")
    assert clip(memory, ops, grads, tokens, None)[:2] == (pytest.approx(1 / tokens), norm)


def test_three_four_clipped_to_one(memory: GuardedMemory, fp32_ops: Ops) -> None:
    """F13: a total gradient (3, 4) becomes (0.6, 0.8); the logged norm is the 5 before clipping."""
    scale, norm, skip = clip(memory, fp32_ops, [torch.tensor([6.0]), torch.tensor([8.0])], 2, 1.0)
    assert (norm, skip) == (5.0, False)
    assert (6 * scale, 8 * scale) == (pytest.approx(0.6, rel=1e-6), pytest.approx(0.8, rel=1e-6))


def test_the_norm_does_not_overflow_in_fp32(memory: GuardedMemory, fp32_ops: Ops) -> None:
    scale, norm, skip = clip(memory, fp32_ops, [torch.tensor([1e30, 1e30])], 1, 1.0)
    assert norm == pytest.approx(math.sqrt(2) * 1e30, rel=1e-6) and not skip and scale == pytest.approx(1 / norm)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_non_finite_gradient_or_loss_skips(
    memory: GuardedMemory, fp32_ops: Ops, bad: float, max_norm: float | None
) -> None:
    good = torch.ones(3)
    assert clip(memory, fp32_ops, [good, torch.tensor([1.0, bad])], 4, max_norm)[0::2] == (0.0, True)
    assert clip(memory, fp32_ops, [good], 4, max_norm, loss=bad)[0::2] == (0.0, True)
    assert clip(memory, fp32_ops, [good], 4, max_norm)[2] is False


def test_no_tokens_skips(memory: GuardedMemory, fp32_ops: Ops) -> None:
    assert clip(memory, fp32_ops, [torch.zeros(3)], 0, 1.0)[0::2] == (0.0, True)


def test_zero_gradient_is_an_update_not_a_skip(memory: GuardedMemory, fp32_ops: Ops) -> None:
    assert clip(memory, fp32_ops, [torch.zeros(3)], 2, 1.0) == (0.5, 0.0, False)


@EVERY_STATE
@pytest.mark.parametrize("size", [1, 37, (1 << 18) + 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_three_steps_equal_torch_adamw(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, size: int, weight_decay: float
) -> None:
    betas, eps = (0.9, 0.95), 1e-8
    start = torch.randn(size, generator=random, dtype=dtype)
    leaf = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([leaf], betas=betas, eps=eps, weight_decay=weight_decay)
    param, moments = memory.holding(start), [memory.holding(torch.zeros_like(start)) for _ in range(2)]
    step = torch.tensor(0)
    for lr, scale in ((3e-3, 1.0), (2e-3, 0.25), (0.0, 1e-3)):  # the learning rate changes every step
        grad = torch.randn(size, generator=random, dtype=dtype)
        leaf.grad = grad * scale
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        scale64, lr64 = torch.tensor(scale, dtype=torch.float64), torch.tensor(lr, dtype=torch.float64)
        ops.adamw_step(param, *moments, grad, scale64, torch.tensor(False), lr64, step, betas, eps, weight_decay)
        step += 1
    bound = tol.OPTIMIZER if dtype == torch.float32 else 1e-12
    tol.assert_close(param - start, leaf.detach() - start, 1e-4 if dtype == torch.float32 else 1e-10, "change")
    tol.assert_close(param, leaf, bound, "parameter")
    state = optimizer.state[leaf]
    tol.assert_close(moments[0], state["exp_avg"], bound, "exp_avg")
    tol.assert_close(moments[1], state["exp_avg_sq"], bound, "exp_avg_sq")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_changes_no_bit(
    memory: GuardedMemory, fp32_ops: Ops, random: torch.Generator, bad: float
) -> None:
    """G2: parameters and moments keep their bits, whatever the gradient holds."""
    tensors = [torch.rand(9, generator=random) for _ in range(3)]
    held = [memory.holding(tensor) for tensor in tensors]
    grad = torch.ones(9)
    grad[4] = bad
    zero, lr = torch.tensor(0.0).double(), torch.tensor(1e-3).double()
    fp32_ops.adamw_step(*held, grad, zero, torch.tensor(True), lr, torch.tensor(5), (0.9, 0.999), 1e-8, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(held, tensors, strict=True))
