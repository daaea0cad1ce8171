"""Attention over a packed stream against autograd in fp64: forward, every gradient, isolation and windows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import tolerances as tol
import torch
from ops import backends
from ops.backends import Implementation
from ops.memory import GuardedMemory
from oracles import autograd

from quatrain.ops.attention.cached import cached_attention_forward
from quatrain.ops.attention.reference import query_blocks
from quatrain.ops.select import Ops

CASES = {
    # lengths, Hq, Hk, D, window
    "one-token": ([1], 1, 1, 1, None),
    "rows-of-one": ([1, 1, 3, 1], 4, 2, 16, None),
    "grouped-4-2": ([5, 9], 4, 2, 16, None),
    "grouped-4-1": ([7, 2, 8], 4, 1, 18, None),
    "grouped-4-4": ([13], 4, 4, 10, None),
    "grouped-6-2-odd-head": ([3, 17], 6, 2, 7, None),
    "window-1": ([6, 1], 2, 1, 8, 1),
    "window-4": ([10, 3, 5], 4, 2, 8, 4),
    "window-wider-than-rows": ([4, 5], 4, 2, 8, 100),
    "rows-around-a-tile": ([31, 32, 33, 1, 64, 65], 4, 2, 64, None),
    "window-around-a-tile": ([100, 33, 70], 4, 2, 24, 32),
    "window-in-a-tile": ([133], 2, 1, 33, 33),
    "head-128": ([40, 5], 2, 1, 128, None),
    "head-256": ([37], 4, 1, 256, None),
    "nine-to-three": ([129, 50], 9, 3, 64, None),
    "several-query-blocks": ([300, 20], 2, 1, 8, None),
    "several-query-blocks-window": ([20, 290], 2, 2, 8, 37),
}
ORACLES: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}
LARGE = {name: one for name, one in backends.ALL.items() if one.dtype == torch.bfloat16}


class Run:
    """One forward and backward of the op on random input, with what the oracle says."""

    def __init__(
        self,
        memory: GuardedMemory,
        ops: Ops,
        dtype: torch.dtype,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        window: int | None,
        size: float = 1.0,
    ) -> None:
        self.ops = ops
        random = torch.Generator().manual_seed(sum(lengths) + heads)
        total, self.scale, wide = sum(lengths), dim**-0.5, tol.accumulator(dtype)
        self.cu_seqlens = [0, *accumulate(lengths)]

        def randn(n: int) -> torch.Tensor:
            return (size * torch.randn(total, n, dim, generator=random, dtype=torch.float64)).to(dtype)

        self.q, self.k, self.v, self.dout = randn(heads), randn(kv_heads), randn(kv_heads), randn(heads)
        self.out, self.lse = memory.output(total, heads, dim, dtype=dtype), memory.output(total, heads, dtype=wide)
        self.dq = memory.output(total, heads, dim, dtype=dtype)
        self.dk, self.dv = (memory.output(total, kv_heads, dim, dtype=dtype) for _ in range(2))
        ops.attention_forward(self.out, self.lse, self.q, self.k, self.v, self.cu_seqlens, self.scale, window)
        self.backward(self.dq, self.dk, self.dv, self.dout, window)
        self.lengths, self.window = lengths, window

    def backward(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dout: torch.Tensor, window: int | None
    ) -> None:
        self.ops.attention_backward(
            dq, dk, dv, dout, self.out, self.lse, self.q, self.k, self.v, self.cu_seqlens, self.scale, window
        )

    def oracle(self) -> dict[str, torch.Tensor]:
        """Autograd's results; the implementations of a dtype share their input, and so these."""
        key = (self.q.dtype, *self.lengths, *self.q.shape, self.k.shape[1], self.window)
        if key not in ORACLES:
            leaves = [autograd.leaf(t) for t in (self.q, self.k, self.v)]
            out = autograd.attention(*leaves, self.lengths, self.scale, self.window)
            gradients = torch.autograd.grad(out, leaves, self.dout.double())
            ORACLES[key] = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        return ORACLES[key]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_every_gradient(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, case: tuple) -> None:
    run = Run(memory, ops, dtype, *case)
    wide = tol.accumulator(dtype)
    # `out` is stored before the backward reads it for delta: that is the second rounding of dq and dk.
    bound = tol.reduction(wide, max(case[0]) * case[3]) + tol.elementwise(dtype, 4)
    for name, want in run.oracle().items():
        if float(want.norm()) > 1e-12:
            tol.assert_close(getattr(run, name), want, bound, name)
        else:  # rows of one token, window of one: the softmax is constant and dq, dk are rounding
            assert float(getattr(run, name).abs().max()) <= bound * float(run.dout.abs().max()) * 8, name


@pytest.mark.parametrize("window", [None, 3])
def test_a_row_does_not_see_its_neighbours(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, window: int | None
) -> None:
    """D2: the bits of the middle row are those it has when its neighbours are poison."""
    run = Run(memory, ops, dtype, [4, 9, 5], 4, 2, 8, window)
    row = slice(4, 13)
    want = {name: getattr(run, name)[row].clone() for name in ("out", "lse", "dq", "dk", "dv")}
    for tensor in (run.q, run.k, run.v, run.dout):
        tensor[:4] = float("nan")
        tensor[13:] = float("nan")
    ops.attention_forward(run.out, run.lse, run.q, run.k, run.v, run.cu_seqlens, run.scale, window)
    run.backward(run.dq, run.dk, run.dv, run.dout, window)
    for name, tensor in want.items():
        assert torch.equal(getattr(run, name)[row], tensor), name


def test_a_row_alone_has_the_same_bits(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    run = Run(memory, ops, dtype, [300, 40, 7], 2, 1, 8, None)
    row = slice(300, 340)
    q, k, v = run.q[row], run.k[row], run.v[row]
    out, lse = memory.output(40, 2, 8, dtype=dtype), memory.output(40, 2, dtype=run.lse.dtype)
    ops.attention_forward(out, lse, q, k, v, [0, 40], run.scale, None)
    assert torch.equal(out, run.out[row]) and torch.equal(lse, run.lse[row])


def test_dq_may_be_dout(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    run = Run(memory, ops, dtype, [290, 9], 4, 2, 8, None)
    in_place = memory.holding(run.dout)
    dk, dv = torch.empty_like(run.dk), torch.empty_like(run.dv)
    run.backward(in_place, dk, dv, in_place, None)
    assert torch.equal(in_place, run.dq) and torch.equal(dk, run.dk) and torch.equal(dv, run.dv)


def test_window_of_four_lets_token_nine_see_six_to_nine(memory: GuardedMemory, fp32_ops: Ops) -> None:
    """J10: values are one-hot positions, so the output shows who was looked at."""
    v = torch.eye(10)[:, None, :]
    q, k = torch.zeros(10, 1, 10), torch.zeros(10, 1, 10)
    out, lse = memory.output(10, 1, 10), memory.output(10, 1)
    fp32_ops.attention_forward(out, lse, q, k, v, [0, 10], 1.0, 4)
    assert out[9, 0].nonzero().flatten().tolist() == [6, 7, 8, 9]
    assert torch.allclose(out[9, 0, 6:], torch.full((4,), 0.25))
    fp32_ops.attention_forward(out, lse, q, k, v, [0, 10], 1.0, None)
    assert torch.allclose(out[9, 0], torch.full((10,), 0.1))


@pytest.mark.parametrize("implementation", LARGE.values(), ids=LARGE)
def test_large_scores_do_not_overflow(memory: GuardedMemory, ops: Ops, implementation: Implementation) -> None:
    """G1: entries of 60 with head_dim 64 give scores of 230400 before scaling; scores and softmax are fp32."""
    for dtype in (torch.bfloat16,) if implementation.native else (torch.float16, torch.bfloat16):
        q = torch.full((3, 1, 64), 60.0, dtype=dtype)
        v = torch.arange(3.0, dtype=dtype).view(3, 1, 1).expand(3, 1, 64).contiguous()
        out, lse = memory.output(3, 1, 64, dtype=dtype), memory.output(3, 1)
        ops.attention_forward(out, lse, q, q, v, [0, 3], 64**-0.5, None)
        assert out[:, 0, 0].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("length", [1, 15, 16, 255, 256, 257, 5000])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_query_blocks_cover_a_row_once(length: int, window: int | None) -> None:
    blocks = list(query_blocks(length, 8, window))
    assert [i for a, b, _ in blocks for i in range(a, b)] == list(range(length))
    assert all(lo == (0 if window is None else max(0, a - window + 1)) for a, _, lo in blocks)


CACHED = {
    # lengths, Hq, Hk, D, slots
    "one-slot": ([1], 1, 1, 1, 1),
    "grouped-4-2": ([1, 4, 5, 11], 4, 2, 8, 13),
    "nine-to-three": ([70, 33, 1], 9, 3, 64, 71),
    "ten-to-two-odd-head": ([16, 17], 10, 2, 33, 17),
    "head-128": ([40, 5], 2, 1, 128, 40),
}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("case", CACHED.values(), ids=CACHED)
def test_cached_attention_is_the_last_query_of_each_row(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, case: tuple, window: int | None
) -> None:
    """Rows of other lengths side by side. The new token takes its slot; slots that no row has reached hold NaN, are
    left alone and change nothing. Each row alone has the same bits."""
    lengths, heads, kv_heads, dim, slots = case
    random, rows, scale = torch.Generator().manual_seed(heads), len(lengths), dim**-0.5

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    q, k, v = randn(rows, heads, dim), randn(rows, kv_heads, dim), randn(rows, kv_heads, dim)
    past = [torch.full((rows, slots, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    full, want = [cache.clone() for cache in past], []
    for row, length in enumerate(lengths):
        for cache, whole, new in zip(past, full, (k, v), strict=True):
            cache[row, : length - 1] = randn(length - 1, kv_heads, dim)
            whole[row, :length] = torch.cat((cache[row, : length - 1], new[row : row + 1]))
        queries = q[row].double().expand(length, heads, dim)
        seen = [cache[row, :length].double() for cache in full]
        want.append(autograd.attention(queries, *seen, [length], scale, window)[-1])
    keys, values = (memory.holding(cache) for cache in past)
    out = memory.output(rows, heads, dim, dtype=dtype)
    ops.cached_attention_forward(out, q, k, v, keys, values, torch.tensor(lengths), scale, window)
    bound = tol.reduction(tol.accumulator(dtype), max(lengths) * dim) + tol.elementwise(dtype, 2)
    tol.assert_close(out, torch.stack(want), bound, "out")
    for cache, whole in zip((keys, values), full, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), whole.nan_to_num(7.0))
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = memory.output(1, heads, dim, dtype=dtype)
        caches = [memory.holding(cache[one]) for cache in past]
        ops.cached_attention_forward(alone, q[one], k[one], v[one], *caches, torch.tensor([length]), scale, window)
        if ops.cached_attention_forward is not cached_attention_forward:  # torch's sums depend on the shape
            assert torch.equal(alone, out[one])
