"""Head and cross-entropy on the supervised rows against autograd in fp64, in every chunking."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from ops.backends import Implementation
from ops.memory import GuardedMemory
from oracles import autograd

from quatrain.ops.select import Ops

CASES = {
    # T, H, V, supervised rows
    "one-of-each": (1, 1, 2, [0]),
    "none": (4, 3, 5, []),
    "all": (6, 8, 113, [0, 1, 2, 3, 4, 5]),
    "some-out-of-order": (9, 33, 97, [7, 0, 3, 8]),
    "last-only": (12, 16, 31, [11]),
    "several-slices-of-vocabulary": (70, 72, 517, [*range(0, 69, 2), 69]),
}


def run(
    memory: GuardedMemory,
    ops: Ops,
    dtype: torch.dtype,
    case: tuple[int, int, int, list[int]],
    chunk: int,
    size: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    tokens, h, v, rows = case
    random = torch.Generator().manual_seed(tokens * v)
    hidden = (size * torch.randn(tokens, h, generator=random, dtype=torch.float64)).to(dtype)
    head = torch.randn(v, h, generator=random, dtype=torch.float64).to(dtype)
    at, targets = torch.tensor(rows, dtype=torch.int64), torch.randint(0, v, (len(rows),), generator=random)
    wide = tol.accumulator(dtype)
    losses, dhidden = memory.output(len(rows), dtype=wide), memory.output(tokens, h, dtype=dtype)
    ops.head_loss(losses, dhidden, hidden, at, targets, head, memory.output(chunk, v, dtype=wide))
    return losses, dhidden, hidden, at, targets, head


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradient(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, case: tuple, chunk: int) -> None:
    losses, dhidden, hidden, at, targets, head = run(memory, ops, dtype, case, chunk)
    hidden64 = autograd.leaf(hidden)
    logits = hidden64[at] @ head.double().T
    want = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (want_dhidden,) = torch.autograd.grad(want.sum(), hidden64)
    wide = tol.accumulator(dtype)
    # Logits and probabilities of a bf16 model are products in bf16; a loss errs by the logits' absolute error.
    logit_error = (tol.elementwise(dtype, 1) + tol.reduction(wide, case[1])) * float(
        logits.detach().abs().max() if len(at) else 0
    )
    assert torch.allclose(losses.double(), want, rtol=tol.elementwise(wide, 8), atol=2 * logit_error + 1e-300)
    assert bool(torch.isfinite(dhidden).all())
    room = 4 * logit_error + tol.reduction(wide, case[2]) + tol.elementwise(dtype, 2)
    row_size = float(head.double().norm(dim=1).max())
    assert float((dhidden.double() - want_dhidden).norm(dim=1).max()) <= room * row_size
    others = torch.ones(len(hidden), dtype=torch.bool)
    others[at] = False
    assert not dhidden[others].any()  # C2: exactly zero where nothing is supervised


def test_chunking_changes_nothing(memory: GuardedMemory, implementation: Implementation, ops: Ops) -> None:
    """C2: the sum over chunks is the whole, whatever the chunk, and a chunk alone never divides by its own count."""
    dtype = implementation.dtype
    results = [run(memory, ops, dtype, CASES["some-out-of-order"], chunk)[:2] for chunk in (1, 2, 4, 100)]
    for losses, dhidden in results[1:]:
        if implementation.native:  # each row is computed by itself
            assert torch.equal(losses, results[0][0]) and torch.equal(dhidden, results[0][1])
        else:
            tol.assert_close(losses, results[0][0], tol.reduction(dtype, 97), "losses")
            tol.assert_close(dhidden, results[0][1], tol.reduction(dtype, 97), "dhidden")


def test_losses_alone(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    """Evaluation asks for no gradient and gets the same losses."""
    losses, _, hidden, at, targets, head = run(memory, ops, dtype, CASES["all"], 4)
    again = memory.output(len(at), dtype=losses.dtype)
    ops.head_loss(again, None, hidden, at, targets, head, memory.output(4, 113, dtype=losses.dtype))
    assert torch.equal(again, losses)


def test_large_logits_stay_finite(memory: GuardedMemory, fp32_ops: Ops) -> None:
    losses, dhidden, *_ = run(memory, fp32_ops, torch.float32, CASES["all"], 4, size=1e4)
    assert bool(torch.isfinite(losses).all()) and bool(torch.isfinite(dhidden).all())


def test_nearly_sure_predictions_keep_their_gradient(
    memory: GuardedMemory, implementation: Implementation, ops: Ops
) -> None:
    """The gradient at the target is p - 1, here about -1e-4, and the gradient of the row nearly that times the target's
    row of the head. From a probability rounded to the compute dtype it would be zero in bf16."""
    dtype, width, v = implementation.dtype, 64, 40
    if not implementation.native and dtype == torch.bfloat16:
        pytest.skip("the reference makes bf16 logits with torch's bf16 product")
    head = torch.eye(width, dtype=torch.float64)[:v]
    hidden, targets = torch.zeros(3, width, dtype=torch.float64), torch.tensor([0, 17, 39])
    hidden[torch.arange(3), targets] = 13.0  # exact in bf16: the logits are 13 and 0
    losses, dhidden = memory.output(3, dtype=tol.accumulator(dtype)), memory.output(3, width, dtype=dtype)
    logits = memory.output(3, v, dtype=tol.accumulator(dtype))
    ops.head_loss(losses, dhidden, hidden.to(dtype), torch.arange(3), targets, head.to(dtype), logits)
    p = (hidden @ head.T).softmax(-1)
    want = (p - torch.nn.functional.one_hot(targets, v)) @ head
    # exp and the logarithm of the sum in the accumulator: a loss of 1e-4 is a difference of numbers of size 13.
    room = 13 * tol.elementwise(tol.accumulator(dtype), 4) + tol.elementwise(dtype, 2) * float(want.abs().max())
    assert float((dhidden.double() - want).abs().max()) <= room
