"""Every kernel of a training step at a model's shapes: its input, its outputs, and torch's own op at the same work.

Legend: T tokens in rows of equal length, H hidden, I intermediate, Hq/Hk heads, D head_dim, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from quatrain.bench import peers
from quatrain.bench.peers import Peer, Tensors
from quatrain.model.rope import inverse_frequencies
from quatrain.model.spec import LINEARS, ModelSpec
from quatrain.model.workspace import GROUPS, op_sizes
from quatrain.ops.attention.reference import attention_forward
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.select import Backend, Ops, Sizes

LR, BETAS, ADAM_EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


@dataclass(frozen=True)
class Kernels:
    """What the cases call: a backend's ops over their scratch memory, the head's logits, and NF4 both ways."""

    ops: Ops
    logits: torch.Tensor
    quantize: Callable[..., Nf4Tensor]
    dequantize: Callable[[torch.Tensor, Nf4Tensor], None]

    @classmethod
    def bind(cls, backend: Backend, world: World) -> Kernels:
        spec = world.spec
        chunk = min(world.tokens, backend.head_chunk(spec.hidden_size, spec.vocab_size))
        logits = torch.empty(chunk, spec.vocab_size if backend.keeps_logits else 0)
        one = replace(world.sizes(chunk), tokens=1)
        needs = backend.scratch_bytes(world.sizes(chunk)), backend.decode_scratch_bytes(one)
        scratch = torch.empty(max(needs), dtype=torch.uint8)
        return cls(backend.bind(scratch), logits, backend.quantize, backend.dequantize)


@dataclass(frozen=True)
class Case:
    """`run` calls one kernel, which writes `writes`; where it makes its outputs itself, `run` returns them. `peer`
    returns the first of the outputs from torch's own op, None where torch has none. `nbytes` is the least traffic of
    what the profiler does not see."""

    name: str
    run: Callable[[Kernels], Tensors | None]
    writes: Tensors
    peer: Peer | None
    nbytes: float = 0.0


class World:
    """A model's shapes, and random tensors for them. `quantize` makes the weights: all backends give equal bits."""

    def __init__(
        self, spec: ModelSpec, tokens: int, row: int, rank: int, dtype: torch.dtype, quantize: Callable[..., Nf4Tensor]
    ) -> None:
        self.spec, self.tokens, self.row, self.rank, self.dtype = spec, tokens, row, rank, dtype
        self.quantize, self._generator = quantize, torch.Generator().manual_seed(0)

    def sizes(self, head_chunk: int) -> Sizes:
        return op_sizes(
            self.spec, tokens=self.tokens, longest_row=self.row, rank=self.rank, quantised=True, dropout=False,
            head_chunk=head_chunk, dtype=self.dtype,
        )  # fmt: skip

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uniform with standard deviation `scale`."""
        drawn = torch.rand(shape, generator=self._generator).sub_(0.5).mul_(scale * 12**0.5)
        return drawn.to(dtype or self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """For an output: zeros, which no output is."""
        return torch.zeros(shape, dtype=dtype or self.dtype)

    def weight(self, name: str) -> torch.Tensor:
        n, k = self.spec.linear_shape(name)
        return self.random(n, k, scale=k**-0.5)

    def linear(self, name: str) -> Linear:
        n, k = self.spec.linear_shape(name)
        a, b = self.random(self.rank, k, scale=k**-0.5), self.random(n, self.rank, scale=self.rank**-0.5)
        grad_a, grad_b = (self.empty(*x.shape, dtype=torch.float32) for x in (a, b))
        bias = self.random(n) if name in self.spec.biased else None
        return Linear(self.quantize(self.weight(name), double_quant=True), bias, Lora(a, b, grad_a, grad_b, 2.0, 0))


def cases(world: World, dense: Callable[[torch.Tensor, Nf4Tensor], None]) -> Iterator[Case]:
    """All of them, in the order of a step. `dense` undoes NF4 for torch."""
    yield _embedding(world)
    yield from _rms_norm(world)
    for group in GROUPS:
        yield from _linears(world, group, dense)
    yield from _rope(world)
    yield from _attention(world)
    yield _cached_attention(world)
    yield from _swiglu(world)
    yield _head_loss(world)
    yield from _optimizer(world)
    yield from _nf4(world)


def _embedding(w: World) -> Case:
    table, out = w.random(w.spec.vocab_size, w.spec.hidden_size), w.empty(w.tokens, w.spec.hidden_size)
    ids = torch.randint(w.spec.vocab_size, (w.tokens,))
    touched = 2.0 * out.nbytes + ids.nbytes  # of the table, only these rows
    return Case(
        "embedding", lambda k: k.ops.embedding_forward(out, ids, table), (out,),
        lambda: (torch.nn.functional.embedding(ids, table),), touched,
    )  # fmt: skip


def _rms_norm(w: World) -> Iterator[Case]:
    t, h, eps = w.tokens, w.spec.hidden_size, w.spec.rms_norm_eps
    x, weight = w.random(t, h), 1 + w.random(h, scale=0.1, dtype=torch.float32)
    out, rstd = w.empty(t, h), x.float().square().mean(-1).add_(eps).rsqrt_()
    own = weight.to(w.dtype)
    yield Case(
        "rms_norm forward", lambda k: k.ops.rms_norm_forward(out, rstd, x, weight, eps), (out, rstd),
        lambda: (peers.rms_norm(x, own, eps),),
    )  # fmt: skip
    dx, dout, residual = w.empty(t, h), w.random(t, h), w.random(t, h)
    back = peers.backward(lambda leaf: peers.rms_norm(leaf, own, eps), [x], dout)
    yield Case(
        "rms_norm backward", lambda k: k.ops.rms_norm_backward(dx, None, dout, x, rstd, weight, residual), (dx,),
        lambda: (back()[0].add_(residual),),
    )  # fmt: skip


def _linears(w: World, names: tuple[str, ...], dense: Callable[[torch.Tensor, Nf4Tensor], None]) -> Iterator[Case]:
    linears, label = [w.linear(name) for name in names], "+".join(name.removesuffix("_proj") for name in names)
    weights = [w.empty(*linear.weight.shape) for linear in linears]
    for weight, linear in zip(weights, linears, strict=True):
        assert isinstance(linear.weight, Nf4Tensor)
        dense(weight, linear.weight)
    x = w.random(w.tokens, weights[0].shape[1])
    outs, us = [w.empty(w.tokens, weight.shape[0]) for weight in weights], [w.empty(w.tokens, w.rank) for _ in weights]
    residual = w.random(*outs[0].shape) if len(names) == 1 else None
    yield Case(
        f"{label} forward", lambda k: k.ops.linear_lora_forward(outs, us, x, linears, None, residual=residual),
        (*outs, *us), partial(peers.linear_forward, x, linears, weights, residual),
    )  # fmt: skip
    down = w.empty(w.tokens, w.rank)
    if len(names) == 1:
        yield Case(
            f"{label} lora_down", lambda k: k.ops.lora_down_forward([down], x, linears, None), (down,),
            partial(peers.lora_down, x, linears[0]),
        )  # fmt: skip
    one, one_residual = x[:1].clone(), None if residual is None else residual[:1].clone()
    few, few_u = [w.empty(1, out.shape[1]) for out in outs], [w.empty(1, w.rank) for _ in weights]
    yield Case(
        f"{label} decode", lambda k: k.ops.linear_lora_decode(few, few_u, one, linears, None, residual=one_residual),
        (*few, *few_u), partial(peers.linear_forward, one, linears, weights, one_residual),
    )  # fmt: skip
    dx, douts = w.empty(*x.shape), [w.random(*out.shape) for out in outs]
    kept = list(peers.linear_forward(x, linears, weights, residual)[len(names) :])
    grads = [grad for linear in linears if linear.lora for grad in (linear.lora.dA, linear.lora.dB)]
    yield Case(
        f"{label} backward", lambda k: k.ops.linear_lora_backward(dx, douts, x, kept, linears, None), (dx, *grads),
        partial(peers.linear_backward, douts, x, kept, linears, weights),
    )  # fmt: skip


def _rope(w: World) -> Iterator[Case]:
    """Backward is the same kernel with the sign of sin turned."""
    s = w.spec
    q, k = w.random(w.tokens, s.num_heads, s.head_dim), w.random(w.tokens, s.num_kv_heads, s.head_dim)
    inv_freq, _ = inverse_frequencies(s.rope, w.row)
    angles = (torch.arange(w.tokens) % w.row)[:, None] * inv_freq.float()
    cos, sin = angles.cos(), angles.sin()
    wide = [torch.cat([x, x], dim=-1)[:, None].to(w.dtype) for x in (cos, sin)]
    start = q.clone(), k.clone()

    def run(kernels: Kernels) -> None:
        kernels.ops.rope_forward(q, cos, sin)
        kernels.ops.rope_forward(k, cos, sin)

    yield Case("rope of q and k", run, (q, k), lambda: (peers.rope(start[0], *wide), peers.rope(start[1], *wide)))


def _attention(w: World) -> Iterator[Case]:
    s, t = w.spec, w.tokens
    query, key = (t, s.num_heads, s.head_dim), (t, s.num_kv_heads, s.head_dim)
    q, k, v, dout = w.random(*query), w.random(*key), w.random(*key), w.random(*query)
    out, lse = w.empty(*query), w.empty(t, s.num_heads, dtype=torch.float32)
    bounds, scale = tuple(range(0, t + 1, w.row)), float(s.head_dim**-0.5)
    yield Case(
        "attention forward", lambda kernels: kernels.ops.attention_forward(out, lse, q, k, v, bounds, scale, None),
        (out, lse), lambda: (peers.attention(q, k, v, w.row),),
    )  # fmt: skip
    dq, dk, dv = w.empty(*query), w.empty(*key), w.empty(*key)
    kept, kept_lse = w.empty(*query), w.empty(t, s.num_heads, dtype=torch.float32)
    attention_forward(kept, kept_lse, q, k, v, bounds, scale, None)
    yield Case(
        "attention backward",
        lambda kernels: kernels.ops.attention_backward(dq, dk, dv, dout, kept, kept_lse, q, k, v, bounds, scale, None),
        (dq, dk, dv), peers.backward(partial(peers.attention, row=w.row), [q, k, v], dout),
    )  # fmt: skip


def _cached_attention(w: World) -> Case:
    """One new token after `row` - 1 others."""
    s, lengths = w.spec, torch.tensor([w.row])
    q, out = (make(1, s.num_heads, s.head_dim) for make in (w.random, w.empty))
    keys, values = (w.random(1, w.row, s.num_kv_heads, s.head_dim) for _ in range(2))
    k, v, scale = keys[:, -1].clone(), values[:, -1].clone(), float(s.head_dim**-0.5)
    return Case(
        "attention decode",
        lambda kernels: kernels.ops.cached_attention_forward(out, q, k, v, keys, values, lengths, scale, None),
        (out,), lambda: (peers.cached_attention(q, keys, values),),
    )  # fmt: skip


def _swiglu(w: World) -> Iterator[Case]:
    shape = (w.tokens, w.spec.intermediate_size)
    gate, up, dout, out, dgate, dup = *(w.random(*shape) for _ in range(3)), *(w.empty(*shape) for _ in range(3))
    yield Case(
        "swiglu forward", lambda k: k.ops.swiglu_forward(out, gate, up), (out,), lambda: (peers.swiglu(gate, up),)
    )
    yield Case(
        "swiglu backward", lambda k: k.ops.swiglu_backward(dgate, dup, dout, gate, up), (dgate, dup),
        peers.backward(peers.swiglu, [gate, up], dout),
    )  # fmt: skip


def _head_loss(w: World) -> Case:
    """Every token supervised."""
    hidden, head = w.random(w.tokens, w.spec.hidden_size), w.random(w.spec.vocab_size, w.spec.hidden_size, scale=0.02)
    losses, d_hidden = w.empty(w.tokens, dtype=torch.float32), w.empty(*hidden.shape)
    rows, targets = torch.arange(w.tokens), torch.randint(w.spec.vocab_size, (w.tokens,))

    def run(k: Kernels) -> None:
        k.ops.head_loss(losses, d_hidden, hidden, rows, targets, head, k.logits)

    return Case("head and loss", run, (losses, d_hidden), lambda: peers.head_loss(hidden, targets, head))


def _optimizer(w: World) -> Iterator[Case]:
    """The norm of one block's gradients and the update of all adapters, as in a step."""
    block = w.rank * sum(sum(w.spec.linear_shape(name)) for name in LINEARS)
    some, total = w.random(block, dtype=torch.float32), w.empty(dtype=torch.float64)
    yield Case(
        "sum_squares", lambda k: k.ops.sum_squares(total, some), (total,),
        lambda: (torch.linalg.vector_norm(some).square(),),
    )  # fmt: skip
    size = block * w.spec.num_layers
    param, grad = w.random(size, scale=LR, dtype=torch.float32), w.random(size, dtype=torch.float32)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    scale, lr = (torch.tensor(value, dtype=torch.float64) for value in (1.0, LR))
    skip, step = torch.tensor(False), torch.tensor(0)
    yield Case(
        "adamw",
        lambda k: k.ops.adamw_step(
            param, exp_avg, exp_avg_sq, grad, scale, skip, lr, step, BETAS, ADAM_EPS, DECAY
        ),
        (param, exp_avg, exp_avg_sq), peers.adamw(param, grad, LR, BETAS, ADAM_EPS, DECAY),
    )  # fmt: skip


def _nf4(w: World) -> Iterator[Case]:
    """The largest linear, with nested statistics. Torch has no such op (bench/quantize.py: beside bitsandbytes)."""
    values = w.weight("gate_proj")
    made = w.quantize(values, double_quant=True)
    traffic = float(values.nbytes + made.nbytes())

    def quantize(k: Kernels) -> Tensors:
        new = k.quantize(values, double_quant=True)
        return tuple(t for t in (new.codes, new.absmax_codes, new.absmax2) if t is not None)

    yield Case("nf4 quantise", quantize, (), None, traffic)
    out = w.empty(*values.shape)
    yield Case("nf4 dequantise", lambda k: k.dequantize(out, made), (out,), None, traffic)
