"""Quatrain: QLoRA instruction fine-tuning with a hand-derived forward and backward. Importing it starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quatrain.config import GenerateConfig, InstructConfig
from quatrain.errors import QuatrainError

if TYPE_CHECKING:
    from quatrain.data.row import Row
    from quatrain.train.pipeline import InstructPipeline
    from quatrain.train.results import BatchResult, StepResult

__version__ = "0.1.0"
__all__ = [
    "BatchResult",
    "GenerateConfig",
    "InstructConfig",
    "InstructPipeline",
    "QuatrainError",
    "Row",
    "StepResult",
]

_LAZY = {
    "BatchResult": "quatrain.train.results",
    "InstructPipeline": "quatrain.train.pipeline",
    "StepResult": "quatrain.train.results",
    "Row": "quatrain.data.row",
}


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'quatrain' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
