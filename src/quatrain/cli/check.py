"""`quatrain check`: what a training run would see of the data, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig, RunOptions
from quatrain.errors import ConfigError, DataError

NAME = "check"
HELP = """Show what a run would read: rows used and skipped, lengths, marked samples.

Example: quatrain check --model smollm2-135m rows.jsonl
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
    dump: Annotated[str | None, typer.Option("--dump", metavar="FILE", help="Write one JSON object a row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as one JSON object.")] = False,
) -> None:
    from quatrain.checkpoint.open import open_source
    from quatrain.cli import report
    from quatrain.cli.console import stdout
    from quatrain.data.disk import configured_folder
    from quatrain.data.pipeline import examine
    from quatrain.train.settings import Settings

    if files:
        given["data"] = [*RunOptions(data=given.get("data", [])).data, *files]
    settings = Settings.resolve(given).require("model", "data")
    source = open_source(settings.run.model)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ConfigError(f"{settings.run.model} has no tokenizer, so data files cannot be read with it")
    engine = settings.engine
    with _dump_file(dump) as file:
        prepared = examine(
            settings.run.data,
            settings.data,
            tokenizer,
            max_seq_len=engine.max_seq_len,
            seed=engine.seed,
            vocab_rows=source.spec.vocab_size,
            cache=configured_folder(engine),
            dump=file,
        )
    if as_json:
        print(json.dumps(prepared.report.as_json(), ensure_ascii=False))
    else:
        report.full(stdout(), prepared)
    if prepared.problem is not None:
        # The places are in the report above: the first line is enough here.
        raise DataError(str(prepared.problem).splitlines()[0], hint=prepared.problem.hint)


@contextmanager
def _dump_file(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        with open(Path(path).expanduser(), "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"dump: cannot write {path}: {error.strerror}") from error
