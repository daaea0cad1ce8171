"""Text out of a stream of ids: whole characters only, and nothing from a stop text on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Takes ids one by one and gives text once its bytes are complete; `finish` gives what is left.

    Each step decodes a short window (the last text given out, and what followed), since a token's text can depend on
    the token before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # ids[:shown] have been given out; they stay as context

    def push(self, token_id: int) -> str:
        """The text that became complete with this id, often empty."""
        self._ids.append(int(token_id))
        before, text = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""  # a character is still short of bytes, or the token shows nothing
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text[len(before) :]

    def finish(self) -> str:
        """The rest; bytes that never became a character show as U+FFFD."""
        before, text = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        self._ids, self._shown = [], 0
        return text[len(before) :]


class StopTexts:
    """Holds text back while it may still be the beginning of a stop text; nothing from a stop text on comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is safe to show. Sets `stopped` when a stop text is complete."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def finish(self) -> str:
        """What was held back and turned out not to be a stop text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
