"""What became of the data: the totals, statistics and samples that a run shows before its first step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from quatrain.data.encode import NOTHING_LEFT, TOO_LONG
from quatrain.data.findings import KINDS, Finding
from quatrain.data.order import permutation
from quatrain.data.outcome import Skipped
from quatrain.data.row import IGNORE, Row
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import DataError

_PLACES_SHOWN = 5
_BINS = 12
SAMPLES = 3


@dataclass(frozen=True)
class Stats:
    """Of token counts over rows."""

    min: int
    median: float
    mean: float
    p95: int
    max: int
    total: int

    @classmethod
    def of(cls, counts: NDArray[Any]) -> Stats | None:
        """Of int [n]; None for no rows. `p95` is the smallest count that at least 95 percent of the rows do not
        exceed."""
        if not len(counts):
            return None
        ranked, total = np.sort(counts), int(counts.sum(dtype=np.int64))
        p95 = ranked[-(-95 * len(ranked) // 100) - 1]
        return cls(int(ranked[0]), float(np.median(ranked)), total / len(ranked), int(p95), int(ranked[-1]), total)


@dataclass(frozen=True)
class Histogram:
    """Rows by length: `rows[i]` rows have edges[i] to edges[i+1]-1 tokens, `supervised[i]` have so many supervised
    ones."""

    edges: list[int]
    rows: list[int]
    supervised: list[int]

    @classmethod
    def of(cls, lengths: NDArray[Any], supervised: NDArray[Any]) -> Histogram | None:
        """Of int [n] each, in at most 12 bins of a round width; None for no rows."""
        if not len(lengths):
            return None
        longest = int(lengths.max())
        widths = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
        width = next(width for width in widths if width * _BINS > longest)
        edges = list(range(0, longest + width + 1, width))
        rows, learned = (np.histogram(counts, edges)[0].tolist() for counts in (lengths, supervised))
        return cls(edges, rows, learned)


@dataclass(frozen=True)
class SampleSegment:
    """A stretch of a row, decoded. `supervised` text is what the model learns to write."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class SampleToken:
    """One token of a row. `text` is what it adds to the text: nothing while a character is short of bytes."""

    id: int
    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True)
class Sample:
    """A row to look at: its decoded segments, and its tokens, in order."""

    source: str
    segments: list[SampleSegment]
    tokens: list[SampleToken]


@dataclass
class SourceRows:
    """What one entry of `data` gives: rows used, training rows (the others are held out), and rows of an epoch."""

    name: str
    weight: float = 1.0
    used: int = 0
    train: int = 0
    epoch: int = 0


@dataclass
class DataReport:
    """Totals of one set of files. `read` = `used` + the sum of `skipped`."""

    files: list[str]
    template: str = ""
    read: int = 0
    used: int = 0
    truncated: int = 0
    train_rows: int = 0
    validation_rows: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_at: dict[str, list[str]] = field(default_factory=dict)  # the first places of each reason, with details
    bad: dict[str, int] = field(default_factory=dict)  # the part of `skipped` that is wrong, not just left out
    schemas: dict[str, int] = field(default_factory=dict)
    lengths: Stats | None = None
    supervised: Stats | None = None
    histogram: Histogram | None = None
    max_seq_len: int = 0
    would_fit: dict[int, int] = field(default_factory=dict)  # rows that other values of max_seq_len would keep whole
    token_counts: dict[str, int] = field(default_factory=dict)  # rows by how they begin and end
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sources: list[SourceRows] = field(default_factory=list)

    def add_skipped(self, skipped: Skipped) -> None:
        """Count a record that became no row."""
        self.read += 1
        _count(self.skipped, skipped.reason)
        if skipped.bad:
            _count(self.bad, skipped.reason)
        places = self.skipped_at.setdefault(skipped.reason, [])
        if len(places) < _PLACES_SHOWN:
            places.append(f"{skipped.source}: {skipped.detail}")

    def add_row(self, schema: str) -> None:
        """Count a record that became a row."""
        self.read += 1
        self.used += 1
        _count(self.schemas, schema)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values, for machines."""
        return dict(json.loads(json.dumps(asdict(self), ensure_ascii=False)))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataReport:
        """The inverse of `as_json`. Raises ValueError for anything else."""
        return TypeAdapter(cls).validate_python(values)

    def problem(self, on_bad_row: str, max_unsupervised: float, allow: Sequence[str] = ()) -> DataError | None:
        """Why these rows cannot be trained on, or None. Findings of the kinds in `allow` are no reason."""
        if self.bad and on_bad_row == "stop":
            return DataError(self._bad_rows(), hint="mend the rows, or set on_bad_row to skip to go on without them")
        lost = self.skipped.get(TOO_LONG, 0) + self.skipped.get(NOTHING_LEFT, 0)
        if self.read and lost / self.read > max_unsupervised:
            return DataError(
                f"{lost / self.read:.0%} of the rows have no supervised token left: {lost} of {self.read} do not fit",
                hint="raise max_seq_len, or raise max_unsupervised to go on without them",
            )
        if not self.used:
            files = ", ".join(self.files)
            return DataError(f"{files}: no row is left: read {self.read}; skipped: {_counts(self.skipped)}")
        wrong = [found for found in self.findings if found.severity == "error" and found.kind not in allow]
        if wrong:
            lines = [line for found in wrong for line in (f"{found.kind}: {found.text}", *found.places)]
            advice = KINDS[wrong[0].kind].advice
            return DataError("\n  ".join(lines), hint=f"{advice}; --allow {wrong[0].kind} goes on all the same")
        return None

    def _bad_rows(self) -> str:
        places = [place for reason in self.bad for place in self.skipped_at[reason]]
        number = sum(self.bad.values())
        head = f"{number} of {self.read} rows cannot be used: {_counts(self.bad)}"
        return "\n  ".join([head, *places, *([f"... {number - len(places)} more"] if number > len(places) else [])])


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _counts(reasons: dict[str, int]) -> str:
    most_first = sorted(reasons.items(), key=lambda item: -item[1])
    return "; ".join(f"{count} x {reason}" for reason, count in most_first) or "none"


def is_place(source: str, wanted: str) -> bool:
    """Whether a row's `source` is the place that a user means: all of it, or its end from the name of a file or folder
    on."""
    return source == wanted or source.endswith(("/" + wanted, "\\" + wanted))


def samples_of(rows: Sequence[Row], tokenizer: Tokenizer, seed: int, number: int = SAMPLES) -> list[Sample]:
    """Some rows, always the same for one seed, in their order."""
    chosen = sorted(permutation(len(rows), seed, "samples")[:number])
    return [sample_of(rows[int(place)], tokenizer) for place in chosen]


def sample_of(row: Row, tokenizer: Tokenizer) -> Sample:
    """`row` decoded token by token, and in segments of supervised and unsupervised ones. The texts of both join to
    the whole text."""
    decoder = tokenizer.stream_decoder(skip_special=False)
    tokens = []
    for index, (token_id, label) in enumerate(zip(row.input_ids, row.labels, strict=True)):
        text = decoder.push(token_id) + (decoder.finish() if index == len(row) - 1 else "")
        tokens.append(SampleToken(token_id, text, label != IGNORE, token_id in tokenizer.special_ids))
    runs = itertools.groupby(tokens, key=lambda token: token.supervised)
    segments = [SampleSegment("".join(token.text for token in run), supervised) for supervised, run in runs]
    return Sample(row.source, segments, tokens)


def dump_line(outcome: Row | Skipped) -> str:
    """One row, or the reason why there is none, as a line of JSON."""
    if isinstance(outcome, Row):
        content: dict[str, Any] = {"source": outcome.source, "input_ids": outcome.input_ids, "labels": outcome.labels}
    else:
        content = {"source": outcome.source, "skipped": outcome.reason, "detail": outcome.detail}
    return json.dumps(content, ensure_ascii=False) + "\n"
