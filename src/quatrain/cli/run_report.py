"""`quatrain report`: the page of a run, built again from what the run wrote down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quatrain.errors import CheckpointError, ConfigError

NAME = "report"
HELP = """Write the page of a run again: RUN/report.html.

Training keeps that page up to date by itself; this builds it from the run's run.json and metrics.jsonl, for a run that
was moved, that ended without warning, or that another version made.

Example: quatrain report runs/first
"""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
) -> None:
    from quatrain.cli.console import block, stdout
    from quatrain.train.live_report import write_report
    from quatrain.train.preflight import RUN_FILE

    folder = Path(run).expanduser()
    if not (folder / RUN_FILE).is_file():
        raise ConfigError(f"{folder} holds no run: it has no {RUN_FILE}", hint="`quatrain runs FOLDER` lists the runs")
    try:
        path = write_report(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: the page could not be written: {error}") from error
    block(stdout(), "report", [str(path)])
