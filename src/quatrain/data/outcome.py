"""What can become of a record on its way to a row: a record, or a reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quatrain.errors import DataError


@dataclass(frozen=True)
class Record:
    """One record of a data file, as written. `source` is "file:line" (Parquet: "file:row")."""

    values: dict[str, Any]
    source: str


@dataclass(frozen=True)
class Skipped:
    """A record that does not become a row. `reason` is the short text that counts are kept by; `detail` is about this
    record. `bad` separates what is wrong with the data from what a stated policy leaves out (length, empty answers)."""

    source: str
    reason: str
    detail: str
    bad: bool = True


class RowError(DataError):
    """This row cannot be used; the rows after it may be. `reason` is what its count is kept by."""

    def __init__(self, reason: str, detail: str | None = None, *, bad: bool = True, hint: str | None = None) -> None:
        super().__init__(detail or reason, hint=hint)
        self.reason = reason
        self.bad = bad

    def at(self, source: str) -> Skipped:
        detail = f"{self} ({self.hint})" if self.hint else str(self)
        return Skipped(source, self.reason, detail, self.bad)


def without_fill(value: Any) -> Any:
    """A nested value without the null fields of its structs: tables give every row all fields that any row has, so a
    null there says "absent". Nulls inside lists are data and stay."""
    if isinstance(value, dict):
        return {name: without_fill(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_fill(inner) for inner in value]
    return value
