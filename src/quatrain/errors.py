"""The errors Quatrain raises on purpose. Everything else is a bug.

Each kind carries a message (what, where, want and got), an optional `hint` (what to try) and the exit code that the
command line uses for it. The library raises; only `cli` prints and exits.
"""

from __future__ import annotations


class QuatrainError(Exception):
    """Base of all deliberate errors. `hint` is one sentence that says what to try next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(QuatrainError):
    """An option is unknown, out of range, or contradicts another one."""

    exit_code = 2


class DataError(QuatrainError):
    """A training or evaluation row, or a whole data file, cannot be used as it is."""

    exit_code = 3


class ModelError(QuatrainError):
    """A model's configuration, weights or tokenizer cannot be used."""


class CheckpointError(QuatrainError):
    """A saved run or adapter cannot be written, read back or resumed."""


class PlanError(QuatrainError):
    """The run does not fit: memory or disk is short. Raised before the first weight is read."""

    exit_code = 4


class KernelError(QuatrainError):
    """An op was called with arguments outside its contract, or a kernel reported a failure."""
