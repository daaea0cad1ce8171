"""Terminal output shared by the commands: consoles, numbers, small aligned blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LABEL_WIDTH = 10


def stdout() -> Console:
    """Standard output, coloured and as wide as the terminal; plain and unwrapped when it is not one."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, markup=False, width=100, soft_wrap=True)
    return console


def block(console: Console, label: str, lines: Iterable[str], style: str = "bold cyan") -> None:
    """`label` in the left column, the lines in the right one; in a terminal wrapped below themselves."""
    from rich.text import Text

    width = max(20, console.width - LABEL_WIDTH - 1)
    wrapped = [part for line in lines for part in (_wrap(line, width) if console.is_terminal else [line])]
    for index, line in enumerate(wrapped):
        start = label if index == 0 else ""
        console.print(Text.assemble((start.ljust(LABEL_WIDTH), style), " ", line), soft_wrap=True)


def _wrap(line: str, width: int) -> list[str]:
    """Aligned columns (two spaces in a row) keep their spaces; other text is wrapped between words, as far in as the
    line begins, and never inside `--an-option`."""
    indent = line[: len(line) - len(line.lstrip())]
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)
    return lines or [""]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count(number: float) -> str:
    """`4,884,480`."""
    return f"{number:,.0f}"


def millions(number: float) -> str:
    """`134.5 M`, or the plain number where that would show nothing."""
    return f"{number / 1e6:,.1f} M" if number >= 1e5 else count(number)


def megabytes(size: float) -> str:
    """`512.3 MB`, decimal."""
    return f"{size / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def several(number: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count(number)} {thing}" + ("" if number == 1 else "s")
