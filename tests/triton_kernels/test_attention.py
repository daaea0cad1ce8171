"""Attention's Triton kernels against autograd in fp64: forward, every gradient, inert tokens, isolation, bits."""

from __future__ import annotations

from itertools import accumulate

import pytest
import tolerances as tol
import torch
from ops.memory import GuardedMemory
from oracles import autograd

from quatrain.ops.attention import RowBounds
from quatrain.ops.select import Ops

CASES = {
    # lengths, inert tokens behind them, Hq, Hk, D, window
    "one-token": ([1], 0, 1, 1, 16, None),
    "rows-of-one": ([1, 1, 3, 1], 0, 4, 2, 16, None),
    "many-rows-in-a-tile": ([3, 1, 5, 2, 1, 7, 4, 9], 6, 3, 1, 20, None),
    "row-longer-than-tiles": ([2, 67, 5], 0, 3, 1, 64, None),
    "tile-of-inert-tokens": ([21, 12], 40, 1, 1, 64, None),
    "all-inert": ([], 20, 2, 1, 16, None),
    "window-1": ([6, 1, 20], 1, 2, 1, 16, 1),
    "window-in-a-tile": ([50], 3, 2, 1, 16, 7),
    "window-across-tiles": ([70, 13], 0, 2, 2, 32, 33),
    "window-wider-than-rows": ([4, 30], 0, 2, 1, 16, 100),
    "ratio-1-head-96": ([17, 20], 3, 2, 2, 96, None),
    "ratio-4-head-128": ([33, 5], 2, 4, 1, 128, None),
    "ratio-8-head-256": ([18, 3], 1, 8, 1, 256, 12),
}
NAMES = ("out", "dq", "dk", "dv")


class Run:
    """One forward and backward of the op on random input."""

    def __init__(
        self,
        memory: GuardedMemory,
        ops: Ops,
        dtype: torch.dtype,
        lengths: list[int],
        inert: int,
        heads: int,
        kv_heads: int,
        dim: int,
        window: int | None,
    ) -> None:
        self.memory, self.ops, self.lengths, self.inert, self.window = memory, ops, lengths, inert, window
        self.live, self.scale = sum(lengths), dim**-0.5
        self.rows = RowBounds.of([0, *accumulate(lengths)], self.live + inert)
        random = torch.Generator().manual_seed(self.live + heads)

        def randn(n: int) -> torch.Tensor:
            return torch.randn(self.live + inert, n, dim, generator=random, dtype=torch.float64).to(dtype)

        self.q, self.k, self.v, self.dout = randn(heads), randn(kv_heads), randn(kv_heads), randn(heads)
        for tensor in (self.q, self.k, self.v, self.dout):
            tensor[self.live :] = float("nan")
        self()

    def __call__(self) -> None:
        output, (tokens, heads, dim), dtype = self.memory.output, self.q.shape, self.q.dtype
        self.out, self.lse = output(tokens, heads, dim, dtype=dtype), output(tokens, heads)
        self.ops.attention_forward(self.out, self.lse, self.q, self.k, self.v, self.rows, self.scale, self.window)
        self.dq = output(tokens, heads, dim, dtype=dtype)
        self.dk, self.dv = (output(*self.k.shape, dtype=dtype) for _ in range(2))
        self.backward(self.dq, self.dout)

    def backward(self, dq: torch.Tensor, dout: torch.Tensor) -> None:
        self.ops.attention_backward(
            dq, self.dk, self.dv, dout, self.out, self.lse, self.q, self.k, self.v, self.rows, self.scale, self.window
        )


@pytest.fixture(params=["shipped", "small"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped tiles, and tiles so small that short rows cross many."""
    from quatrain.ops.triton_configs import TABLE

    if request.param == "small":
        for key, (m, n) in {"forward": (16, 32), "dq": (32, 16), "dkdv": (16, 32)}.items():
            for width in (64, 128, 256):
                how = {"BLOCK_M": m, "BLOCK_N": n, "WIDEN": False, "num_warps": 4, "num_stages": 1}
                monkeypatch.setitem(TABLE, f"attention_{key}/{width}", {"*": how})


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_every_gradient(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, case: tuple) -> None:
    """Inert tokens hold NaN: they get zeros and nobody sees them."""
    run = Run(memory, ops, dtype, *case)
    lengths, _, _, _, dim, window = case
    leaves = [autograd.leaf(t[: run.live]) for t in (run.q, run.k, run.v)]
    # P and dS are rounded to the dtype before the products, `out` before the backward reads it for delta.
    bound = tol.reduction(torch.float32, max([1, *lengths]) * dim) + tol.elementwise(dtype, 6)
    if run.live:
        out = autograd.attention(*leaves, lengths, run.scale, window)
        wants = (out.detach(), *torch.autograd.grad(out, leaves, run.dout[: run.live].double()))
        for name, want in zip(NAMES, wants, strict=True):
            got = getattr(run, name)[: run.live]
            if float(want.norm()) > 1e-12:
                tol.assert_close(got, want, bound, name)
            else:  # the softmax is constant: dq and dk are rounding
                assert float(got.abs().max()) <= bound * float(run.dout[: run.live].abs().max()) * 8, name
    for name in (*NAMES, "lse"):
        assert not getattr(run, name)[run.live :].any(), name


@pytest.mark.parametrize("window", [None, 9])
def test_lse_is_the_natural_logarithm(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    run = Run(memory, ops, dtype, [40], 0, 2, 2, 16, window)
    q, k = (t.double().transpose(0, 1) for t in (run.q, run.k))
    i = torch.arange(40)
    hidden = (i[None, :] > i[:, None]) | (i[None, :] <= i[:, None] - (window or 40))
    want = (q @ k.mT * run.scale).masked_fill(hidden, -torch.inf).logsumexp(-1).T
    assert torch.allclose(run.lse.double(), want, rtol=0, atol=tol.reduction(torch.float32, 16) * 8)


@pytest.mark.usefixtures("blocks")
def test_packed_is_alone(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    """A row has the same numbers beside others; the order of its sums, which tiles set, may differ."""
    run = Run(memory, ops, dtype, [9, 41, 6], 8, 2, 1, 32, None)
    alone = Run(memory, ops, dtype, [41], 0, 2, 1, 32, None)
    row = slice(9, 50)
    for name in ("q", "k", "v", "dout"):
        setattr(alone, name, getattr(run, name)[row].contiguous())
    alone()
    bound = tol.reduction(torch.float32, 41 * 32) + tol.elementwise(dtype, 6)
    for name in (*NAMES, "lse"):
        tol.assert_close(getattr(run, name)[row], getattr(alone, name), bound, name)


def test_equal_bits_every_time(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    run = Run(memory, ops, dtype, [9, 41, 6], 8, 4, 2, 32, 20)
    before = {name: getattr(run, name) for name in (*NAMES, "lse")}
    run()
    for name, tensor in before.items():
        assert torch.equal(getattr(run, name), tensor), name


def test_dq_may_be_dout(memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
    run = Run(memory, ops, dtype, [50, 9], 5, 4, 2, 16, None)
    dk, dv, in_place = run.dk.clone(), run.dv.clone(), memory.holding(run.dout)
    run.backward(in_place, in_place)
    assert torch.equal(in_place, run.dq) and torch.equal(dk, run.dk) and torch.equal(dv, run.dv)


def test_large_scores_do_not_overflow(memory: GuardedMemory, ops: Ops) -> None:
    """G1: entries of 60 with head_dim 64 give scores of 230400 before scaling; scores and softmax are fp32."""
    q = torch.full((3, 1, 64), 60.0, dtype=torch.float16)
    v = torch.arange(3.0, dtype=torch.float16).view(3, 1, 1).expand(3, 1, 64).contiguous()
    out, lse = memory.output(3, 1, 64, dtype=torch.float16), memory.output(3, 1)
    ops.attention_forward(out, lse, q, q, v, RowBounds.of([0, 3], 3), 64**-0.5, None)
    assert out[:, 0, 0].tolist() == [0.0, 0.5, 1.0]


def test_row_bounds() -> None:
    rows = RowBounds.of([0, 2, 2, 5], 7)
    assert rows.start.tolist() == [0, 0, 2, 2, 2, 5, 6] and rows.end.tolist() == [2, 2, 5, 5, 5, 5, 6]
    assert rows.start.dtype == rows.end.dtype == torch.int32
