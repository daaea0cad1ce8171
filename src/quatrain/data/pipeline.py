"""Files to rows: read, recognise, render, label, limit, split. Rows are made one by one; only ids are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quatrain.config import DataOptions
from quatrain.data.encode import RowEncoder
from quatrain.data.order import permutation, split
from quatrain.data.outcome import RowError, Skipped
from quatrain.data.paths import resolve_paths
from quatrain.data.read import read_records
from quatrain.data.records import to_conversation
from quatrain.data.render import ChatRenderer
from quatrain.data.report import DataReport, Stats, dump_line, sample_of
from quatrain.data.row import Row
from quatrain.data.templates import choose_template
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import DataError

_SAMPLES = 3


@dataclass(frozen=True)
class Prepared:
    """Rows to train on and to validate with. `tokenizer` carries the chat template that was really used: save this one.
    `problem` says why a run must not start, if so."""

    train: list[Row]
    validation: list[Row]
    report: DataReport
    tokenizer: Tokenizer
    validation_report: DataReport | None = None
    problem: DataError | None = None


def prepare(
    paths: Sequence[str | Path],
    options: DataOptions,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int = 512,
    seed: int = 42,
    vocab_rows: int | None = None,
) -> Prepared:
    """The rows of `paths`, split. Raises DataError if a run on them must not start (`examine` reports that instead)."""
    prepared = examine(paths, options, tokenizer, max_seq_len=max_seq_len, seed=seed, vocab_rows=vocab_rows)
    if prepared.problem is not None:
        raise prepared.problem
    return prepared


def examine(
    paths: Sequence[str | Path],
    options: DataOptions,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int = 512,
    seed: int = 42,
    vocab_rows: int | None = None,
    dump: IO[str] | None = None,
) -> Prepared:
    """Like `prepare`, but unusable rows are reported (`problem`) instead of raised. `dump` gets a JSON line for each
    record of the training and validation files, in order.

    Still raises DataError where there is nothing to report on: missing or damaged files, no usable chat template.
    """
    files = resolve_paths(paths)
    validation_files = resolve_paths([options.validation]) if options.validation else []
    template = choose_template(tokenizer, options.chat_template)
    renderer = ChatRenderer(tokenizer, template, date=options.template_date, allow_special=options.allow_special)

    def load(some: Sequence[Path]) -> tuple[list[Row], DataReport]:
        encoder = RowEncoder(renderer, options, max_seq_len, vocab_rows)
        report = DataReport([str(file) for file in some], template.name)
        rows = []
        for outcome in _outcomes(some, options, encoder, report):
            if dump is not None:
                dump.write(dump_line(outcome))
            if isinstance(outcome, Row):
                rows.append(outcome)
        report.truncated = encoder.truncated
        _summarise(report, rows, renderer, seed)
        return rows, report

    rows, report = load(files)
    problem = report.problem(options.on_bad_row, options.max_unsupervised)
    train, validation_report = rows, None
    validation: list[Row] = []
    if validation_files:
        validation, validation_report = load(validation_files)
        problem = problem or validation_report.problem(options.on_bad_row, options.max_unsupervised)
    elif options.val_split and problem is None:
        try:
            train, validation = split(rows, options.val_split, seed)
        except DataError as error:
            problem = error
        if round(len(rows) * options.val_split) < 1 == len(validation):
            report.notes.append(f"val_split {options.val_split} of {len(rows)} rows is less than one; 1 is held out")
    report.train_rows, report.validation_rows = len(train), len(validation)
    return Prepared(train, validation, report, renderer.tokenizer, validation_report, problem)


def _outcomes(
    files: Sequence[Path], options: DataOptions, encoder: RowEncoder, report: DataReport
) -> Iterator[Row | Skipped]:
    """What becomes of each record, in the order of the files, counted in `report`."""
    ignored: Counter[str] = Counter()
    for file in files:
        for record in read_records(file, options.format):
            if isinstance(record, Skipped):
                report.add_skipped(record)
                yield record
                continue
            try:
                conversation = to_conversation(record, options)
                ignored.update(conversation.ignored)
                row = encoder.encode(conversation)
            except (RowError, RecursionError) as error:
                reason = error if isinstance(error, RowError) else RowError("nested too deeply")
                skipped = reason.at(record.source)
                report.add_skipped(skipped)
                yield skipped
            else:
                report.add_row(conversation.schema)
                yield row
    if ignored:
        names = ", ".join(f"{name} ({count} rows)" for name, count in sorted(ignored.items()))
        report.notes.append(f"fields that were not read: {names}")


def _summarise(report: DataReport, rows: list[Row], renderer: ChatRenderer, seed: int) -> None:
    report.lengths = Stats.of([len(row) for row in rows])
    report.supervised = Stats.of([row.num_supervised for row in rows])
    chosen = sorted(permutation(len(rows), seed, "samples")[:_SAMPLES])
    report.samples = [sample_of(rows[i], renderer.tokenizer) for i in chosen]
    if rows and renderer.traits.written_end is None:
        report.notes.append("the chat template writes no end token behind the last answer; EOS is put there")
