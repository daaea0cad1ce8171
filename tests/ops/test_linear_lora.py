"""Linear layers with NF4 weight, bias, LoRA and dropout against autograd in fp64."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from ops.backends import Implementation
from ops.memory import GuardedMemory
from oracles import autograd, hf

from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.reference import dropout_keys, dropout_mask
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.nf4.reference import quantize
from quatrain.ops.select import Ops

SENTINEL = -3.0


def randn(random: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def make_keys(tokens: int, *, step: int = 3, seed: int = 42, first_row: int = 0) -> torch.Tensor:
    """Keys of one row of `tokens` tokens."""
    keys = torch.empty(tokens, dtype=torch.int64)
    rows = torch.full((tokens,), first_row, dtype=torch.int64)
    dropout_keys(keys, rows, torch.arange(tokens), torch.tensor(step), seed)
    return keys


def make_linear(
    memory: GuardedMemory,
    random: torch.Generator,
    n: int,
    k: int,
    rank: int,
    index: int,
    dtype: torch.dtype,
    *,
    nf4: bool,
    bias: bool,
) -> tuple[Linear, torch.Tensor]:
    """A layer, and its weight as bitsandbytes dequantises it."""
    wide = tol.accumulator(dtype)
    dense = randn(random, n, k, dtype=torch.float32) * k**-0.5
    lora = None
    if rank:
        a, b = randn(random, rank, k, dtype=dtype) * k**-0.5, randn(random, n, rank, dtype=dtype) * 0.3
        da, db = (memory.holding(torch.full(t.shape, SENTINEL, dtype=wide)) for t in (a, b))
        lora = Lora(a, b, da, db, scale=1.75, index=index)
    weight = quantize(dense, double_quant=True) if nf4 else dense.to(dtype)
    values = hf.nf4_values(dense, double_quant=True).to(dtype) if nf4 else dense.to(dtype)
    return Linear(weight, randn(random, n, dtype=dtype) if bias else None, lora), values


CASES = {
    # T, K, [(N, rank, bias)]
    "one-of-each-size": (1, 1, [(1, 1, False)]),
    "qkv-with-bias": (7, 64, [(64, 4, True), (32, 4, True), (32, 4, True)]),
    "odd": (5, 65, [(97, 3, False), (33, 3, True)]),
    "some-without-adapter": (9, 72, [(40, 0, True), (24, 5, False), (24, 0, False)]),
    "none-with-adapter": (3, 10, [(7, 0, False)]),
    "longer-than-a-chunk": (259, 33, [(18, 2, False), (9, 2, True)]),
    "whole-tiles": (64, 128, [(64, 32, False), (96, 16, True)]),
    "beside-whole-tiles": (33, 192, [(65, 33, True), (31, 1, False)]),
    "widest-adapter": (40, 192, [(72, 256, True)]),
    "eight-layers": (33, 64, [(40, 8, bool(i % 2)) for i in range(8)]),
    "several-slices": (5, 2100, [(260, 16, False)]),
    # Reductions that are cut: beyond 4,096 in bf16, 2,048 in fp32.
    "long-rows": (70, 4160, [(96, 8, True), (40, 0, False)]),
    "long-odd-rows": (33, 4163, [(35, 3, True)]),
    "long-columns-across-layers": (70, 96, [(1500, 4, False), (2100, 0, False), (1027, 3, False)]),
    "long-columns-straddling-blocks": (33, 35, [(4163, 3, True)]),
}


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_every_gradient(
    memory: GuardedMemory,
    ops: Ops,
    dtype: torch.dtype,
    random: torch.Generator,
    case: tuple[int, int, list[tuple[int, int, bool]]],
    nf4: bool,
    p: float,
) -> None:
    """I9: y = W x + b + s B A dropout(x), and the backward pass uses the same mask."""
    tokens, k, layers = case
    wide = tol.accumulator(dtype)
    made = [
        make_linear(memory, random, n, k, rank, 10 + i, dtype, nf4=nf4, bias=bias)
        for i, (n, rank, bias) in enumerate(layers)
    ]
    linears, weights = [layer for layer, _ in made], [values for _, values in made]
    x = randn(random, tokens, k, dtype=dtype)
    douts = [randn(random, tokens, n, dtype=dtype) for n, _, _ in layers]
    outs = [memory.output(tokens, n, dtype=dtype) for n, _, _ in layers]
    us = [memory.output(tokens, rank, dtype=dtype) if rank else None for _, rank, _ in layers]
    dx = memory.output(tokens, k, dtype=dtype)
    dropout = Dropout(p, make_keys(tokens)) if p else None
    ops.linear_lora_forward(outs, us, x, linears, dropout)
    ops.linear_lora_backward(dx, douts, x, us, linears, dropout)

    x64, want_dx, rounding = autograd.leaf(x), torch.zeros_like(x, dtype=torch.float64), 0.0
    for i, (linear, weight) in enumerate(zip(linears, weights, strict=True)):
        mask = dropout_mask(dropout.keys, 10 + i, k, p, torch.float64) if dropout else None
        bias = None if linear.bias is None else linear.bias.double()
        leaves = [autograd.leaf(linear.lora.A), autograd.leaf(linear.lora.B)] if linear.lora else []
        adapter = (*leaves, linear.lora.scale) if linear.lora else None
        want = autograd.linear_lora(x64, weight.double(), bias, adapter, mask)
        gradients = torch.autograd.grad(want, (x64, *leaves), douts[i].double())
        want_dx += gradients[0]
        rounding += float(gradients[0].norm())
        # The terms (W x + b, B u) are each stored in the compute dtype: four roundings of about the result's size.
        bound = tol.reduction(wide, k) + 4 * tol.elementwise(dtype, 1)
        tol.assert_close(outs[i], want, bound, f"out {i}")
        for name, got, wanted in zip(("dA", "dB"), _gradients(linear), gradients[1:], strict=False):
            # On a sentinel of 3, fp32 adds an absolute error of a few of its ulps.
            unit = 4 * torch.finfo(wide).eps * abs(SENTINEL) * wanted.numel() ** 0.5
            error = float((got.double() - SENTINEL - wanted).norm())
            assert error <= bound * float(wanted.norm()) + unit, (i, name, error, float(wanted.norm()))
    error = float((dx.double() - want_dx).norm())
    assert error <= (tol.reduction(wide, 97) + 4 * tol.elementwise(dtype, 1)) * rounding + 1e-300, error


def _gradients(linear: Linear) -> list[torch.Tensor]:
    return [linear.lora.dA, linear.lora.dB] if linear.lora else []


DECODE = {
    # T, K, [(N, rank, bias)]
    "one-token": (1, 192, [(70, 16, True), (33, 16, False)]),
    "one-of-each-size": (1, 1, [(1, 1, False)]),
    "blocks-across-rows": (3, 65, [(97, 3, True), (33, 0, False)]),
    "tail-of-half-a-step": (2, 104, [(10, 5, False)]),
    "seventeen-tokens": (17, 128, [(65, 33, True), (31, 0, True)]),
    "several-items": (5, 2112, [(260, 8, False)]),
    "eight-layers": (4, 64, [(41, 8, bool(i % 2)) for i in range(8)]),
}


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("case", DECODE.values(), ids=DECODE)
def test_decode(
    memory: GuardedMemory,
    ops: Ops,
    dtype: torch.dtype,
    implementation: Implementation,
    random: torch.Generator,
    case: tuple[int, int, list[tuple[int, int, bool]]],
    nf4: bool,
    residual: bool,
) -> None:
    """The forward for few tokens: against fp64, and a native token alone has the same bits."""
    tokens, k, layers = case
    layers = layers[:1] if residual else layers
    made = [
        make_linear(memory, random, n, k, rank, i, dtype, nf4=nf4, bias=bias)
        for i, (n, rank, bias) in enumerate(layers)
    ]
    linears, x = [layer for layer, _ in made], randn(random, tokens, k, dtype=dtype)
    added = randn(random, tokens, layers[0][0], dtype=dtype) if residual else None

    def run(rows: slice) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        count = len(x[rows])
        outs = [memory.output(count, n, dtype=dtype) for n, _, _ in layers]
        us = [memory.output(count, rank, dtype=dtype) if rank else None for _, rank, _ in layers]
        more = {} if added is None else {"residual": added[rows].clone()}
        ops.linear_lora_decode(outs, us, x[rows].clone(), linears, None, **more)
        return outs, us

    outs, us = run(slice(0, tokens))
    for i, (linear, weight) in enumerate(made):
        want = x.double() @ weight.double().T
        if linear.bias is not None:
            want += linear.bias.double()
        bound = tol.reduction(tol.accumulator(dtype), k) + 4 * tol.elementwise(dtype, 1)
        if linear.lora is not None:
            u = x.double() @ linear.lora.A.double().T
            tol.assert_close(us[i], u, bound, f"u {i}")
            want += linear.lora.scale * us[i].double() @ linear.lora.B.double().T
        if added is not None:
            want += added.double()
        tol.assert_close(outs[i], want, bound, f"out {i}")
    for t in range(tokens if implementation.native else 0):
        alone_outs, alone_us = run(slice(t, t + 1))
        for all_tokens, alone in zip([*outs, *us], [*alone_outs, *alone_us], strict=True):
            assert all_tokens is None or torch.equal(all_tokens[t : t + 1], alone)


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
def test_residual_and_down_projection_alone(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, p: float
) -> None:
    """The residual is added to the finished output; a recompute gets the same bits of u without the product."""
    linear, _ = make_linear(memory, random, 11, 17, 4, 2, dtype, nf4=True, bias=True)
    x, residual = randn(random, 300, 17, dtype=dtype), randn(random, 300, 11, dtype=dtype)
    dropout = Dropout(p, make_keys(300)) if p else None
    out, with_residual = (memory.output(300, 11, dtype=dtype) for _ in range(2))
    u, alone = (memory.output(300, 4, dtype=dtype) for _ in range(2))
    ops.linear_lora_forward([out], [u], x, [linear], dropout)
    ops.linear_lora_forward([with_residual], [u], x, [linear], dropout, residual=residual)
    if dtype.itemsize == 2:  # a kernel may round the sum once, not twice
        tol.assert_close(with_residual, out.double() + residual.double(), tol.elementwise(dtype, 2), "with residual")
    else:
        assert torch.equal(with_residual, out + residual)
    ops.lora_down_forward([alone, None], x, [linear, Linear(linear.weight)], dropout)
    assert torch.equal(alone, u)


def test_no_dropout_is_bit_equal_to_p_zero(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator
) -> None:
    """I9: p = 0 keeps every value, so the mask is exactly one."""
    assert torch.equal(dropout_mask(make_keys(9), 3, 17, 0.0, dtype), torch.ones(9, 17, dtype=dtype))
    linear, _ = make_linear(memory, random, 11, 17, 4, 0, dtype, nf4=False, bias=True)
    x = randn(random, 9, 17, dtype=dtype)
    results = []
    for dropout in (None, Dropout(0.0, make_keys(9))):
        out, u = memory.output(9, 11, dtype=dtype), memory.output(9, 4, dtype=dtype)
        ops.linear_lora_forward([out], [u], x, [linear], dropout)
        results.append((out, u))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_mean_over_draws_is_the_value_without_dropout(
    memory: GuardedMemory, fp32_ops: Ops, random: torch.Generator
) -> None:
    """I9: x = 1, p = 0.2, 10^5 draws: the mean of s B A dropout(x) is s B A x within 1 percent."""
    draws = 100_000
    linear, weight = make_linear(memory, random, 2, 3, 2, 0, torch.float32, nf4=False, bias=False)
    linear.lora.A.copy_(torch.tensor([[1.0, 2.0, 0.5], [0.5, 1.0, 2.0]]))
    linear.lora.B.fill_(1.0)
    x = torch.ones(draws, 3)
    out, u = memory.output(draws, 2), memory.output(draws, 2)
    fp32_ops.linear_lora_forward([out], [u], x, [linear], Dropout(0.2, make_keys(draws)))
    adapter = out - x @ weight.T
    want = 1.75 * linear.lora.B @ linear.lora.A @ torch.ones(3)
    assert torch.allclose(adapter.mean(0), want, rtol=0.01)
    assert float(adapter.std(0).min()) > 0.5  # it does drop
    values = dropout_mask(make_keys(100), 0, 50, 0.2, torch.float32).unique()
    assert torch.allclose(values, torch.tensor([0.0, 1.25]))


def test_masks_depend_on_row_and_position_only() -> None:
    """The same row in another micro-batch, at another offset, has the same mask; every other counter changes it."""
    alone = make_keys(6, first_row=1)
    packed = torch.empty(10, dtype=torch.int64)
    rows, positions = torch.tensor([0] * 4 + [1] * 6), torch.cat((torch.arange(4), torch.arange(6)))
    dropout_keys(packed, rows, positions, torch.tensor(3), 42)
    assert torch.equal(packed[4:], alone)

    def mask(keys: torch.Tensor, index: int = 0) -> torch.Tensor:
        return dropout_mask(keys, index, 200, 0.5, torch.float32)

    base = mask(alone)
    others = {
        "row": mask(make_keys(6, first_row=2)),
        "step": mask(make_keys(6, first_row=1, step=4)),
        "seed": mask(make_keys(6, first_row=1, seed=43)),
        "adapter": mask(alone, 1),
        "position": base.roll(1, 0),
        "feature": base.roll(1, 1),
    }
    for name, other in others.items():
        agreement = float((base == other).float().mean())
        assert 0.4 < agreement < 0.6, (name, agreement)  # 1200 fair coins: 0.5 +- 0.015
    assert torch.equal(mask(make_keys(6, first_row=1)), base)
