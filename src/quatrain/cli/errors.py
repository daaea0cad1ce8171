"""How a failure looks: one `error:` line, a `cause:` line for each link of its chain, a `try:` hint; all on stderr."""

from __future__ import annotations

import errno
import os
import sys
import traceback

from quatrain.errors import QuatrainError

INTERRUPTED = 130
ISSUES = "this is a bug in Quatrain; run again with --debug and report what it prints"


def report(error: BaseException, *, debug: bool) -> int:
    """Print `error` and return the exit code for it."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, QuatrainError):
        _print(str(error), _causes(error), error.hint)
        return error.exit_code
    if isinstance(error, MemoryError):
        _print("out of memory", [str(error)] if str(error) else [], "see `quatrain plan` for where the memory goes")
        return 4
    if isinstance(error, PermissionError) and error.filename is not None:
        # Any look at a path may meet this, the question whether it exists included.
        _print(f"{os.fsdecode(error.filename)}: {error.strerror}", _causes(error), "allow access to it and its folders")
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename is not None:
        _print(f"{os.fsdecode(error.filename)}: {error.strerror}", _causes(error), "give it a shorter name")
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _print(str(error), _causes(error), "free some space")
        return 4
    _print(f"unexpected {type(error).__name__}: {error}", _causes(error), ISSUES)
    return 1


def usage(message: str, command: str) -> int:
    """Print a mistake on the command line and return its exit code."""
    _print(message, [], f"{command} --help")
    return 2


def _causes(error: BaseException) -> list[str]:
    causes, seen = [], {id(error)}
    while (error := error.__cause__) is not None and id(error) not in seen:  # type: ignore[assignment]
        seen.add(id(error))
        causes.append(f"{type(error).__name__}: {error}" if not isinstance(error, QuatrainError) else str(error))
    return causes


def _print(message: str, causes: list[str], hint: str | None) -> None:
    first, *rest = message.splitlines() or [""]
    lines = [_label("error:", 31) + " " + _one_line(first), *rest]
    lines += [_label("cause:", 33) + " " + _one_line(cause) for cause in causes]
    if hint:
        lines.append(_label("try:", 32) + " " + _one_line(hint).removeprefix("try "))
    print("\n".join(lines), file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _label(word: str, colour: int) -> str:
    plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ
    return word if plain else f"\x1b[1;{colour}m{word}\x1b[0m"
