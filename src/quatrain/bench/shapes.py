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
from quatrain.model.shapes import shape_spec
from quatrain.model.spec import ModelSpec

_DRAWN = (1 << 20) + 7
"""Random values that are drawn once and repeated: drawing billions would take longer than the measurement. An odd
number, so that the rows of a weight differ."""


class RandomWeights(ModelSource):
    """A model of a well-known shape (`model/shapes.py`), or of `spec` under this name: weights uniform with standard
    deviation 0.02, norms 1, no tokenizer."""

    files = ()

    def __init__(self, shape: str, spec: ModelSpec | None = None) -> None:
        self.name, self.spec = f"random weights, shape {shape}", spec or shape_spec(shape)

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
        weight = torch.empty(size, dtype=torch.bfloat16)  # of its own size: a slice would keep all that was drawn
        for at in range(0, size, _DRAWN):
            piece = weight[at : at + _DRAWN]
            piece.copy_(self._drawn[: piece.numel()])
        return weight.view(shape)

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
