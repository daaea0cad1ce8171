"""Conversations to text, ids and the spans that are learned.

A conversation is rendered by one template and encoded once. The span of an assistant turn is its content and the end
token behind it; both are found by position (see `align`), so a template needs no markers, may drop parts of earlier
turns, and texts may hold anything, the template's own words included.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quatrain.data.align import Segment, Sentinels
from quatrain.data.outcome import RowError
from quatrain.data.records import Message, map_texts, to_message
from quatrain.data.templates import ChosenTemplate, choose_template, compile_template, no_template_error
from quatrain.data.tokenizer import Encoded, Piece, Tokenizer
from quatrain.data.traits import TemplateTraits

_FOLD_HINT = " (system_policy fold puts system texts in front of the first user message)"
Tools = list[dict[str, Any]] | None
# What Python raises when a template does something odd with a conversation.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class TurnSpan:
    """Where an assistant turn stands: content `[begin, content_end)`, its end token `[content_end, end)` (empty if the
    template writes none). `message` is the turn's place in the conversation. Counts tokens (inside this file also
    characters)."""

    begin: int
    content_end: int
    end: int
    message: int


@dataclass(frozen=True)
class RenderedChat:
    """`spans` count tokens, are in order and do not overlap. `text` is what was encoded."""

    text: str
    ids: list[int]
    spans: list[TurnSpan]


def render_chat(
    messages: Sequence[Message | dict[str, Any]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    *,
    tools: Tools = None,
) -> RenderedChat:
    """Render `messages` (dicts with role and content, or `Message`s) with the tokenizer's chat template.

    Raises DataError if there is no template, and RowError if the template refuses the conversation or hides its turns.
    """
    template = choose_template(tokenizer)
    if not template.takes_chats:
        raise no_template_error()
    turns = [turn if isinstance(turn, Message) else to_message(turn) for turn in messages]
    return ChatRenderer(tokenizer, template).render(turns, tools, add_generation_prompt)


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer in a chat: what the tokenizer's template writes behind one, and EOS."""
    renderer = ChatRenderer(tokenizer, choose_template(tokenizer))
    ids = (tokenizer.token_id(token) for token in renderer.traits.end_tokens)
    return tuple(token_id for token_id in ids if token_id is not None)


@dataclass
class _Marked:
    """Messages with sentinels for their texts; `owner[slot]` is the message that a slot's text belongs to."""

    sentinels: Sentinels
    messages: list[dict[str, Any]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    tool_slots: set[int] = field(default_factory=set)
    composite: set[int] = field(default_factory=set)  # messages that are more than one text

    def slot(self, text: str) -> str:
        self.owner.append(len(self.messages))
        return self.sentinels.add(text)


class ChatRenderer:
    """Renders conversations with one template. `date` is what the template takes for today, `allow_special` lets texts
    spell control tokens."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChosenTemplate, *, date: str | None = None, allow_special: bool = False
    ) -> None:
        self.tokenizer = tokenizer.with_chat_template(template.text)
        self.template, self.date = template, date
        self._allow_special = allow_special
        self._fold_hint = "" if template.folds else _FOLD_HINT
        self._compiled = compile_template(template.text, date)
        self.traits = TemplateTraits(self.tokenizer, lambda messages, prompt: self._text(messages, None, prompt))

    def render(
        self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = False
    ) -> RenderedChat:
        """Text, ids and assistant spans of a conversation. Raises RowError with the reason if they cannot be told."""
        text = self._text([message.as_dict() for message in messages], tools, add_generation_prompt)
        if not self._allow_special:
            self._refuse_unaligned_specials(messages, tools)
        marked = self._mark(messages, text)
        segments = marked.sentinels.align(text, self._text(marked.messages, tools, add_generation_prompt))
        self._refuse_lost_texts(messages, marked, segments)
        if tools and text == self._text([message.as_dict() for message in messages], None, add_generation_prompt):
            hint = "choose a chat_template that takes tools, or take the tools out of the row"
            raise RowError("the chat template leaves out the tools", hint=hint)
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        spans = [self._span(i, marked, text, segments, tools) for i in answers]
        if answers and answers[-1] == len(messages) - 1 and spans[-1].end == spans[-1].content_end:
            text, spans[-1] = self._closed(text, spans[-1])
            segments.append(Segment(segments[-1].end, len(text)))
        if self._allow_special:
            segments = [Segment(0, len(text))]
        pieces = [Piece(text[s.begin : s.end], scaffold=s.slot is None) for s in segments]
        encoded = self.tokenizer.encode_pieces(pieces)
        return RenderedChat(text, encoded.ids, [_in_tokens(span, encoded) for span in spans])

    def prompt_ids(self, user: str, system: str | None = None) -> list[int]:
        """The ids of the prompt for one message. Raises as `render`."""
        turns = [Message("system", system)] if system else []
        return self.render([*turns, Message("user", user)], None, add_generation_prompt=True).ids

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text that asks for an answer to `messages`. Raises RowError if the template refuses them."""
        return self._text([message.as_dict() for message in messages], None, True)

    def _text(self, messages: list[dict[str, Any]], tools: Tools, prompt: bool) -> str:
        import jinja2

        special = self.tokenizer.special_tokens
        try:
            return self._compiled.render(messages=messages, tools=tools, add_generation_prompt=prompt, **special)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            reason = "the chat template refuses the conversation"
            fold = self._fold_hint if any(message["role"] == "system" for message in messages) else ""
            raise RowError(reason, f"{reason}: {error}{fold}") from error

    def _mark(self, messages: Sequence[Message], text: str) -> _Marked:
        """Sentinels for all texts. In answers, marks that the template acts on (such as `<think>`) stay, and the texts
        between them are replaced one by one."""
        marked = _Marked(Sentinels(avoid=text))
        marks = self.traits.answer_marks
        for message in messages:
            result = message.as_dict()
            parts = marks.split(message.content) if marks and message.role == "assistant" else [message.content]
            if len(parts) > 1:
                content = [part if i % 2 or not part else marked.slot(part) for i, part in enumerate(parts)]
                result["content"] = "".join(content)
            elif message.content or not message.tool_calls:
                result["content"] = marked.slot(message.content)
            if "reasoning_content" in result:
                result["reasoning_content"] = marked.slot(result["reasoning_content"])
            if message.tool_calls:
                first = len(marked.owner)
                calls = [{**call, "function": map_texts(call["function"], marked.slot)} for call in message.tool_calls]
                result["tool_calls"] = calls
                marked.tool_slots.update(range(first, len(marked.owner)))
            if len(parts) > 1 or message.tool_calls or "reasoning_content" in result:
                marked.composite.add(len(marked.messages))
            marked.messages.append(result)
        return marked

    def _refuse_unaligned_specials(self, messages: Sequence[Message], tools: Tools) -> None:
        """Names, keys and tool descriptions are not aligned, so special tokens in them are refused."""
        unaligned: list[Any] = [tools]
        for message in messages:
            unaligned += [message.extra.get("name"), message.extra.get("tool_call_id")]
            unaligned += [
                {**call, "function": map_texts(call["function"], lambda _: "")} for call in message.tool_calls
            ]
        written = json.dumps(unaligned, ensure_ascii=False)
        found = [token for token in self.tokenizer.guarded_tokens if token in written]
        if found:
            reason = "special token text in a tool description, name or key"
            raise RowError(reason, f"{reason}: {', '.join(found)}", hint="allow_special lets it through")

    def _refuse_lost_texts(self, messages: Sequence[Message], marked: _Marked, segments: list[Segment]) -> None:
        """Every text must be in the render; a template may drop the reasoning of earlier answers, and nothing else.
        Earlier is an answer that another one or a question follows, as in the prompt for the next answer."""
        placed = {segment.slot for segment in segments if segment.slot is not None}
        shown = {marked.owner[slot] for slot in placed}
        last_turn = max((i for i, m in enumerate(messages) if m.role in ("assistant", "user")), default=-1)
        for slot in sorted(set(range(len(marked.owner))) - placed):
            turn, role = marked.owner[slot], messages[marked.owner[slot]].role
            if slot in marked.tool_slots:
                raise RowError("the chat template has no tool branch", hint="choose a chat_template that takes tools")
            if role != "assistant" or turn == last_turn or turn not in shown:
                reason = "the chat template leaves out a text"
                fold = self._fold_hint if role == "system" else ""
                raise RowError(reason, f"{reason}: the one of turn {turn + 1} ({role}){fold}")

    # Spans, in characters

    def _span(self, turn: int, marked: _Marked, text: str, segments: list[Segment], tools: Tools) -> TurnSpan:
        own = [at for at, s in enumerate(segments) if s.slot is not None and marked.owner[s.slot] == turn]
        if not own:  # an answer of marks alone, or one that is left out
            raise RowError("an answer is not in the render", f"turn {turn + 1} (assistant) is not in the render")
        before, behind = segments[own[0] - 1], segments[own[-1] + 1]  # scaffold, perhaps of length 0
        found = self.traits.ends.search(text, behind.begin, behind.end) if self.traits.ends else None
        end = found.end() if found else behind.begin
        if turn in marked.composite:  # the turn begins with what the template writes for it, such as <tool_call>
            begin = before.begin + len(self._header(turn, marked, text, before, tools))
            return TurnSpan(begin, found.start() if found else behind.begin, end, turn)
        lead = self.traits.lead if text[before.begin : before.end].endswith(self.traits.lead) else ""
        return TurnSpan(before.end - len(lead), behind.begin, end, turn)

    def _header(self, turn: int, marked: _Marked, text: str, before: Segment, tools: Tools) -> str:
        """What the template writes between the text before an answer and the answer: its generation prompt there."""
        header = marked.sentinels.split(self._text(marked.messages[:turn], tools, True))[0][-1]
        if not text.startswith(header, before.begin):
            reason = "cannot tell where an answer begins"
            raise RowError(reason, f"turn {turn + 1}: the generation prompt does not stand before the answer")
        return header

    def _closed(self, text: str, span: TurnSpan) -> tuple[str, TurnSpan]:
        """The template writes no end token behind the last answer: EOS ends it, and is learned."""
        eos = self.tokenizer.eos_token
        if eos is None:
            hint = "choose a chat_template with an end token"
            raise RowError(
                "no end token", "neither the template nor the tokenizer has a token that ends an answer", hint=hint
            )
        return text + eos, TurnSpan(span.begin, span.content_end, len(text) + len(eos), span.message)


def _in_tokens(span: TurnSpan, encoded: Encoded) -> TurnSpan:
    """A span of characters as the tokens that hold any of them. A token that straddles the begin belongs to the answer:
    without it the answer would miss its first characters."""

    def first_from(position: int) -> int:
        return bisect.bisect_left(encoded.offsets, position, key=lambda offset: offset[0])

    begin = bisect.bisect_right(encoded.offsets, span.begin, key=lambda offset: offset[1])
    content_end, end = first_from(span.content_end), first_from(span.end)
    return TurnSpan(min(begin, content_end), content_end, end, span.message)
