"""Conversations to rows: ids, labels and the length limit."""

from __future__ import annotations

from dataclasses import replace

from quatrain.config import DataOptions
from quatrain.data.outcome import RowError
from quatrain.data.records import Conversation, Message
from quatrain.data.render import ChatRenderer, TurnSpan
from quatrain.data.row import IGNORE, Row
from quatrain.data.templates import no_template_error

TOO_LONG = "longer than max_seq_len"
NOTHING_LEFT = "no supervised token left after truncation"
EMPTY_ANSWER = "empty answer"


class RowEncoder:
    """Turns conversations into rows of at most `max_seq_len` tokens. `vocab_rows` is the height of the model's
    embedding table, where known."""

    def __init__(
        self, renderer: ChatRenderer, options: DataOptions, max_seq_len: int, vocab_rows: int | None = None
    ) -> None:
        self._renderer = renderer
        self._options = options
        self._max_seq_len = max_seq_len
        self._vocab_rows = vocab_rows
        self._most_chars = max_seq_len * renderer.tokenizer.longest_token
        self.truncated = 0
        self.too_long: list[int] = []  # tokens of the rows that are longer than max_seq_len

    def encode(self, conversation: Conversation) -> Row:
        """The row of a conversation. Raises RowError with the reason if there is none, and DataError for a chat without
        a chat template."""
        messages = conversation.messages
        if conversation.is_chat and not self._renderer.template.takes_chats:
            raise no_template_error()
        if not self._options.keep_empty and any(_is_empty(message) for message in messages):
            raise RowError(EMPTY_ANSWER, "the answer is empty; keep_empty trains the end token", bad=False)
        messages = self._within_reach(messages)
        rendered = self._renderer.render(messages, conversation.tools)
        spans = [span for span in rendered.spans if messages[span.message].learn]
        labels = label(rendered.ids, spans, self._options)
        if not _any_supervised(labels):
            raise RowError("no supervised token", "no token of the row would be learned")
        ids = self._cut(rendered.ids, labels)
        self._refuse_foreign_ids(ids)
        return Row(tuple(ids), tuple(labels[: len(ids)]), conversation.source)

    def _within_reach(self, messages: list[Message]) -> list[Message]:
        """A text that cannot fit, whatever its tokens are, is not worth the time and memory to encode all of it."""
        length = sum(len(message.content) for message in messages)
        if length <= 2 * self._most_chars:
            return messages
        if self._options.truncation == "drop":
            raise RowError(TOO_LONG, f"{length} characters are more than {self._max_seq_len} tokens", bad=False)
        # What is left still makes more than max_seq_len tokens, so the cut below hides the seam.
        return [replace(message, content=message.content[: 2 * self._most_chars]) for message in messages]

    def _cut(self, ids: list[int], labels: list[int]) -> list[int]:
        if len(ids) <= self._max_seq_len:
            return ids
        self.too_long.append(len(ids))
        if self._options.truncation == "drop":
            raise RowError(TOO_LONG, f"{len(ids)} tokens are more than {self._max_seq_len}", bad=False)
        if not _any_supervised(labels[: self._max_seq_len]):
            raise RowError(NOTHING_LEFT, f"the answer begins after {self._max_seq_len} tokens", bad=False)
        self.truncated += 1
        return ids[: self._max_seq_len]

    def _refuse_foreign_ids(self, ids: list[int]) -> None:
        if self._vocab_rows is not None and max(ids) >= self._vocab_rows:
            token = self._renderer.tokenizer.decode([max(ids)])
            raise RowError(
                "a token outside the model's vocabulary",
                f"token {max(ids)} ({token!r}) is outside the model's {self._vocab_rows} embedding rows",
                hint="the tokenizer and the model do not belong together",
            )


def _is_empty(message: Message) -> bool:
    return message.role == "assistant" and not message.content.strip() and not message.tool_calls


def _any_supervised(labels: list[int]) -> bool:
    """Whether a loss would count any token; the first one has no predecessor."""
    return any(label != IGNORE for label in labels[1:])


def label(ids: list[int], spans: list[TurnSpan], options: DataOptions) -> list[int]:
    """Labels of a row: `ids` inside the spans that are learned, -100 elsewhere."""
    labels = [IGNORE] * len(ids)
    for span in spans[-1:] if options.last_turn_only else spans:
        with_end = options.train_on_eos == "all" or (options.train_on_eos == "last" and span is spans[-1])
        end = span.end if with_end else span.content_end
        labels[span.begin : end] = ids[span.begin : end]
    return labels
