"""The listed shapes have exactly the parameters that their models are published with."""

from __future__ import annotations

import pytest

from quatrain.errors import ConfigError
from quatrain.model.shapes import SHAPES, num_parameters, shape_spec

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}


def test_every_shape_has_its_models_parameters() -> None:
    assert {name: num_parameters(shape_spec(name)) for name in SHAPES} == PARAMETERS


def test_numbers_that_no_count_shows() -> None:
    """eps, rope and windows change the maths, not the size."""
    qwen3, llama, mistral = (shape_spec(name) for name in ("qwen3-8b", "Llama-3.1-8B", "mistral-7b"))
    assert (qwen3.rms_norm_eps, llama.rms_norm_eps, qwen3.rope.theta, llama.rope.theta) == (1e-6, 1e-5, 1e6, 5e5)
    assert (llama.rope.kind, llama.rope.factor, shape_spec("llama-3.2-1b").rope.factor) == ("llama3", 8.0, 32.0)
    assert (qwen3.qk_norm, llama.qk_norm, set(mistral.windows)) == (True, False, {None})
    assert shape_spec("qwen2.5-0.5b").biased == {"q_proj", "k_proj", "v_proj"} and not llama.biased


def test_an_unknown_shape_names_near_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3-9b") as error:
        shape_spec("qwen3-9b")
    assert "qwen3-8b" in str(error.value.hint)
