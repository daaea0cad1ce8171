"""Where in a rendered chat does each text of the data stand? Found by position, never by searching for it.

The chat is rendered twice: as it is, and with every text replaced by a sentinel that occurs nowhere else. The second
render shows the scaffold: what the template writes between the texts. The first must then be that scaffold with the
texts in the sentinels' places, whole or changed in one of a few known ways (stripped, or escaped in JSON).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quatrain.data.outcome import RowError


@dataclass(frozen=True)
class Segment:
    """`text[begin:end]` of a rendered chat: what slot `slot` became, or scaffold where `slot` is None."""

    begin: int
    end: int
    slot: int | None = None


class Sentinels:
    """One sentinel for each text (slot). They are letters and digits only, so that templates leave them alone."""

    def __init__(self, avoid: str) -> None:
        self._head = "Qslot"
        while self._head in avoid:
            self._head += "q"
        self.texts: list[str] = []

    def add(self, text: str) -> str:
        """A sentinel that stands for `text`."""
        self.texts.append(text)
        return f"{self._head}{len(self.texts) - 1:07d}Z"

    def split(self, marked: str) -> tuple[list[str], list[int]]:
        """The scaffold of a render with sentinels, and the slots that stand between its parts (one fewer)."""
        parts = re.split(f"{self._head}(\\d{{7}})Z", marked)
        return parts[0::2], [int(number) for number in parts[1::2]]

    def align(self, rendered: str, marked: str) -> list[Segment]:
        """Segments that cover `rendered` exactly. Raises RowError if it is not the scaffold of `marked` filled in."""
        scaffold, slots = self.split(marked)
        places = _fill(rendered, scaffold, [self.texts[slot] for slot in slots])
        if places is None:
            raise RowError(
                "the chat template changes the texts",
                "the chat template changes the texts in a way that hides where the answers are",
                hint="choose another chat_template",
            )
        segments, at = [], 0
        for slot, (begin, end) in zip(slots, places, strict=True):
            segments += [Segment(at, begin), Segment(begin, end, slot)]
            at = end
        return [*segments, Segment(at, len(rendered))]


def _forms(text: str) -> Iterator[str]:
    """What a template may make of a text, likeliest first."""
    yield text
    changed = (text.strip(), text.strip("\n"), text.lstrip(), text.rstrip(), text.lstrip("\n"), text.rstrip("\n"))
    escaped = (json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
    yield from (form for form in dict.fromkeys((*changed, *escaped)) if form != text)


def _fill(rendered: str, scaffold: Sequence[str], texts: Sequence[str]) -> list[tuple[int, int]] | None:
    """Where each text stands in `rendered`, given that `scaffold` parts stand before, between and after them."""
    if not rendered.startswith(scaffold[0]):
        return None
    places: list[tuple[int, int]] = []
    choices = [_ends(rendered, len(scaffold[0]), scaffold, texts, 0)]
    dead: set[tuple[int, int]] = set()  # (texts placed, position) that led nowhere
    while choices:
        done = len(choices) - 1
        at = places[-1][1] + len(scaffold[done]) if places else len(scaffold[0])
        if done == len(texts):
            if at == len(rendered):
                return places
        else:
            end = next(choices[-1], None)
            if end is not None:
                if (done + 1, end) not in dead:
                    places.append((at, end))
                    following = end + len(scaffold[done + 1])
                    choices.append(_ends(rendered, following, scaffold, texts, done + 1))
                continue
        choices.pop()
        if places:
            dead.add((done, places.pop()[1]))
    return None


def _ends(rendered: str, at: int, scaffold: Sequence[str], texts: Sequence[str], index: int) -> Iterator[int]:
    """Where text `index` can end if it begins at `at` and the next scaffold part follows it."""
    if index < len(texts):
        for form in _forms(texts[index]):
            end = at + len(form)
            if rendered.startswith(form, at) and rendered.startswith(scaffold[index + 1], end):
                yield end
