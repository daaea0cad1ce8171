"""Models to measure on: one that exists, or random weights in a well-known shape, so that nothing has to be fetched."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from quatrain.checkpoint import names
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import ConfigError
from quatrain.model.spec import ModelSpec, RopeSpec

QKV = frozenset({"q_proj", "k_proj", "v_proj"})

SHAPES = {
    "smollm2-135m": ModelSpec(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope=RopeSpec(theta=100_000.0, rotary_dim=64),
        max_position_embeddings=8192, tie_word_embeddings=True, windows=(None,) * 30,
    ),
    "qwen2.5-0.5b": ModelSpec(
        family="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
        num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1_000_000.0, rotary_dim=64),
        max_position_embeddings=32768, tie_word_embeddings=True, windows=(None,) * 24, biased=QKV,
    ),
    "qwen2.5-1.5b": ModelSpec(
        family="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=1_000_000.0, rotary_dim=128),
        max_position_embeddings=32768, tie_word_embeddings=True, windows=(None,) * 28, biased=QKV,
    ),
}  # fmt: skip
"""The published shapes, by the name that `--shape` takes."""

_DRAWN = (1 << 20) + 7
"""Random values that are drawn once and repeated: drawing billions would take longer than the measurement. An odd
number, so that the rows of a weight differ."""


class RandomWeights(ModelSource):
    """A model of one of `SHAPES`: weights uniform with standard deviation 0.02, norms 1, no tokenizer."""

    files = ()

    def __init__(self, shape: str) -> None:
        if shape not in SHAPES:
            raise ConfigError(f"shape: no shape {shape!r}", hint=f"choose one of {', '.join(SHAPES)}")
        self.name, self.spec = f"random weights, shape {shape}", SHAPES[shape]

    def inventory(self) -> dict[str, TensorInfo]:
        shapes = names.expected_shapes(self.spec)
        if self.spec.tie_word_embeddings:
            del shapes[names.HEAD]
        return {name: TensorInfo(shape, "BF16", 2 * math.prod(shape)) for name, shape in shapes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        shape = self.inventory()[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        size = math.prod(shape)
        return self._drawn.repeat(-(-size // _DRAWN))[:size].view(shape)

    @cached_property
    def _drawn(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return (torch.rand(_DRAWN, generator=generator) - 0.5).mul_(0.02 * math.sqrt(12)).to(torch.bfloat16)

    def read_tokenizer(self) -> Tokenizer | None:
        return None


def open_model(model: str, shape: str | None) -> ModelSource:
    """Random weights in `shape`, or else what `model` names. Raises ConfigError and as `open_source`."""
    return RandomWeights(shape) if shape else open_source(model)


def row_length(tokens: int, longest: int) -> int:
    """The length of the rows that `tokens` are made of: `longest`, or all of them where there are fewer. Raises
    ConfigError where they do not divide."""
    row = min(tokens, longest)
    if tokens % row:
        raise ConfigError(
            f"{tokens} tokens are no whole number of rows of {row}", hint=f"try {tokens // row * row} tokens"
        )
    return row
