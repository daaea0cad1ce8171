"""`quatrain check`: what a training run would see of the data, before anything is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig, RunOptions
from quatrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from quatrain.data.pipeline import Prepared
    from quatrain.data.report import Sample
    from quatrain.data.row import Row
    from quatrain.train.settings import Settings

NAME = "check"
HELP = """Show what a run would read: rows used and skipped, lengths, what looks wrong, marked samples.

Example: quatrain check --model smollm2-135m rows.jsonl

Example: quatrain check --model smollm2-135m rows.jsonl --row rows.jsonl:17 --tokens
"""

GROUPS = (
    Group("Run", RunOptions, ("model", "data")),
    Group("Data", DataOptions),
    Group("Rows", InstructConfig, ("max_seq_len", "seed", "cache", "cache_dir")),
)


@with_options(*GROUPS)
def command(
    given: dict[str, Any],
    files: Annotated[list[str] | None, typer.Argument(metavar="DATA", help="Data files.", show_default=False)] = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=0, help="How many rows to show.")] = 3,
    row: Annotated[
        list[str] | None, typer.Option("--row", metavar="FILE:LINE", help="Show this row instead (repeatable).")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show rows token by token, with ids and labels.")] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write all of it as one page.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with exit code 3 if there is any warning.")] = False,
    dump: Annotated[str | None, typer.Option("--dump", metavar="FILE", help="Write one JSON object a row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as one JSON object.")] = False,
) -> None:
    from quatrain.checkpoint.open import open_source
    from quatrain.cli import report
    from quatrain.data.disk import configured_folder
    from quatrain.data.pipeline import examine
    from quatrain.train.settings import Settings

    if files:
        given["data"] = [*RunOptions(data=given.get("data", [])).data, *files]
    settings = Settings.resolve(given).require("model", "data")
    for option, written in (("html", html), ("dump", dump)):
        if written is not None:
            _refuse_data_file(written, option, settings)
    source = open_source(settings.run.model)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ConfigError(f"{settings.run.model} has no tokenizer, so data files cannot be read with it")
    engine = settings.engine
    with _file(dump, "dump") as file:
        prepared = examine(
            settings.run.data,
            settings.data,
            tokenizer,
            max_seq_len=engine.max_seq_len,
            seed=engine.seed,
            vocab_rows=source.spec.vocab_size,
            cache=configured_folder(engine),
            dump=file,
            near=True,
        )
    prepared.report.samples = _samples(prepared, samples, row or (), engine.seed)
    if html is not None:
        from quatrain.pages.check import render

        page = render(prepared, source.name)
        with _file(html, "html") as file:
            print(page, file=file, end="")
    if as_json:
        print(json.dumps(_facts(prepared), ensure_ascii=False))
    else:
        _show(prepared, tokens=tokens, html=html)
    if prepared.problem is not None:
        # The places are in the report above: the first line is enough here.
        raise DataError(str(prepared.problem).splitlines()[0], hint=prepared.problem.hint)
    warnings = [found.kind for found in report.all_findings(prepared) if found.severity != "note"]
    if strict and warnings:
        raise DataError(f"warnings, and --strict is given: {', '.join(warnings)}")


def _samples(prepared: Prepared, number: int, places: Sequence[str], seed: int) -> list[Sample]:
    """The rows at `places`, or some training rows. Raises ConfigError for a place where no row is."""
    from quatrain.data.report import is_place, sample_of, samples_of

    if not places:
        return samples_of(prepared.train, prepared.tokenizer, seed, number)
    found: list[list[Row]] = [[] for _ in places]
    spellings = [{place, os.path.relpath(place or ".")} for place in places]  # such as "./rows.jsonl:17"
    for row in (row for rows in (prepared.train, prepared.validation) for row in rows):
        for places_meant, rows in zip(spellings, found, strict=True):
            if any(is_place(row.source, place) for place in places_meant):
                rows.append(row)
    for place, rows in zip(places, found, strict=True):
        if not rows:
            raise ConfigError(f"row: no row that is used is at {place}", hint="give FILE:LINE as the report shows it")
    return [sample_of(row, prepared.tokenizer) for rows in found for row in rows]


def _facts(prepared: Prepared) -> dict[str, Any]:
    """All of it for machines."""
    validation = prepared.validation_report
    return {
        **prepared.report.as_json(),
        "validation_report": validation.as_json() if validation is not None else None,
        "problem": str(prepared.problem) if prepared.problem is not None else None,
    }


def _show(prepared: Prepared, *, tokens: bool, html: str | None) -> None:
    from quatrain.cli import report, samples
    from quatrain.cli.console import block, stdout

    console = stdout()
    report.full(console, prepared)
    if html is not None:
        block(console, "page", [html])
    for sample in prepared.report.samples:
        samples.show(console, sample, tokens=tokens)


def _refuse_data_file(path: str, option: str, settings: Settings) -> None:
    """Raises ConfigError for a file to write that is one of those to read."""
    from quatrain.data.paths import resolve_sources

    target = Path(path).expanduser().resolve()
    validation = settings.data.validation
    for source in resolve_sources([*settings.run.data, *([validation] if validation else [])]):
        if any(isinstance(file, Path) and file.resolve() == target for file in source.files):
            raise ConfigError(f"{option}: {path} is a data file, and would be replaced", hint="give another name")


@contextmanager
def _file(path: str | None, option: str) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        with open(Path(path).expanduser(), "w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from error
