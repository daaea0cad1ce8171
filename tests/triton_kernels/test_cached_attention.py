"""Attention over a key/value cache: every row against autograd's last query, whatever the parts and the size."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from ops.memory import GuardedMemory
from oracles import autograd


class Cache:
    """Rows of other lengths side by side; the slots behind them are NaN, which nobody may see."""

    def __init__(self, dtype: torch.dtype, lengths: list[int], slots: int, heads: int, kv_heads: int, dim: int) -> None:
        random = torch.Generator().manual_seed(heads)
        self.lengths, shape = lengths, (len(lengths), slots, kv_heads, dim)
        self.keys, self.values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        self.q = torch.randn(len(lengths), heads, dim, generator=random, dtype=torch.float64).to(dtype)
        for row, length in enumerate(lengths):
            for cache in (self.keys, self.values):
                cache[row, :length] = torch.randn(length, kv_heads, dim, generator=random, dtype=torch.float64)

    def run(self, memory: GuardedMemory, window: int | None) -> torch.Tensor:
        from quatrain.ops.attention.triton_cached import cached_attention_forward

        out, dim = memory.output(*self.q.shape, dtype=self.q.dtype), self.q.shape[2]
        last = [(row, max(0, length - 1)) for row, length in enumerate(self.lengths)]
        k, v = (torch.stack([cache[place] for place in last]) for cache in (self.keys, self.values))
        keys, values = self.keys.clone(), self.values.clone()
        for place in last:  # the newest token is yet to be put into the cache
            keys[place] = values[place] = float("nan")
        cached_attention_forward(
            out, self.q, k, v, keys, values, torch.tensor(self.lengths), dim**-0.5, window,
            memory.output(1 << 20, dtype=torch.uint8),
        )  # fmt: skip
        for row, length in enumerate(self.lengths):
            assert torch.equal(keys[row, :length], self.keys[row, :length])
            assert torch.equal(values[row, :length], self.values[row, :length])
        return out


@pytest.fixture(autouse=True, params=[256, 32])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The shipped length of a part, and one so short that a row has many."""
    for module in ("triton_sizes", "attention.triton_cached"):
        monkeypatch.setattr(f"quatrain.ops.{module}.CACHE_PART", request.param)
    return request.param


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (3, 1, 64), (4, 2, 96), (8, 2, 128), (8, 1, 256)])
def test_last_query_of_each_row(
    memory: GuardedMemory, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    lengths = [1, 32, 33, 101]
    cache = Cache(dtype, lengths, 110, heads, kv_heads, dim)
    want = []
    for row, length in enumerate(lengths):
        queries = cache.q[row].double().expand(length, heads, dim)
        k, v = cache.keys[row, :length].double(), cache.values[row, :length].double()
        want.append(autograd.attention(queries, k, v, [length], dim**-0.5, window)[-1])
    bound = tol.reduction(torch.float32, 101 * dim) + tol.elementwise(dtype, 4)
    tol.assert_close(cache.run(memory, window), torch.stack(want), bound, "out")


def test_a_row_depends_on_itself_alone(memory: GuardedMemory, dtype: torch.dtype) -> None:
    """The same bits beside other rows and in a larger cache, and every time."""
    cache = Cache(dtype, [70, 0, 55], 80, 4, 2, 32)
    out = cache.run(memory, 60)
    assert not out[1].any()  # a row that has no tokens
    assert torch.equal(cache.run(memory, 60), out)
    alone = Cache(dtype, [55], 300, 4, 2, 32)
    alone.q = cache.q[2:].contiguous()
    for name in ("keys", "values"):
        getattr(alone, name)[:, :55] = getattr(cache, name)[2:, :55]
    assert torch.equal(alone.run(memory, 60)[0], out[2])
