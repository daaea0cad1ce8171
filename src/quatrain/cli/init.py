"""`quatrain init`: a commented YAML file to start from, with what the data itself suggests filled in."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quatrain.cli.complete import models, runs
from quatrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.train.suggest import Suggestions

NAME = "init"
HELP = """Write a commented YAML file with every option of a run, to start from.

Looks at the data: the fields of its rows, how long they are, and how many can be held out. In a terminal it asks for
what is not given; elsewhere --model and --data are needed. `quatrain train --config FILE` takes the file as it is.

Example: quatrain init run.yaml --model smollm2-135m --data rows.jsonl
"""


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write.")] = "quatrain.yaml",
    model: Annotated[
        str, typer.Option("--model", help="the model to fine-tune", show_default=False, autocompletion=models)
    ] = "",
    data: Annotated[list[str] | None, typer.Option("--data", help="a data file (repeatable)")] = None,
    out: Annotated[
        str, typer.Option("--out", help="the run folder; default: runs/ and the data's name", autocompletion=runs)
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take what is suggested.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
) -> None:
    from quatrain.cli import schema
    from quatrain.cli.console import block, stdout
    from quatrain.cli.starter import render
    from quatrain.train.suggest import suggest

    path = Path(file).expanduser()
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="give the name of a file in it")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists", hint="--overwrite replaces it; or give another name for the file")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder", hint="create it, or give another name for the file")
    console = stdout()
    model, paths, out = _asked(model, list(data or []), out, ask=not yes and _is_terminal())
    found = suggest(model, paths)
    _show(console, found)
    options = {"model": model, "data": paths, "out": out, **found.options}
    beside = path.with_name(schema.DEFAULT_FILE)
    schema.write(beside, overwrite=overwrite)
    _write(path, render(options, found.reasons, beside.name))
    block(console, "written", [f"{path}, and {beside.name} for editors"])
    quoted = shlex.quote(str(path))
    block(console, "next", [f"quatrain plan --config {quoted}", f"quatrain train --config {quoted}"])


def _asked(model: str, paths: list[str], out: str, *, ask: bool) -> tuple[str, list[str], str]:
    """What was given, completed by questions, or by defaults where nothing is asked. Raises ConfigError for data that
    nobody gave."""
    from quatrain.checkpoint.open import ALIASES

    default = next(iter(ALIASES))
    if not model:
        if not ask and not paths:
            raise ConfigError("nothing given for model and data", hint="give --model and --data")
        model = typer.prompt("Model (folder, GGUF file, hub id or alias)", default=default) if ask else default
    if not paths:
        if not ask:
            raise ConfigError("nothing given for data", hint="give --data FILE")
        paths = shlex.split(typer.prompt("Data files (separated by spaces)"))
    if not out:
        out = f"runs/{Path(paths[0]).name.partition('.')[0] or 'first'}"
        out = typer.prompt("Run folder", default=out) if ask else out
    return model, paths, out


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _show(console: Console, found: Suggestions) -> None:
    from quatrain.cli.console import block

    block(console, "data", found.seen)
    reasons = [f"{name}: {found.options[name]} ({reason})" for name, reason in found.reasons.items()]
    if reasons:
        block(console, "suggested", reasons)
    for line in found.warnings:
        block(console, "warning", [line], "yellow")


def _write(path: Path, text: str) -> None:
    from quatrain.checkpoint.atomic import write_file
    from quatrain.errors import CheckpointError

    try:
        write_file(path, text.encode(errors="backslashreplace"))  # YAML reads a name of odd bytes back
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
