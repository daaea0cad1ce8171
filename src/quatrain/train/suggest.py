"""What the data itself suggests for a run's options: the fields of its rows, the longest row, a share to hold out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quatrain.config import DataOptions
from quatrain.data.hub import HubRows
from quatrain.data.outcome import Record, RowError
from quatrain.data.paths import resolve_sources
from quatrain.data.read import read_records
from quatrain.data.records import to_conversation
from quatrain.errors import DataError, ModelError

if TYPE_CHECKING:
    from quatrain.data.report import DataReport

# Column names that hold the prompt or the response in public data sets, the usual ones first.
_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "request", "input", "source", "text", "user")
_RESPONSES = (
    "response", "completion", "answer", "output", "solution", "reply", "target", "label", "summary", "assistant",
)  # fmt: skip
_ROUND = 32
_LONG = 2048
"""Rows beyond this are rare in instruction data, and dear: a longer limit is not suggested unless most rows need it."""
_ENOUGH_TO_HOLD_OUT = 40
_LOOKED_AT = 100


@dataclass
class Suggestions:
    """`options` by name, with the `reasons` of those that are there; what was `seen` of the data; what is wrong."""

    options: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, reason: str) -> None:
        self.options[name], self.reasons[name] = value, reason


def suggest(model: str, paths: Sequence[str]) -> Suggestions:
    """Reads the data with the model's tokenizer; no weight is read.

    Raises ModelError for a model that cannot be used or has no tokenizer, DataError for files that cannot be read."""
    from quatrain.checkpoint.open import open_source
    from quatrain.data.pipeline import examine

    source = open_source(model)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ModelError(f"{model} has no tokenizer, so data files cannot be read with it")
    found = Suggestions()
    _suggest_fields(found, paths)
    longest = source.spec.max_position_embeddings
    options = DataOptions(**found.options)
    report = examine(paths, options, tokenizer, max_seq_len=longest, vocab_rows=source.spec.vocab_size).report
    _suggest_lengths(found, report, longest)
    if report.used >= _ENOUGH_TO_HOLD_OUT:
        share = 0.1 if report.used < 1000 else 0.05
        found.add("val_split", share, f"{round(report.used * share)} of {report.used} rows held out")
    bad = sum(report.bad.values())
    if bad:
        reason = max(report.bad, key=lambda name: report.bad[name])
        found.warnings.append(f"{bad} of {report.read} rows cannot be used ({reason}): see `quatrain check`")
    return found


def _suggest_fields(found: Suggestions, paths: Sequence[str]) -> None:
    """`prompt_field` and `response_field` where the first rows fit no known schema, `json_fields` for objects."""
    records = [record for record in _first_records(paths) if record.values]
    if not records or _is_known(records[0], DataOptions()):
        return
    columns = list(records[0].values)
    by_name = {column.strip().lower(): column for column in columns}  # "Question" is usual, too
    prompt = next((by_name[name] for name in _PROMPTS if name in by_name), None)
    response = next((by_name[name] for name in _RESPONSES if by_name.get(name, prompt) != prompt), None)
    fits_nothing = not _is_known(records[0], DataOptions(json_fields=columns))
    if fits_nothing and (prompt is None or response is None):
        found.warnings.append(
            f"the fields {', '.join(columns)} fit no known kind of row: set prompt_field and response_field"
        )
        return
    if fits_nothing:
        assert prompt is not None and response is not None
        found.add("prompt_field", prompt, f"the fields are {', '.join(columns)}")
        found.add("response_field", response, "the likeliest of them")
    texts = {prompt, response} if fits_nothing else {*_PROMPTS, *_RESPONSES}
    objects = sorted(
        {name for record in records for name, value in record.values.items() if name in texts and _is_object(value)}
    )
    if objects:
        found.add("json_fields", objects, "they hold objects")


def _is_known(record: Record, options: DataOptions) -> bool:
    try:
        to_conversation(record, options)
    except RowError as error:
        return error.reason.endswith((" is null", "is empty"))  # of a known kind all the same
    return True


def _is_object(value: Any) -> bool:
    return isinstance(value, dict | list)


def _first_records(paths: Sequence[str]) -> list[Record]:
    records: list[Record] = []
    for file in (file for source in resolve_sources(paths) for file in source.files):
        for record in file.records() if isinstance(file, HubRows) else read_records(file):
            if isinstance(record, Record):
                records.append(record)
            if len(records) >= _LOOKED_AT:
                return records
    return records


def _suggest_lengths(found: Suggestions, report: DataReport, longest: int) -> None:
    if report.lengths is None:
        raise DataError(
            f"no row of {', '.join(report.files)} can be used", hint="`quatrain check` shows every row's reason"
        )
    lengths = report.lengths
    kinds = ", ".join(f"{name} {number:,}" for name, number in report.schemas.items())
    rows = "1 row" if report.read == 1 else f"{report.read:,} rows"
    found.seen.append(f"{rows} read, {report.used:,} usable: {kinds}; template: {report.template}")
    found.seen.append(
        f"rows of {lengths.min:,} to {lengths.max:,} tokens, half of them up to {lengths.median:,.0f}, "
        f"95 percent up to {lengths.p95:,}"
    )
    if lengths.max <= _LONG or lengths.p95 > _LONG:
        limit, why = lengths.max, f"the longest row has {lengths.max} tokens"
    else:
        limit, why = lengths.p95, f"95 percent of the rows have up to {lengths.p95} tokens; longer ones are dropped"
    found.add("max_seq_len", min(-(-limit // _ROUND) * _ROUND, longest), why)
