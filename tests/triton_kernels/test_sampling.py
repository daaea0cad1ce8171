"""Sampling on the device against the same draw in fp64 from a sorted list, and against the distribution itself."""

from __future__ import annotations

import pytest
import torch

from quatrain.ops.sampling.reference import sample_tokens as reference

VOCAB = 301
SETTINGS = [
    (0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (2.0, 40, 0.9), (1.0, 1, 1.0), (1.0, VOCAB, 0.5),
    (0.5, 0, 1e-6), (3.0, 300, 0.999),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of the vocabulary, the last one partly filled."""
    from quatrain.ops import triton_configs

    monkeypatch.setitem(triton_configs.TABLE, "sample", {"*": {"BLOCK": 128, "num_warps": 4, "num_stages": 1}})


def sample(logits: torch.Tensor, draws: torch.Tensor, lengths: list[int], sampling: tuple[float, ...]) -> list[int]:
    from quatrain.ops.sampling.triton import sample_tokens

    tokens = torch.full((len(lengths),), -7)
    sample_tokens(tokens, logits, draws, torch.tensor(lengths), torch.tensor(sampling))
    return tokens.tolist()


def expected(logits: torch.Tensor, draws: torch.Tensor, lengths: list[int], sampling: tuple[float, ...]) -> list[int]:
    tokens = torch.full((len(lengths),), -7)
    reference(tokens, logits, draws, torch.tensor(lengths), torch.tensor(sampling))
    return tokens.tolist()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_it_takes_the_token_that_a_sorted_list_gives(dtype: torch.dtype, sampling: tuple[float, ...]) -> None:
    """16 bits have ties and -0; a row without tokens gets 0, whatever its logits are."""
    random = torch.Generator().manual_seed(3)
    logits = (torch.randn(7, VOCAB, generator=random) * 2).to(dtype)
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, ::3] = -0.0
    logits[3] = -logits[3].abs() - 1
    logits[4] = float("nan")
    lengths = [1, 4, 2, 3, 0, 5, 5]
    draws = torch.rand(7, 5, generator=random)
    assert sample(logits, draws, lengths, sampling) == expected(logits, draws, lengths, sampling)
    assert sample(logits, draws, lengths, sampling)[4] == 0


def test_equal_logits_are_cut_at_the_first_ones(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, VOCAB, dtype=dtype)
    logits[0, 200] = 1
    draws = torch.arange(50).view(1, 50) / 50
    for sampling, kept in (
        ((1.0, 4, 1.0), {0, 1, 2, 200}),
        ((1.0, 0, 0.9999 * (2.7183 + 6) / (2.7183 + 300)), {*range(6), 200}),
    ):
        seen = {sample(logits, draws, [n], sampling)[0] for n in range(1, 51)}
        assert seen == kept == {expected(logits, draws, [n], sampling)[0] for n in range(1, 51)}


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.5, -1.0, 0.0]])
    draws = torch.rand(1, 400, generator=torch.Generator().manual_seed(1))
    rows = logits.expand(400, -1).contiguous()
    seen = sample(rows, draws.view(-1, 1).contiguous(), [1] * 400, (2.0, 0, 1.0))
    shares = torch.tensor(seen).bincount(minlength=6) / 400
    assert float((shares - (logits[0] / 2).softmax(-1)).abs().max()) < 4 * (0.25 / 400) ** 0.5


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])
def test_the_ends_of_the_draw_are_tokens_that_are_kept(dtype: torch.dtype, draw: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)).to(dtype)
    best = logits[0].float().sort(descending=True, stable=True).indices[:9].tolist()
    want = min(best) if draw == 0 else max(best)
    assert sample(logits, torch.full((1, 1), draw), [1], (1.0, 9, 1.0)) == [want]
