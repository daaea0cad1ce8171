"""What looks wrong with a set of rows, by kind. `texts` looks at each row, `duplicates` at all of them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
PLACES_SHOWN = 5
_NEVER = 2.0  # a share of the rows that is never reached
_EXCERPT = 60


@dataclass(frozen=True)
class Finding:
    """`count` rows show something. `places` are the first of them: "file:line", or "file:line: what is there"."""

    kind: str
    severity: Severity
    count: int
    text: str
    places: list[str]


@dataclass(frozen=True)
class Kind:
    """`says` completes "N rows ...", `advice` is what to do about it. From which share of the rows on it is a warning,
    and an error."""

    says: str
    advice: str
    warning_from: float = _NEVER
    error_from: float = _NEVER


@dataclass
class Tally:
    """The rows that show one thing: how many, and where the first of them are."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, source: str, detail: str = "") -> None:
        """Count one row."""
        self.count += 1
        if len(self.places) < PLACES_SHOWN:
            self.places.append(f"{source}: {detail}" if detail else source)


KINDS = {
    "template-twice": Kind(
        "begin or end with the marks that the chat template writes itself",
        "the texts were rendered before: give the plain texts, so that the template is applied once",
        warning_from=0,
        error_from=0.5,
    ),
    "two-bos": Kind(
        "begin with two BOS tokens",
        "the template and the text both write one: take it out of the text, or mend the template",
        warning_from=0,
        error_from=0.5,
    ),
    "no-bos": Kind(
        "begin without BOS, which the tokenizer puts before plain text",
        "right if the model was made so; else add {{ bos_token }} to the chat template",
    ),
    "no-end-token": Kind(
        "do not teach where an answer ends",
        "answers cut at max_seq_len lose their end token, and train_on_eos decides which are learned",
        warning_from=0.1,
    ),
    "overlap": Kind(
        "of the validation set are training rows too",
        "take them out of one of the two: the loss on them says nothing about new prompts",
        warning_from=0,
    ),
    "prompt-overlap": Kind(
        "of the validation set have a prompt that is trained on, with another answer",
        "split by prompt, so that validation asks something new",
        warning_from=0,
    ),
    "near-overlap": Kind(
        "of the validation set are nearly the same as a training row",
        "look at the pairs: if they are one example in two spellings, keep them on one side",
    ),
    "duplicates": Kind(
        "are copies of an earlier row",
        "leave the copies out, unless they are meant to count more",
        warning_from=0.01,
    ),
    "near-duplicates": Kind(
        "are nearly the same as an earlier row",
        "look at the pairs: rows made from one pattern teach the pattern, not the task",
        warning_from=0.1,
    ),
    "same-prompt": Kind(
        "ask what an earlier row asks, and answer differently",
        "fine where many answers are right; where one is, the labels contradict each other",
        warning_from=0.05,
    ),
    "identical-answers": Kind(
        "have one and the same answer",
        "the model may learn to say it always: balance the answers, or look for a fault in the export",
        warning_from=0.6,
    ),
    "empty-answer": Kind("have an empty answer and train the end token alone", "as asked for with keep_empty"),
    "null-answer": Kind(
        "answer nothing but a word such as `null`, `N/A` or `None`, unlike nearly all others",
        "leave them out if they stand for a missing value",
        warning_from=0,
    ),
    "boilerplate": Kind(
        "answer with a refusal or a disclaimer of an assistant",
        "leave them out unless the model is to learn them",
        warning_from=0.01,
    ),
    "placeholder": Kind(
        "have a placeholder in the answer",
        "fill it in or leave the row out: the model will write it as it stands",
        warning_from=0.01,
    ),
    "cut-answer": Kind(
        "have a long answer that ends without punctuation, unlike nearly all others",
        "look at the ends: answers cut off in the export teach the model to stop there",
        warning_from=0.02,
    ),
    "same-length": Kind(
        "have an answer of exactly the greatest length in characters",
        "the export seems to cut there: write the whole answers",
        warning_from=0,
    ),
    "role-text": Kind(
        "have the name of a role as text, such as `User:`",
        "several turns in one text teach the model to speak for the user: make them turns of their own",
        warning_from=0.01,
    ),
    "template-text": Kind(
        "have marks of a chat template inside a text",
        "they stay plain text here; take them out unless the texts are about them",
        warning_from=0.01,
    ),
    "not-json": Kind(
        "have an answer that is not valid JSON, while nearly all others are",
        "mend the answers: the model learns to write the broken ones too",
        warning_from=0,
    ),
    "unbalanced": Kind(
        "have an answer with an unclosed quote, bracket or code fence, unlike nearly all others",
        "look at the ends: they may be cut off",
    ),
    "replacement-character": Kind(
        "have U+FFFD, which stands for bytes that could not be read",
        "read the source again with the right encoding",
        warning_from=0.001,
    ),
    "mojibake": Kind(
        "have UTF-8 that was read as another encoding",
        "read the source again as UTF-8",
        warning_from=0.001,
    ),
    "control-character": Kind(
        "have control characters",
        "take them out: the model learns to write them",
        warning_from=0.001,
    ),
    "invisible-character": Kind(
        "have invisible characters (zero width, or changing the direction of the text)",
        "take them out unless they are meant",
        warning_from=0.01,
    ),
    "long-rows": Kind("are more than 8 times as long as the median", "look at one of them: it may be several rows"),
    "short-answers": Kind(
        "have an answer of less than a twentieth of the median length", "look at some: they may be cut off or empty"
    ),
}


def finding(kind: str, count: int, of: int, places: Iterable[str], detail: str = "") -> Finding:
    """`count` of `of` rows show `kind`; the severity follows from their share."""
    rules, share = KINDS[kind], count / max(1, of)
    severity: Severity = "note"
    if share >= rules.error_from:
        severity = "error"
    elif share >= rules.warning_from:
        severity = "warning"
    text = f"{count:,} of {of:,} rows ({_percent(share)}) {rules.says}{detail}"
    return Finding(kind, severity, count, text, list(places)[:PLACES_SHOWN])


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, then as in `KINDS`."""
    kinds = list(KINDS)
    return sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), kinds.index(found.kind)))


def excerpt(text: str, begin: int = 0, end: int | None = None) -> str:
    """The text around [begin, end) on one line, quoted, with what cannot be seen escaped."""
    end = len(text) if end is None else end
    room = max(0, _EXCERPT - (end - begin)) // 2
    first, last = max(0, begin - room), min(len(text), max(end, begin) + room, begin + 2 * _EXCERPT)
    cut = "".join(c if c.isprintable() else escape(c) for c in text[first:last])
    return ("…" if first else "") + cut + ("…" if last < len(text) else "")


def escape(character: str) -> str:
    """`\\n`, `\\u200b`."""
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{ord(character):04x}")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else "less than 0.1%" if share < 0.001 else f"{share:.1%}"
