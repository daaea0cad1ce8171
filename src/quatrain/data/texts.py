"""Findings that can be told from one row at a time: odd characters, marks of templates, unfinished answers."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from quatrain.config import DataOptions
from quatrain.data.findings import KINDS, Finding, Tally, excerpt, finding
from quatrain.data.records import Conversation, Message
from quatrain.data.render import ChatRenderer
from quatrain.data.row import IGNORE, Row

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ODD = {
    "replacement-character": re.compile("\ufffd"),
    # UTF-8 read as Latin-1 or Windows-1252: é, ’, an emoji, a byte order mark.
    "mojibake": re.compile("[ÃÂ][\x80-\xbf]|â€|ðŸ|ï»¿"),
    # Not the joiners U+200C and U+200D, which emoji and several scripts need.
    "invisible-character": re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069]"),
}
_IN_ANSWERS = {
    "placeholder": re.compile(
        r"[Ll]orem ipsum|TODO\b|FIXME\b|TBD\b|(?<!\{)\{\{\s*\w+\s*\}\}(?!\})"
        r"|\[(?:[Ii]nsert|INSERT|[Yy]our|YOUR|[Pp]laceholder|PLACEHOLDER)\b[^\]\n]{0,60}\]"
    ),
    "boilerplate": re.compile(
        r"\bas an? (?:ai|artificial intelligence|(?:large )?language model)\b"
        r"|\A\W*(?:i['’]?m sorry|i apologi[sz]e|sorry)\b.{0,30}\b(?:can['’]?t|cannot|unable|not able)\b"
        r"|\A\W*i (?:can['’]?t|cannot|am unable to|am not able to) (?:assist|help|provide|fulfil|comply|do)"
        r"|\bmy knowledge cut-?off\b",
        re.IGNORECASE,
    ),
    "role-text": re.compile(r"^[#*\s]*(?:User|USER|Human|HUMAN|Assistant|ASSISTANT)\s?:", re.MULTILINE),
}
_NO_ANSWERS = {"n/a", "na", "null", "none", "nan", "undefined", "...", "…", "?", "-", "tbd", "todo"}
_ASKS_BY_NAME = re.compile(r"\n[#*\s]*(?:Assistant|ASSISTANT)\s?:\s*$")
_BEGINS = (
    "<|im_start|>", "<|start_header_id|>", "<|begin_of_text|>", "<start_of_turn>", "<|user|>", "<|system|>", "[INST]",
    "<<SYS>>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>", "<｜User｜>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>",
)  # fmt: skip
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|assistant|>", "[/INST]", "<|end|>",
    "<|endoftext|>", "<|END_OF_TURN_TOKEN|>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<eos>", "</s>",
)  # fmt: skip
_HEADINGS = ("### Instruction:", "### Response:", "### Human:", "### Assistant:")
_LONG_ANSWER = 80  # characters from which an answer is expected to be a sentence
_CUT_FROM = 200  # characters from which many answers of one length are no chance
_LOOKED_AT = 2000  # characters of an answer in which a phrase is looked for
_NEARLY_ALL, _FEW = 0.9, 0.05
_ENOUGH = 20  # rows from which a majority says something
_UNFINISHED = ",-–—([{/&=+"


class TextChecks:
    """Sees each conversation with its row once, and keeps counts and a few places only."""

    def __init__(self, renderer: ChatRenderer, options: DataOptions) -> None:
        tokenizer = renderer.tokenizer
        self._options = options
        self._bos_id = tokenizer.bos_id
        self._expects_bos = tokenizer.add_bos
        ids = (tokenizer.token_id(token) for token in renderer.traits.end_tokens)
        self._end_ids = {token_id for token_id in ids if token_id is not None}
        self._marks = _Marks(renderer)
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._rows = self._one_bos = self._long_answers = self._json_answers = self._longest = 0

    def add(self, conversation: Conversation, row: Row) -> None:
        """Look at one row."""
        self._rows += 1
        messages, source = conversation.messages, row.source
        answers = [message.content for message in messages if _is_learned(message)]
        self._look_at_ids(row)
        self._look_at_characters(source, [message.content for message in messages])
        if not self._options.allow_special:
            for kind, where in self._marks.found(messages).items():
                self._tallies[kind].add(source, where)
        prompts = [message.content for message in messages if message.role == "user"]
        for kind, pattern in _IN_ANSWERS.items():
            shown = _first(pattern, [answer[:_LOOKED_AT] for answer in answers])
            if kind == "role-text":
                shown = shown or _first(_ASKS_BY_NAME, prompts)
            if shown is not None:
                self._tallies[kind].add(source, shown)
        if answers:
            self._look_at_end(source, answers[-1])

    @property
    def token_counts(self) -> dict[str, int]:
        """Rows by how they begin and end."""
        two, none, endless = (self._tallies[kind].count for kind in ("two-bos", "no-bos", "no-end-token"))
        begins = {"begin with one BOS": self._one_bos, "begin with two BOS": two, "begin without BOS": none}
        ends = {"learn an end token last": self._rows - endless, "learn no end token last": endless}
        return (begins if self._bos_id is not None else {}) | ends

    def findings(self) -> list[Finding]:
        """What was found so far."""
        tallies = dict(self._tallies)
        if self._json_answers < max(_NEARLY_ALL * self._rows, _ENOUGH / 2):
            tallies.pop("not-json", None)
        cut = tallies.pop("cut-answer", Tally())
        if self._long_answers >= _ENOUGH and cut.count <= (1 - _NEARLY_ALL) * self._long_answers:
            tallies["cut-answer"] = cut
        for kind in ("unbalanced", "null-answer"):  # of many rows it is what the task asks for
            if self._rows < _ENOUGH or tallies.get(kind, Tally()).count > _FEW * self._rows:
                tallies.pop(kind, None)
        longest = tallies.pop("same-length", Tally())
        if longest.count >= max(5, 0.01 * self._rows):
            tallies["same-length"] = longest
        if not self._expects_bos:
            tallies.pop("no-bos", None)
        detail = {"same-length": f": {self._longest:,}"}
        return [
            finding(kind, tallies[kind].count, self._rows, tallies[kind].places, detail.get(kind, ""))
            for kind in KINDS
            if kind in tallies and tallies[kind].count
        ]

    def _look_at_ids(self, row: Row) -> None:
        ids, bos = row.input_ids, self._bos_id
        if bos is not None and ids[0] == bos:
            if ids[1:2] == (bos,):
                self._tallies["two-bos"].add(row.source)
            else:
                self._one_bos += 1
        elif bos is not None:
            self._tallies["no-bos"].add(row.source)
        last = next(label for label in reversed(row.labels) if label != IGNORE)
        if last not in self._end_ids:
            self._tallies["no-end-token"].add(row.source)

    def _look_at_characters(self, source: str, texts: Sequence[str]) -> None:
        for kind, pattern in ({"control-character": _CONTROL} | _ODD).items():
            plain = pattern is not _CONTROL and all(map(str.isascii, texts))
            if not plain and (where := _first(pattern, texts)) is not None:
                self._tallies[kind].add(source, where)

    def _look_at_end(self, source: str, answer: str) -> None:
        """Whether the last answer is complete, as far as its end tells."""
        tail = excerpt(answer, len(answer))
        if not answer.strip():
            self._tallies["empty-answer"].add(source)
            return
        if answer.strip().lower() in _NO_ANSWERS:
            self._tallies["null-answer"].add(source, tail)
        if answer.lstrip()[0] in "{[" and _is_json(answer):
            self._json_answers += 1
        else:
            self._tallies["not-json"].add(source, tail)
        if len(answer) >= _LONG_ANSWER:
            self._long_answers += 1
            last = answer.rstrip()[-1]
            if last.isalnum() or last in _UNFINISHED:
                self._tallies["cut-answer"].add(source, tail)
        if len(answer) > self._longest:
            self._longest, self._tallies["same-length"] = len(answer), Tally()
        if len(answer) == self._longest and len(answer) >= _CUT_FROM:
            self._tallies["same-length"].add(source, tail)
        if _is_unbalanced(answer):
            self._tallies["unbalanced"].add(source, tail)


class _Marks:
    """Marks of this chat template and of well-known ones, in texts that should have none."""

    def __init__(self, renderer: ChatRenderer) -> None:
        tokenizer, template = renderer.tokenizer, renderer.template.text
        traits = renderer.traits
        acted_on = traits.answer_marks.split if traits.answer_marks else None  # such as <think>: they belong in answers
        own = {token for token in tokenizer.guarded_tokens if token in template}
        own |= {token for token in (tokenizer.bos_token, *traits.end_tokens) if token}
        own = {token for token in own if acted_on is None or len(acted_on(token)) == 1}
        # A format without marks of its own may have been chosen for texts that were rendered before, on purpose.
        has_turns = any(mark in template for mark in _BEGINS) or len(own - set(tokenizer.special_tokens.values())) > 0
        certain = [*own, *(heading for heading in _HEADINGS if heading in template)]
        certain += [*_BEGINS, *_ENDS] if has_turns else []
        marks = _alternatives(certain)
        self._twice = re.compile(
            rf"\A\s*(?:{marks})|(?:{marks})(?:assistant|model|<\|end_header_id\|>|\s)*\Z" if certain else r"(?!)"
        )
        self._anywhere = re.compile(_alternatives([*own, *_BEGINS, *_ENDS, *_HEADINGS]))

    def found(self, messages: Iterable[Message]) -> dict[str, str]:
        """The kind of finding, if any, and where the mark stands."""
        found: dict[str, str] = {}
        for message in messages:
            if (anywhere := self._anywhere.search(message.content)) is None:
                continue
            if (twice := self._twice.search(message.content)) is not None:
                return {"template-twice": excerpt(message.content, *twice.span())}
            found.setdefault("template-text", excerpt(message.content, *anywhere.span()))
        return found


def _alternatives(marks: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(set(marks), key=lambda mark: (-len(mark), mark))))


def _is_learned(message: Message) -> bool:
    return message.role == "assistant" and message.learn and not message.tool_calls


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    """Where the pattern stands first."""
    for text in texts:
        if (found := pattern.search(text)) is not None:
            return excerpt(text, *found.span())
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_unbalanced(text: str) -> bool:
    pairs = (("{", "}"), ("[", "]"))
    return bool(text.count('"') % 2 or text.count("```") % 2) or any(text.count(a) != text.count(b) for a, b in pairs)
