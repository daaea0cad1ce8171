"""Files to rows: read, recognise, render, label, limit, split. Rows are made one by one and go to disk as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import IO

import numpy as np

from quatrain.config import DataOptions, DataSource
from quatrain.data.cache import MadeOf, RowCache
from quatrain.data.disk import sha256_of
from quatrain.data.duplicates import Fingerprints, between
from quatrain.data.encode import RowEncoder
from quatrain.data.findings import Finding, in_order
from quatrain.data.hub import HubRows
from quatrain.data.inspection import Inspection
from quatrain.data.order import Places, Share, split
from quatrain.data.outcome import Record, RowError, Skipped
from quatrain.data.paths import Source, resolve_sources
from quatrain.data.read import read_records
from quatrain.data.records import to_conversation
from quatrain.data.render import ChatRenderer
from quatrain.data.report import DataReport, Histogram, SourceRows, Stats, dump_line, samples_of
from quatrain.data.row import Row
from quatrain.data.rows import Rows, RowStore, RowWriter
from quatrain.data.templates import choose_template
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import DataError

# Options about what is done with the rows later on, and options that are in the key in other words.
_NOT_IN_KEY = {"val_split", "validation", "on_bad_row", "max_unsupervised", "allow", "chat_template", "template_date"}

Entries = Sequence[str | Path | DataSource]  # of `data`, see `resolve_sources`


@dataclass(frozen=True)
class Prepared:
    """Rows to train on and to validate with. `tokenizer` carries the chat template that was really used: save this one.
    `shares` are the training rows by source, and how often an epoch takes them. `problem` says why a run must not
    start, if so. `notices` are about the cache."""

    train: Rows
    validation: Rows
    report: DataReport
    tokenizer: Tokenizer
    validation_report: DataReport | None = None
    problem: DataError | None = None
    shares: Sequence[Share] = ()
    notices: Sequence[str] = ()


def prepare(
    entries: Entries,
    options: DataOptions,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int = 512,
    seed: int = 42,
    vocab_rows: int | None = None,
    cache: Path | None = None,
) -> Prepared:
    """The rows of `entries`, split. Raises DataError if a run on them must not start (`examine` reports that
    instead)."""
    prepared = examine(
        entries, options, tokenizer, max_seq_len=max_seq_len, seed=seed, vocab_rows=vocab_rows, cache=cache
    )
    if prepared.problem is not None:
        raise prepared.problem
    return prepared


def examine(
    entries: Entries,
    options: DataOptions,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int = 512,
    seed: int = 42,
    vocab_rows: int | None = None,
    cache: Path | None = None,
    dump: IO[str] | None = None,
    near: bool = False,
) -> Prepared:
    """Like `prepare`, but unusable rows are reported (`problem`) instead of raised. `cache` is the folder that keeps
    tokenised rows; None keeps none. `dump` gets a JSON line for each record of the training and validation files, in
    order; the files are then read whatever the cache holds. `near` also looks for near copies of training rows among
    the validation rows.

    Still raises DataError where there is nothing to report on: missing or damaged files, no usable chat template.
    """
    sources, held_out = resolve_sources(entries), resolve_sources([options.validation]) if options.validation else []
    if any(source.weight != 1 for source in held_out):
        raise DataError(f"validation: {options.validation}: validation rows have no weight, each counts once")
    loader = _Loader(options, tokenizer, max_seq_len, vocab_rows, RowCache(None if dump else cache), dump)
    rows, report = loader.load(sources)
    loader.summarise(report, rows, seed)
    problem = report.problem(options.on_bad_row, options.max_unsupervised, options.allow)
    train, validation, validation_report = rows, Rows.of([]), None
    places: Places = np.arange(len(rows))
    if held_out:
        validation, validation_report = loader.load(held_out)
        loader.summarise(validation_report, validation, seed)
        problem = problem or validation_report.problem(options.on_bad_row, options.max_unsupervised, options.allow)
    elif options.val_split and problem is None:
        try:
            places, held = split(len(rows), options.val_split, seed)
            train, validation = rows.select(places), rows.select(held)
        except DataError as error:
            problem = error
        if round(len(rows) * options.val_split) < 1 == len(validation):
            report.notes.append(f"val_split {options.val_split} of {len(rows)} rows is less than one; 1 is held out")
    if len(validation):
        report.findings = in_order([*report.findings, *_overlap(train, validation, loader.renderer.tokenizer, near)])
    report.train_rows, report.validation_rows = len(train), len(validation)
    shares = _shares(report, places)
    return Prepared(
        train, validation, report, loader.renderer.tokenizer, validation_report, problem, shares, loader.cache.notices
    )


def _shares(report: DataReport, places: Places) -> list[Share]:
    """The training rows of each source; `places` are where they stand among all rows."""
    ends = np.searchsorted(places, np.cumsum([source.used for source in report.sources]))
    shares = []
    for source, rows in zip(report.sources, np.diff(ends, prepend=0).tolist(), strict=True):
        share = Share(rows, source.weight)
        source.train, source.epoch = rows, share.taken
        if not rows:
            report.notes.append(f"{source.name}: no row of it is trained on")
        shares.append(share)
    return shares


@dataclass
class _Loader:
    """Makes rows of sources, or takes them from the cache, always in the same way."""

    options: DataOptions
    tokenizer: Tokenizer
    max_seq_len: int
    vocab_rows: int | None
    cache: RowCache
    dump: IO[str] | None
    renderer: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self.template = choose_template(self.tokenizer, self.options.chat_template, self.options.system_policy)
        # A template that prints the date prints one day's, however long the reading takes.
        self.date = self.options.template_date or date.today().isoformat()
        self.renderer = ChatRenderer(
            self.tokenizer, self.template, date=self.date, allow_special=self.options.allow_special
        )

    def load(self, sources: Sequence[Source]) -> tuple[Rows, DataReport]:
        """The rows of `sources` in order, and what became of their records."""
        made = self._made_of(sources)
        store = self.cache.read(made) if made is not None else None
        if store is None:
            try:
                store = self._tokenise(sources, made, self.cache)
            except OSError as error:  # of writing: what reading meets is a DataError
                if self.dump is not None:
                    raise
                if self.cache.folder is None:
                    hint = "free some space, or let TMPDIR name a folder on a larger disk"
                    raise DataError(f"rows cannot be written: {error.strerror or error}", hint=hint) from error
                self.cache.notices.append(f"cache {self.cache.folder}: rows are not kept: {error.strerror or error}")
                store = self._tokenise(sources, None, RowCache(None))
        report = DataReport.from_json(store.info["report"])
        for source, counted in zip(sources, report.sources, strict=True):
            counted.name, counted.weight = source.name, source.weight
        return Rows(store), report

    def summarise(self, report: DataReport, rows: Rows, seed: int) -> None:
        """Statistics and samples of the rows that were loaded."""
        report.lengths, report.supervised = Stats.of(rows.lengths), Stats.of(rows.supervised)
        report.histogram = Histogram.of(rows.lengths, rows.supervised)
        report.samples = samples_of(rows, self.renderer.tokenizer, seed)
        if len(rows) and self.renderer.traits.written_end is None:
            report.notes.append("the chat template writes no end token behind the last answer; EOS is put there")

    def _tokenise(self, sources: Sequence[Source], made: MadeOf | None, cache: RowCache) -> RowStore:
        encoder = RowEncoder(self.renderer, self.options, self.max_seq_len, self.vocab_rows)
        inspection = Inspection(self.renderer, self.options)
        report = DataReport([str(file) for source in sources for file in source.files], self.template.name)
        with cache.scratch() as file:
            writer = RowWriter(file)
            for outcome in _outcomes(sources, self.options, encoder, inspection, report):
                if self.dump is not None:
                    self.dump.write(dump_line(outcome))
                if isinstance(outcome, Row):
                    writer.append(outcome)
            report.truncated = encoder.truncated
            report.max_seq_len, report.would_fit = self.max_seq_len, _would_fit(self.max_seq_len, report.used, encoder)
            inspection.conclude(report)
            writer.finish({"made": asdict(made) if made else None, "report": report.as_json()})
            if made is not None:
                if self._made_of(sources) == made:
                    cache.keep(file, made)
                else:
                    cache.notices.append("the data files changed while they were read, so their rows are not kept")
            return RowStore.map(file)

    def _made_of(self, sources: Sequence[Source]) -> MadeOf | None:
        """What decides the rows of `sources`; None where nothing is to be kept. Reads the files."""
        if self.cache.folder is None:
            return None
        files = [file for source in sources for file in source.files]
        found = [(str(file), _content_of(file)) for file in files]
        text = self.template.text
        settings = {
            "options": self.options.model_dump(mode="json", exclude=_NOT_IN_KEY),
            "template": [self.template.name, text, self.template.takes_chats],
            "date": self.date if "strftime_now" in text else None,  # the only way to the date
            "tokenizer": self.tokenizer.fingerprint(),
            "max_seq_len": self.max_seq_len,
            "vocab_rows": self.vocab_rows,
            "files_of_sources": [len(source.files) for source in sources],
            "packages": {name: version(name) for name in ("jinja2", "tokenizers")},
        }
        known = [[name, content] for name, content in found if content is not None]
        return MadeOf(known, settings) if len(known) == len(found) else None


def _content_of(file: Path | HubRows) -> str | None:
    if isinstance(file, HubRows):
        return file.fingerprint()
    try:
        return sha256_of(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _records(file: Path | HubRows, file_format: str) -> Iterator[Record | Skipped]:
    return file.records() if isinstance(file, HubRows) else read_records(file, file_format)


def _outcomes(
    sources: Sequence[Source], options: DataOptions, encoder: RowEncoder, inspection: Inspection, report: DataReport
) -> Iterator[Row | Skipped]:
    """What becomes of each record, in the order of the files, counted in `report`."""
    ignored: Counter[str] = Counter()
    for source in sources:
        before = report.used
        for record in (record for file in source.files for record in _records(file, options.format)):
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
                inspection.add(conversation, row)
                yield row
        report.sources.append(SourceRows(source.name, source.weight, report.used - before))
    if ignored:
        names = ", ".join(f"{name} ({count} rows)" for name, count in sorted(ignored.items()))
        report.notes.append(f"fields that were not read: {names}")


def _overlap(train: Rows, validation: Rows, tokenizer: Tokenizer, near: bool) -> list[Finding]:
    trained = Fingerprints(tokenizer, near).extend(train)
    return between(trained, Fingerprints(tokenizer, near, trained.shared).extend(validation))


def _would_fit(max_seq_len: int, used: int, encoder: RowEncoder) -> dict[int, int]:
    """How many rows would be whole with other values of max_seq_len."""
    limits = [max_seq_len]
    while limits[-1] < max(encoder.too_long, default=0):
        limits.append(2 * limits[-1])
    whole = used - encoder.truncated
    return {limit: whole + sum(length <= limit for length in encoder.too_long) for limit in limits}
