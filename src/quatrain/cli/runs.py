"""`quatrain runs`: the runs of a folder, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quatrain.errors import CheckpointError, ConfigError

NAME = "runs"
HELP = """List the runs of a folder, and compare them.

Give a folder of runs, or several run folders. Runs that are unfinished or broken are listed with their state. --compare
shows the options that differ; --html writes a page with all curves over each other.

Example: quatrain runs runs --compare --html runs.html
"""


def command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER", help="Folders of runs, or runs. Default: runs, else this folder.", show_default=False
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show the options that differ.")] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page with all curves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.cli.console import block, columns, several, stdout
    from quatrain.pages.run import option_text
    from quatrain.pages.runs import LIST_HEAD, list_row, runs_page
    from quatrain.train.runs import differences, find_runs

    paths = [Path(folder).expanduser() for folder in folders or (["runs"] if Path("runs").is_dir() else ["."])]
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder", hint="give a folder of runs, such as the parent of --out")
    try:
        runs = find_runs(paths)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    summaries = [run.summary() for run in runs]
    sound = [run for run in runs if run.record]
    different = differences(sound)
    if html is not None:
        title = f"Runs in {', '.join(str(path) for path in paths)}"
        text = runs_page(title, summaries, [run.metrics for run in runs], [run.folder.name for run in sound], different)
        _write(Path(html).expanduser(), text)
    if as_json:
        print(json.dumps({"runs": summaries, "differences": different}))
        return
    console = stdout()
    if runs:
        table = [list(LIST_HEAD), *map(list_row, summaries)]
        block(console, "runs", columns(table))
        for run in runs:
            if run.problem:
                block(console, run.state, [f"{run.folder}: {run.problem}"], "yellow")
    else:
        block(console, "runs", [f"none in {', '.join(map(str, paths))}"])
    if compare and different:
        rows = ([name, *map(option_text, values)] for name, values in different.items())
        table = [["", *(run.folder.name for run in sound)], *rows]
        block(console, "differ", columns(table))
    elif compare:
        block(console, "differ", [f"no option, over {several(len(runs), 'run')}"])
    if html is not None:
        block(console, "page", [html])


def _write(path: Path, text: str) -> None:
    from quatrain.checkpoint.atomic import write_file

    try:
        write_file(path, text.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
