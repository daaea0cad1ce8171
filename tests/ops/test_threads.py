"""Native ops give the same bits for one to four threads, and for any run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ops import backends
from ops.backends import Implementation
from ops.memory import SENTINEL, GuardedMemory

from quatrain.ops import library
from quatrain.ops.dropout import Dropout
from quatrain.ops.dropout.reference import dropout_keys
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.nf4.reference import quantize
from quatrain.ops.select import Ops

NATIVE = {name: one for name, one in backends.ALL.items() if one.native}
Results = dict[str, torch.Tensor]


class Run:
    """Calls ops on input that is the same for every instance; `results` holds every tensor that they wrote."""

    def __init__(self, memory: GuardedMemory, ops: Ops, dtype: torch.dtype) -> None:
        self.memory, self.ops, self.dtype, self.results = memory, ops, dtype, Results()
        self.random = torch.Generator().manual_seed(11)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(dtype or self.dtype)

    def out(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.results[name] = self.memory.output(*shape, dtype=dtype or self.dtype)
        return self.results[name]

    def holding(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self.results[name] = self.memory.holding(values)
        return self.results[name]

    def linears(self, p: float) -> None:
        tokens, k, layers = 101, 192, [(130, 33), (64, 0), (33, 16)]
        x, group = self.randn(tokens, k), []
        for i, (n, rank) in enumerate(layers):
            weight, lora = quantize(self.randn(n, k, dtype=torch.float32), double_quant=True), None
            if rank:
                a, b = self.randn(rank, k), self.randn(n, rank)
                da, db = (
                    self.holding(f"{name}{i}", torch.full(t.shape, SENTINEL)) for name, t in (("dA", a), ("dB", b))
                )
                lora = Lora(a, b, da, db, scale=0.5, index=i)
            group.append(Linear(weight, self.randn(n), lora))
        outs = [self.out(f"out{i}", tokens, n) for i, (n, _) in enumerate(layers)]
        us = [self.out(f"u{i}", tokens, rank) if rank else None for i, (_, rank) in enumerate(layers)]
        keys = torch.empty(tokens, dtype=torch.int64)
        dropout_keys(keys, torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), torch.tensor(1), 42)
        dropout = Dropout(p, keys) if p else None
        self.ops.linear_lora_forward(outs, us, x, group, dropout)
        douts = [self.randn(tokens, n) for n, _ in layers]
        self.ops.linear_lora_backward(self.out("dx", tokens, k), douts, x, us, group, dropout)

    def attention(self, window: int | None) -> None:
        total, bounds, shape, kv_shape = 180, [0, 1, 70, 103, 180], (6, 40), (2, 40)
        q, dout = (self.randn(total, *shape) for _ in range(2))
        k, v = (self.randn(total, *kv_shape) for _ in range(2))
        out, lse = self.out("out", total, *shape), self.out("lse", total, 6, dtype=torch.float32)
        self.ops.attention_forward(out, lse, q, k, v, bounds, 0.2, window)
        grads = [self.out("dq", total, *shape), self.out("dk", total, *kv_shape), self.out("dv", total, *kv_shape)]
        self.ops.attention_backward(*grads, dout, out, lse, q, k, v, bounds, 0.2, window)

    def decode(self) -> None:
        k, layers, tokens = 192, [(400, 16), (64, 0)], 3
        weights = [quantize(self.randn(n, k, dtype=torch.float32), double_quant=True) for n, _ in layers]
        group = [Linear(weights[1]), Linear(self.randn(700, k))]
        empty = torch.empty(0)
        group.append(Linear(weights[0], None, Lora(self.randn(16, k), self.randn(400, 16), empty, empty, 0.5, 0)))
        outs = [self.out(f"decode{n}", tokens, n) for n in (64, 700, 400)]
        self.ops.linear_lora_decode(outs, [None, None, self.out("u", tokens, 16)], self.randn(tokens, k), group, None)
        q, k_new, v_new = self.randn(2, 6, 24), self.randn(2, 3, 24), self.randn(2, 3, 24)
        keys, values = (self.holding(name, self.randn(2, 60, 3, 24)) for name in ("keys", "values"))
        lengths = torch.tensor([60, 31])
        self.ops.cached_attention_forward(
            self.out("attention", 2, 6, 24), q, k_new, v_new, keys, values, lengths, 0.2, 40
        )

    def head(self) -> None:
        tokens, hidden, vocab, rows = 90, 72, 2100, torch.arange(1, 90, 2)
        targets = torch.randint(0, vocab, (len(rows),), generator=self.random)
        losses, dhidden = self.out("losses", len(rows), dtype=torch.float32), self.out("dhidden", tokens, hidden)
        logits = self.memory.output(40, vocab, dtype=torch.float32)
        self.ops.head_loss(
            losses, dhidden, self.randn(tokens, hidden), rows, targets, self.randn(vocab, hidden), logits
        )

    def rows(self) -> None:
        x, dout, weight = self.randn(150, 72), self.randn(150, 72), self.randn(72, dtype=torch.float32)
        out, rstd, dx = self.out("norm", 150, 72), self.out("rstd", 150, dtype=torch.float32), self.out("dx", 150, 72)
        self.ops.rms_norm_forward(out, rstd, x, weight, 1e-5)
        dweight = self.holding("dweight", torch.full((72,), SENTINEL))
        self.ops.rms_norm_backward(dx, dweight, dout, x, rstd, weight, out)
        cos, sin = self.randn(150, 9, dtype=torch.float32), self.randn(150, 9, dtype=torch.float32)
        self.ops.rope_forward(self.holding("rope", x.view(150, 3, 24)), cos, sin)
        gate, up, d = (self.randn(150, 333) for _ in range(3))
        self.ops.swiglu_forward(self.out("swiglu", 150, 333), gate, up)
        self.ops.swiglu_backward(self.out("dgate", 150, 333), self.out("dup", 150, 333), d, gate, up)
        ids = torch.randint(0, 150, (77,), generator=self.random)
        self.ops.embedding_forward(self.out("embedding", 77, 72), ids, x)

    def optimizer(self) -> None:
        n = 200_003
        grad, state = self.randn(n, dtype=torch.float32), self.randn(n, dtype=torch.float32)
        self.ops.sum_squares(self.out("squares", dtype=torch.float64), grad)
        held = [self.holding(name, state.abs()) for name in ("param", "exp_avg", "exp_avg_sq")]
        scale, lr = torch.tensor(0.3, dtype=torch.float64), torch.tensor(1e-3, dtype=torch.float64)
        self.ops.adamw_step(*held, grad, scale, torch.tensor(False), lr, torch.tensor(3), (0.9, 0.999), 1e-8, 0.1)


PARTS = {
    "linears": lambda run: run.linears(0.0),
    "linears-dropout": lambda run: run.linears(0.3),
    "attention": lambda run: run.attention(None),
    "attention-window": lambda run: run.attention(45),
    "decode": Run.decode,
    "head": Run.head,
    "rows": Run.rows,
    "optimizer": Run.optimizer,
}


@pytest.fixture(autouse=True, scope="module")
def _end_threads() -> Iterator[None]:
    """Contexts are kept until exit: these had rather end now."""
    yield
    if library.available()[0]:
        for isa in library.supported_isas():
            for threads in (1, 3, 4):
                library.context(isa, threads).close()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("implementation", NATIVE.values(), ids=NATIVE)
def test_one_to_four_threads_and_twice(memory: GuardedMemory, implementation: Implementation, part: str) -> None:
    """N3, N4: one to four threads, and the same twice: the same bits."""
    results = []
    for threads in (1, 2, 3, 4, 2):
        run = Run(memory, backends.make_ops(implementation, memory, threads), implementation.dtype)
        PARTS[part](run)
        results.append(run.results)
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        different = [name for name, tensor in results[0].items() if not torch.equal(other[name], tensor)]
        assert not different  # a NaN left in an output is different from itself
