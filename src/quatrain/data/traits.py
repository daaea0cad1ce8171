"""What a chat template is like, learned from rendering made-up conversations with sentinels for texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from quatrain.data.align import Sentinels
from quatrain.data.outcome import RowError
from quatrain.data.tokenizer import Tokenizer

# Reasoning marks that templates act on even where the tokenizer has no token for them.
_REASONING = ("<think>", "</think>")
_TURNS = ("user", "assistant", "user")


class TemplateTraits:
    """`render(messages, add_generation_prompt)` renders with the template of `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, render: Callable[[list[dict[str, Any]], bool], str]) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._text = tokenizer.chat_template or ""

    @cached_property
    def answer_marks(self) -> re.Pattern[str] | None:
        """Marks inside answers that the template acts on and that do not shape turns: `<think>`, `<tool_call>`, ..."""
        own = [token for token, special in self._tokenizer.added_tokens.items() if not special]
        turns = self._scaffold(("system", *_TURNS), prompt=True) or self._scaffold(_TURNS, prompt=True) or []
        marks = {mark for mark in (*own, *_REASONING) if mark in self._text and mark not in "".join(turns)}
        longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marks else None

    @cached_property
    def written_end(self) -> str | None:
        """The token that the template writes behind an answer, if it writes one."""
        scaffold = self._scaffold(_TURNS[:2])
        behind = scaffold[-1].lstrip() if scaffold else ""
        longest_first = sorted(self._tokenizer.added_tokens, key=len, reverse=True)
        return next((token for token in longest_first if behind.startswith(token)), None)

    @property
    def end_tokens(self) -> list[str]:
        """Tokens that end an assistant turn: the template's, and EOS."""
        return [token for token in dict.fromkeys((self.written_end, self._tokenizer.eos_token)) if token]

    @cached_property
    def ends(self) -> re.Pattern[str] | None:
        """Matches a token that ends an assistant turn."""
        return re.compile("|".join(map(re.escape, self.end_tokens))) if self.end_tokens else None

    @cached_property
    def lead(self) -> str:
        """White space between the generation prompt and the answer. The model has to write it, so it is learned."""
        turn, prompt = self._scaffold(_TURNS[:2]), self._scaffold(_TURNS[:1], prompt=True)
        if turn is None or prompt is None or len(turn) != 3 or not turn[1].startswith(prompt[-1]):
            return ""
        lead = turn[1][len(prompt[-1]) :]
        return lead if lead.isspace() else ""

    def _scaffold(self, roles: Sequence[str], prompt: bool = False) -> list[str] | None:
        """What the template writes around the texts of a conversation, or None if it refuses these roles."""
        sentinels = Sentinels(avoid=self._text)
        messages = [{"role": role, "content": sentinels.add("")} for role in roles]
        try:
            return sentinels.split(self._render(messages, prompt))[0]
        except RowError:
            return None
