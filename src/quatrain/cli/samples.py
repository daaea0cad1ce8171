"""Rows in the terminal: the decoded text with the learned part marked, or token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quatrain.cli.console import block, columns
from quatrain.data.row import IGNORE

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.data.report import Sample, SampleToken

OPEN, CLOSE = "[[", "]]"  # marks the learned part where there are no colours
_LEARNED, _CONTEXT, _SPECIAL = "bold green", "dim", "magenta"


def show(console: Console, sample: Sample, *, tokens: bool = False) -> None:
    """What the model learns to write is green, or in [[ ]] where there are no colours; special tokens stand out."""
    coloured = console.is_terminal and console.color_system is not None
    learned = (
        "green is learned; magenta and reversed: special tokens"
        if coloured
        else f"what is learned is in {OPEN} {CLOSE}"
    )
    console.print()
    block(console, "sample", [sample.source if tokens else f"{sample.source} ({learned})"])
    if tokens:
        _table(console, sample, coloured)
    else:
        _text(console, sample, coloured)


def visible(text: str, keep: str = "\n\t") -> str:
    """`text` with control and direction characters escaped, since a terminal would obey them; `keep` stays."""
    from quatrain.data.findings import escape

    return "".join(c if c.isprintable() or c in keep else escape(c) for c in text)


def _text(console: Console, sample: Sample, coloured: bool) -> None:
    from rich.text import Text

    text = Text()
    learned = False
    for token in sample.tokens:
        if token.supervised != learned and not coloured:
            text.append(OPEN if token.supervised else CLOSE)
        learned = token.supervised
        text.append(visible(token.text), _style(token) if coloured else None)
    if learned and not coloured:
        text.append(CLOSE)
    console.print(text, soft_wrap=True)


def _table(console: Console, sample: Sample, coloured: bool) -> None:
    """A line for each token: its place, id, label and text; the text of a token is empty while a character is short of
    bytes."""
    from rich.text import Text

    rows = [[str(at), str(token.id), _label(token)] for at, token in enumerate(sample.tokens)]
    head, *lines = columns([["place", "id", "label"], *rows])
    console.print(Text(f"{head}  text", style="bold" if coloured else ""), soft_wrap=True)
    for line, token in zip(lines, sample.tokens, strict=True):
        shown = f'{line}  "{visible(token.text, keep="")}"'
        console.print(Text(shown, style=_style(token) if coloured else ""), soft_wrap=True)


def _style(token: SampleToken) -> str:
    if token.supervised:
        return f"{_LEARNED} reverse" if token.special else _LEARNED
    return _SPECIAL if token.special else _CONTEXT


def _label(token: SampleToken) -> str:
    return str(token.id if token.supervised else IGNORE)
