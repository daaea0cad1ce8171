"""Typed access to a configuration somebody else wrote: every problem is collected, every default taken is noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quatrain.errors import ModelError

_REQUIRED = object()


class ConfigValues:
    """The values of one configuration. Getters return a usable value and record what was wrong; `check` raises it all.

    `notes` lists the defaults that were taken because a key is absent, for the user to see.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.problems: list[str] = []
        self.notes: list[str] = []

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._get(name, default, placeholder=minimum)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problems.append(f"{name}: want an integer of at least {minimum}, got {value!r}")
            return minimum
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self._get(name, default, placeholder=1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self.problems.append(f"{name}: want a number above 0, got {value!r}")
            return 1.0
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. An absent one is false or the usual default in every file, so it makes no note."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name}: want true or false, got {value!r}")
            return default
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default, placeholder=default)
        if not isinstance(value, str):
            self.problems.append(f"{name}: want text, got {value!r}")
            return default
        return value

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def check(self, *, hint: str | None = None) -> None:
        """Raises one ModelError with every problem so far."""
        if self.problems:
            raise ModelError(f"{self.where}: " + "; ".join(self.problems), hint=hint)

    def _get(self, name: str, default: Any, placeholder: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problems.append(f"{name} is missing")
            return placeholder
        self.notes.append(f"{name} is not in {self.where}: taking the default {default}")
        return default
