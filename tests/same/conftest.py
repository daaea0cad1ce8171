from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from quatrain.ops import library


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


ARITHMETICS = [(kernels, dtype) for kernels in ("reference", "portable", "best") for dtype in ("fp32", "bf16")]


def arithmetic_options(kernels: str, dtype: str) -> dict[str, Any]:
    """The configuration keys of one of `ARITHMETICS`; skips what this machine or this build lacks."""
    if kernels != "reference":
        there, reason = library.available()
        if not there:
            pytest.skip(reason)
        if kernels == "best" and library.best_isa() == "portable":
            pytest.skip("portable is the best of this machine")
    return {"kernels": library.best_isa() if kernels == "best" else kernels, "compute_dtype": dtype}


@pytest.fixture(params=ARITHMETICS, ids="-".join)
def arithmetic(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The reference ops, and native ones at both ends, in fp32 and bf16."""
    return arithmetic_options(*request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
