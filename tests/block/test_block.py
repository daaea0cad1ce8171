"""One block, without a model around it, against fp64 autograd over the whole of it: output, d_x and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import pytest
import tolerances as tol
import torch
from oracles import autograd

from quatrain.memory.arena import Arena
from quatrain.memory.plan import Slot
from quatrain.model.block import Stream, block_backward, block_forward, block_recompute
from quatrain.model.params import BlockParams
from quatrain.model.spec import LINEARS, ModelSpec, RopeSpec
from quatrain.model.workspace import backward_scratch, intermediate_slots, intermediates, scratch_slots
from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.reference import dropout_keys, dropout_mask
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.select import reference_ops

RANK = 3
DROP = 0.25


@dataclass(frozen=True)
class Shape:
    """One block's numbers, and the stream that goes through it."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    window: int | None = None
    biased: tuple[str, ...] = ()
    qk_norm: bool = False
    adapted: tuple[str, ...] = LINEARS
    rotary: int | None = None

    def spec(self) -> ModelSpec:
        return ModelSpec(
            "qwen3", 7, self.hidden, self.inner, 1, self.heads, self.kv_heads, self.dim, 1e-5,
            RopeSpec(500.0, self.rotary or self.dim), 64, True, (self.window,), frozenset(self.biased), self.qk_norm,
        )  # fmt: skip


SHAPES = {
    "smallest": Shape(1, 1, 1, 1, 2, (1,)),
    "one-token": Shape(9, 5, 2, 1, 6, (1,)),
    "llama": Shape(16, 24, 4, 2, 4, (5, 1, 7)),
    "biases": Shape(15, 11, 3, 1, 6, (4, 6), biased=LINEARS),
    "qwen2": Shape(12, 20, 2, 2, 6, (3, 8), biased=("q_proj", "k_proj", "v_proj")),
    "qwen3": Shape(13, 17, 4, 2, 8, (6, 5), qk_norm=True),
    "window": Shape(16, 24, 4, 1, 4, (9, 3), window=4),
    "partial-rotary": Shape(16, 24, 2, 1, 8, (7,), rotary=4),
    "two-adapters": Shape(13, 17, 4, 2, 8, (6, 5), qk_norm=True, adapted=("k_proj", "down_proj")),
    "no-adapters": Shape(16, 24, 4, 2, 4, (5, 4), adapted=()),
}


class Block:
    """Random fp64 weights, run by the engine's block and by autograd."""

    def __init__(self, shape: Shape, p: float) -> None:
        self.shape, self.spec, self.p = shape, shape.spec(), p
        self.random = torch.Generator().manual_seed(3)
        self.linears = {}
        for index, name in enumerate(LINEARS):
            n, k = self.spec.linear_shape(name)
            lora = None
            if name in shape.adapted:
                a, b = self.randn(RANK, k) * k**-0.5, self.randn(n, RANK) * 0.3
                lora = Lora(a, b, torch.zeros_like(a), torch.zeros_like(b), 1.5, index)
            bias = self.randn(n) * 0.2 if name in shape.biased else None
            self.linears[name] = Linear(self.randn(n, k) * k**-0.5, bias, lora)
        norms = {name: 1 + 0.3 * self.randn(size) for name, size in self.norm_sizes().items()}
        self.params = BlockParams(self.linears, **norms)
        self.norm_grads = {name: torch.zeros_like(norm) for name, norm in norms.items()}
        tokens = sum(shape.lengths)
        self.x, self.d_out = self.randn(tokens, shape.hidden), self.randn(tokens, shape.hidden)
        self.positions = torch.cat([torch.arange(length) for length in shape.lengths])
        self.angles = self.positions[:, None] * torch.rand(self.spec.rope.rotary_dim // 2, generator=self.random)
        self.angles = self.angles.double()
        self.keys = torch.empty(tokens, dtype=torch.int64)
        rows = torch.cat([torch.full((length,), i) for i, length in enumerate(shape.lengths)])
        dropout_keys(self.keys, rows, self.positions, torch.tensor(2), 42)

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random, dtype=torch.float64)

    def norm_sizes(self) -> dict[str, int]:
        sizes = {"input_norm": self.shape.hidden, "post_norm": self.shape.hidden}
        return sizes | ({"q_norm": self.shape.dim, "k_norm": self.shape.dim} if self.shape.qk_norm else {})

    def run(self, recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, d_x) of the engine's block, on poisoned memory; gradients are in the adapters and `norm_grads`."""
        tokens, spec, fp64 = len(self.x), self.spec, torch.float64
        ranks = dict.fromkeys(self.shape.adapted, RANK)
        slots = intermediate_slots(spec, ranks, tokens, fp64, fp64, "test", "saved")
        slots += scratch_slots(spec, tokens, fp64, "test", "scratch")
        slots += [Slot("test", name, (tokens, spec.hidden_size), fp64) for name in ("out", "d_x")]
        arena = Arena(slots, poison=True)
        dropout = Dropout(self.p, self.keys) if self.p else None
        bounds = [0, *accumulate(self.shape.lengths)]
        ops = reference_ops(torch.empty(0, dtype=torch.uint8))
        stream = Stream(ops, spec, bounds, self.angles.cos(), self.angles.sin(), dropout)
        saved, out, d_x = intermediates(arena, "saved", tokens, spec), arena["out"], arena["d_x"]
        x, d_out = self.x.clone(), self.d_out.clone()
        block_forward(out, x, saved, self.params, stream, self.shape.window)
        if recompute:
            arena.release(saved.tensors())
            block_recompute(x, saved, self.params, stream, self.shape.window)
        scratch = backward_scratch(arena, "scratch", tokens)
        block_backward(d_x, self.norm_grads, d_out, x, saved, scratch, self.params, stream, self.shape.window)
        arena.check_guards()
        assert torch.equal(x, self.x) and torch.equal(d_out, self.d_out)  # only read
        return out, d_x

    def oracle(self) -> dict[str, torch.Tensor]:
        """The same by autograd, from the formulas of the family."""
        s, leaves = self.shape, {"x": autograd.leaf(self.x)}
        leaves |= {name: autograd.leaf(getattr(self.params, name)) for name in self.norm_sizes()}
        for name in s.adapted:
            leaves |= {f"{name}.A": autograd.leaf(self.linears[name].lora.A)}
            leaves |= {f"{name}.B": autograd.leaf(self.linears[name].lora.B)}

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            layer = self.linears[name]
            adapter, mask = None, None
            if name in s.adapted:
                adapter = (leaves[f"{name}.A"], leaves[f"{name}.B"], 1.5)
                if self.p:
                    mask = dropout_mask(self.keys, LINEARS.index(name), x.shape[1], self.p, torch.float64)
            return autograd.linear_lora(x, layer.weight, layer.bias, adapter, mask)

        def head_norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return autograd.rms_norm(x, leaves[name], 1e-5) if s.qk_norm else x

        tokens = len(self.x)
        normed = autograd.rms_norm(leaves["x"], leaves["input_norm"], 1e-5)
        q = linear("q_proj", normed).view(tokens, s.heads, s.dim)
        k = linear("k_proj", normed).view(tokens, s.kv_heads, s.dim)
        v = linear("v_proj", normed).view(tokens, s.kv_heads, s.dim)
        q, k = (autograd.rope(head_norm(t, name), self.angles) for t, name in ((q, "q_norm"), (k, "k_norm")))
        attended = autograd.attention(q, k, v, s.lengths, s.dim**-0.5, s.window)
        mid = leaves["x"] + linear("o_proj", attended.reshape(tokens, -1))
        normed = autograd.rms_norm(mid, leaves["post_norm"], 1e-5)
        out = mid + linear("down_proj", autograd.swiglu(linear("gate_proj", normed), linear("up_proj", normed)))
        gradients = torch.autograd.grad(out, list(leaves.values()), self.d_out)
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.norm_grads.items()
        for name in self.shape.adapted:
            yield f"{name}.A", self.linears[name].lora.dA
            yield f"{name}.B", self.linears[name].lora.dB


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("p", [0.0, DROP], ids=["plain", "dropout"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_block_equals_autograd(shape: Shape, p: float, recompute: bool) -> None:
    block = Block(shape, p)
    out, d_x = block.run(recompute)
    want = block.oracle()
    bound = tol.reduction(torch.float64, 100, c=40)  # ten ops in a row, sums of up to about 100 terms
    tol.assert_close(out, want["out"], bound, "out")
    scale = max(float(gradient.abs().max()) for gradient in want.values())
    for name, got in [("x", d_x), *block.gradients()]:
        # With one token the softmax is constant: gradients of q and k are rounding about zero.
        error = float((got - want[name]).norm())
        assert error <= bound * max(float(want[name].norm()), scale), (name, error)
    for name, got in block.gradients():
        one_token = set(shape.lengths) == {1} and name[:2] in ("q_", "k_")
        assert one_token or shape.hidden == 1 or float(got.norm()) > 0, name


def test_gradients_accumulate_and_recompute_has_the_same_bits() -> None:
    """dA, dB and norm gradients are `+=`: two backwards sum to twice one; kept and recomputed agree to the bit."""
    kept, recomputed = Block(SHAPES["qwen3"], DROP), Block(SHAPES["qwen3"], DROP)
    results = kept.run(recompute=False), recomputed.run(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    once = {name: gradient.clone() for name, gradient in kept.gradients()}
    assert all(torch.equal(once[name], gradient) for name, gradient in recomputed.gradients())
    kept.run(recompute=False)
    for name, gradient in kept.gradients():
        tol.assert_close(gradient, 2 * once[name], tol.elementwise(torch.float64, 64), name)
