"""What a shell offers after a flag: the values of a choice, known models, runs nearby. Where nothing of these fits, the
shell offers file names."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_MOST_RUNS = 50

Completer = Callable[[str], list[str]]


def completer(name: str, annotation: Any) -> Completer | None:
    """For an option by its name and declared type; None where only file names make sense."""
    if name == "model":
        return models
    if name in ("adapter", "out"):
        return runs
    if name == "lora_targets":
        return targets
    choices = [str(choice) for member in _members(annotation) for choice in _choices(member)]
    return (lambda incomplete: _starting(incomplete, choices)) if choices else None


def models(incomplete: str) -> list[str]:
    """Aliases, and runs nearby."""
    from quatrain.checkpoint.open import ALIASES

    return [*_starting(incomplete, ALIASES), *runs(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Run folders below the working folder, or below the folder that is being typed."""
    at = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    found = sorted({str(record.parent) for record in islice(_records(at), _MOST_RUNS)})
    return _starting(incomplete, found)


def targets(incomplete: str) -> list[str]:
    """Linears; after a comma the next one of a list."""
    from quatrain.model.spec import LINEARS

    before, comma, last = incomplete.rpartition(",")
    names = LINEARS if comma else ("all-linear", *LINEARS)
    return [before + comma + name for name in _starting(last, names)]


def _records(at: Path) -> Iterator[Path]:
    from quatrain.train.preflight import RUN_FILE

    for pattern in (RUN_FILE, f"*/{RUN_FILE}", f"*/*/{RUN_FILE}"):
        yield from at.glob(pattern)


def _starting(incomplete: str, names: typing.Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _members(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or () if typing.get_origin(annotation) is not typing.Literal else (annotation,)


def _choices(member: Any) -> tuple[Any, ...]:
    return typing.get_args(member) if typing.get_origin(member) is typing.Literal else ()
