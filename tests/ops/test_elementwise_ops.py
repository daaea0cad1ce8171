"""Embedding, RMSNorm, RoPE and SwiGLU against autograd in fp64: forward and every gradient, every implementation."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from ops.memory import SENTINEL, GuardedMemory
from oracles import autograd

from quatrain.ops.select import Ops

SHAPES = [(1, 1), (1, 7), (3, 64), (257, 33), (513, 5), (17, 576)]


def randn(random: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def test_embedding_copies_rows(memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator) -> None:
    table = randn(random, 11, 5, dtype=dtype)
    ids = torch.tensor([10, 0, 0, 3])
    out = memory.output(4, 5, dtype=dtype)
    ops.embedding_forward(out, ids, table)
    assert torch.equal(out, torch.stack([table[i] for i in ids.tolist()]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
def test_rms_norm(
    memory: GuardedMemory,
    ops: Ops,
    dtype: torch.dtype,
    random: torch.Generator,
    shape: tuple[int, int],
    with_residual: bool,
) -> None:
    wide, eps = tol.accumulator(dtype), 1e-5
    x, dout = randn(random, *shape, dtype=dtype), randn(random, *shape, dtype=dtype)
    weight = 1 + 0.3 * randn(random, shape[1], dtype=wide)
    residual = randn(random, *shape, dtype=dtype) if with_residual else None

    out, rstd = memory.output(*shape, dtype=dtype), memory.output(shape[0], dtype=wide)
    ops.rms_norm_forward(out, rstd, x, weight, eps)
    dx = memory.output(*shape, dtype=dtype)
    dweight = memory.holding(torch.full_like(weight, SENTINEL))
    ops.rms_norm_backward(dx, dweight, dout, x, rstd, weight, residual)

    x64, weight64 = autograd.leaf(x), autograd.leaf(weight)
    want = autograd.rms_norm(x64, weight64, eps)
    want_dx, want_dweight = torch.autograd.grad(want, (x64, weight64), dout.double())
    want_dx = want_dx if residual is None else want_dx + residual.double()
    stored = tol.elementwise(dtype, 1)
    tol.assert_close(out, want, stored + tol.elementwise(wide, 6) + tol.reduction(wide, shape[1]), "out")
    # With one feature, or few, the two terms of dx cancel: the bound is relative to the terms.
    terms = float((dout.double() * weight.double() * rstd.double()[:, None]).norm())
    error = float((dx.double() - want_dx).norm())
    room = tol.reduction(wide, shape[1]) * terms * max(1.0, float(rstd.max())) + stored * float(want_dx.norm())
    assert error <= room + 1e-300, (error, room)
    # dweight was accumulated onto the sentinel, whose ulp is the unit of its rounding: a random walk of one a row.
    got = dweight.double() - SENTINEL
    unit = torch.finfo(wide).eps * abs(SENTINEL)
    assert float((got - want_dweight).abs().max()) <= unit * (1 + shape[0] ** 0.5) + tol.reduction(wide, shape[0]) * 10


def test_rms_norm_in_place_and_frozen(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator
) -> None:
    """`out` may be `x`; `dx` may be `dout` or `residual`; frozen weights get no gradient. All with equal bits."""
    wide = tol.accumulator(dtype)
    x, dout, residual = (randn(random, 5, 33, dtype=dtype) for _ in range(3))
    weight = 1 + 0.3 * randn(random, 33, dtype=wide)
    out, rstd, dx = memory.output(5, 33, dtype=dtype), memory.output(5, dtype=wide), memory.output(5, 33, dtype=dtype)
    ops.rms_norm_forward(out, rstd, x, weight, 1e-6)
    ops.rms_norm_backward(dx, None, dout, x, rstd, weight, residual)

    x_out, again = memory.holding(x), memory.output(5, dtype=wide)
    ops.rms_norm_forward(x_out, again, x_out, weight, 1e-6)
    assert torch.equal(x_out, out) and torch.equal(again, rstd)
    for alias in ("dout", "residual"):
        inputs = {"dout": memory.holding(dout), "residual": memory.holding(residual)}
        ops.rms_norm_backward(inputs[alias], None, inputs["dout"], x, rstd, weight, inputs["residual"])
        assert torch.equal(inputs[alias], dx), alias


@pytest.mark.parametrize(("eps", "want"), [(1e-5, 0.3015), (1e-6, 0.7071)])
def test_rms_eps_is_the_one_given(memory: GuardedMemory, fp32_ops: Ops, eps: float, want: float) -> None:
    """J14: x = 0.001 everywhere gives 0.3015 with eps 1e-5 and 0.7071 with 1e-6."""
    out, rstd = memory.output(1, 8), memory.output(1)
    fp32_ops.rms_norm_forward(out, rstd, torch.full((1, 8), 1e-3), torch.ones(8), eps)
    assert out[0, 0].item() == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize("half", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_rope(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, tokens: int, half: int, scaling: float
) -> None:
    wide, heads, dim = tol.accumulator(dtype), 3, 16
    positions = torch.arange(tokens) % 50
    inv_freq = torch.rand(half, generator=random)
    cos, sin = memory.output(tokens, half, dtype=wide), memory.output(tokens, half, dtype=wide)
    ops.rope_tables(cos, sin, positions, inv_freq, scaling)
    x, dout = randn(random, tokens, heads, dim, dtype=dtype), randn(random, tokens, heads, dim, dtype=dtype)
    out, dx = memory.holding(x), memory.holding(dout)
    ops.rope_forward(out, cos, sin)
    ops.rope_backward(dx, cos, sin)

    angles = (positions.float()[:, None] * inv_freq).double()  # fp32 angles are part of the definition
    tables = tol.elementwise(torch.float32, 4)
    tol.assert_close(cos, angles.cos() * scaling, tables, "cos")
    tol.assert_close(sin, angles.sin() * scaling, tables, "sin") if tokens > 1 else None
    x64 = autograd.leaf(x)
    want = autograd.rope(x64, angles, scaling)
    (want_dx,) = torch.autograd.grad(want, x64, dout.double())
    bound = tables + tol.elementwise(wide, 3) + tol.elementwise(dtype, 1)
    tol.assert_close(out, want, bound, "out")
    tol.assert_close(dx, want_dx, bound, "dx")
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])  # J5: dimensions beyond rotary_dim do not change
    assert torch.equal(dx[..., 2 * half :], dout[..., 2 * half :])


def test_rope_pairs_are_split_half(memory: GuardedMemory, fp32_ops: Ops) -> None:
    """J5: with rotary_dim 4 of head_dim 8, dimension i turns with i + 2, and a quarter turn maps (1, 0) to (0, 1)."""
    x = memory.holding(torch.tensor([[[1.0, 2.0, 0.0, 0.0, 5.0, 6.0, 7.0, 8.0]]]))
    fp32_ops.rope_forward(x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert x.flatten().tolist() == [0.0, 2.0, 1.0, 0.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, shape: tuple[int, int]
) -> None:
    gate, up, dout = (3 * randn(random, *shape, dtype=dtype) for _ in range(3))
    gate.view(-1)[0] = 100.0
    gate.view(-1)[-1] = -100.0
    out, dgate, dup = (memory.output(*shape, dtype=dtype) for _ in range(3))
    ops.swiglu_forward(out, gate, up)
    ops.swiglu_backward(dgate, dup, dout, gate, up)

    gate64, up64 = autograd.leaf(gate), autograd.leaf(up)
    want = autograd.swiglu(gate64, up64)
    want_dgate, want_dup = torch.autograd.grad(want, (gate64, up64), dout.double())
    bound = tol.elementwise(tol.accumulator(dtype), 12) + tol.elementwise(dtype, 1)
    for name, got, wanted in (("out", out, want), ("dgate", dgate, want_dgate), ("dup", dup, want_dup)):
        if float(wanted.detach().norm()) > 1e-30:
            tol.assert_close(got, wanted, bound, name)

    in_gate, in_up = memory.holding(gate), memory.holding(up)
    ops.swiglu_backward(in_gate, in_up, dout, in_gate, in_up)
    assert torch.equal(in_gate, dgate) and torch.equal(in_up, dup)
