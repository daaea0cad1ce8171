from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
