"""One self-contained HTML page: its style, its pieces and the one place where text is escaped.

A page works from disk and without a network: no script, no font, no picture from elsewhere. Everything here takes plain
text and escapes it; what is already markup is `Html`, and only `tag` makes that.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = 8  # of series, as the style names them: --c0 to --c7

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_VOID = frozenset({"br", "meta", "line", "rect", "path", "circle"})

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


class Html(str):
    """Markup that needs no more escaping."""

    __slots__ = ()


Content = str | int | float | None
"""Text to be escaped, or `Html` to be taken as it is; None shows as a dash."""


def tag(name: str, /, *children: Content, **attributes: Content | bool) -> Html:
    """`<name attributes>children</name>`, children and values escaped unless they are `Html`. In attribute names a last
    underscore goes and others become hyphens; None and False leave the attribute out."""
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    inside = "".join(f' {key}="{_escape(value)}"' for key, value in given if value is not None and value is not False)
    if name in _VOID and not children:
        return Html(f"<{name}{inside}/>")
    return Html(f"<{name}{inside}>{''.join(map(_escape, children))}</{name}>")


def join(*parts: Html) -> Html:
    """Markup after markup."""
    return Html("".join(parts))


def _escape(value: Content | bool) -> str:
    if isinstance(value, Html):
        return value
    text = "–" if value is None else str(value)
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def page(
    title: str, *sections: Html, status: Html | None = None, subtitle: str = "", refresh: int | None = None
) -> str:
    """The whole document. `status` stands beside the title; `refresh` makes an open page load itself again, in
    seconds."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="robots", content="noindex"),
    ]
    if refresh is not None:
        head.append(tag("meta", http_equiv="refresh", content=refresh))
    head += [tag("title", title), tag("style", Html(_STYLE))]
    heading = tag("h1", title, *((" ", status) if status else ()))
    header = tag("header", heading, *((tag("p", subtitle, class_="muted"),) if subtitle else ()))
    body = tag("body", header, tag("main", *sections))
    return f'<!DOCTYPE html>\n<html lang="en">\n{tag("head", *head)}\n{body}\n</html>\n'


def section(title: str, *parts: Html, note: str = "") -> Html:
    """A card of the page. `note` says below the title how to read it."""
    return tag("section", tag("h2", title), *((tag("p", note, class_="note"),) if note else ()), *parts)


def status(text: str, kind: str = "") -> Html:
    """A word in a pill. `kind` is good, warn, bad or nothing."""
    return tag("span", text, class_=f"pill {kind}".strip())


def figures(values: Mapping[str, str | tuple[str, str]]) -> Html:
    """Key figures: label to value, or to (value, small text below it)."""
    tiles = []
    for label, value in values.items():
        shown, below = (value, "") if isinstance(value, str) else value
        small = (tag("small", below),) if below else ()
        tiles.append(tag("div", tag("dt", label), tag("dd", shown, *small)))
    return tag("dl", *tiles, class_="figures")


def table(head: Sequence[str], rows: Sequence[Sequence[Content]], numbers: Sequence[int] | None = None) -> Html:
    """Rows under a head (an empty `head`: none). The columns `numbers` are set right; by default those after the first
    that hold numbers only. A wide table scrolls by itself, not the page."""
    if numbers is None:
        numbers = list(range(1, len(rows[0]))) if rows and all(_numeric(row[1:]) for row in rows) else []

    def cells(kind: str, row: Sequence[Content]) -> list[Html]:
        return [tag(kind, cell, class_="number" if at in numbers else None) for at, cell in enumerate(row)]

    lines = [tag("tr", *cells("td", row)) for row in rows]
    top = (tag("thead", tag("tr", *cells("th", head))),) if head else ()
    return tag("div", tag("table", *top, tag("tbody", *lines)), class_="scroll")


def _numeric(cells: Sequence[Content]) -> bool:
    return all(cell is None or (str(cell).strip() or "x")[0] in "0123456789+-−." for cell in cells)


def bar(share: float) -> Html:
    """A bar as long as `share` of its cell, from 0 to 1."""
    return tag("span", "", class_="bar", style=f"width: {100 * min(max(share, 0.0), 1.0):.1f}%")


def pairs(values: Mapping[str, Any]) -> Html:
    """A table of names and values."""
    return table((), [(name, value) for name, value in values.items()], numbers=())


def more(summary: str, *parts: Html) -> Html:
    """Parts that open on a click."""
    return tag("details", tag("summary", summary), *parts)


def paragraph(text: Content, kind: str = "") -> Html:
    return tag("p", text, class_=kind or None)


def pre(*parts: Content) -> Html:
    """Text whose line breaks count. A part may be `mark(...)`."""
    return tag("pre", *parts)


def mark(text: str) -> Html:
    """Text that stands out, such as the learned part of a row."""
    return tag("mark", text)


def charts(*parts: Html) -> Html:
    """Charts side by side where there is room, else below each other."""
    return tag("div", *parts, class_="charts")


def legend(entries: Sequence[tuple[str, int, str]]) -> Html:
    """(name, colour, style) of each series; styles are `faint`, `dashed` or nothing."""
    items = [
        tag("li", name, style=f"--c: var(--c{colour % COLOURS})", class_=style or None)
        for name, colour, style in entries
    ]
    return tag("ul", *items, class_="legend")
