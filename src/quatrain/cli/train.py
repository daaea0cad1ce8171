"""`quatrain train`: fine-tune a model on data files."""

from __future__ import annotations

from typing import Any

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig, RunOptions, TrainOptions

NAME = "train"
HELP = """Fine-tune a model on instruction data.

Shows what will be trained, on which tokens, in how many steps and in how much memory; then trains.

Ctrl-C finishes the step and writes a checkpoint; --resume goes on from it bit for bit.

Example: quatrain train --model smollm2-135m --data rows.jsonl --out runs/first
"""

GROUPS = (
    Group("Run", RunOptions),
    Group("Training", TrainOptions),
    Group("Data", DataOptions),
    Group("Adapters, optimizer, memory", InstructConfig),
)


@with_options(*GROUPS)
def command(given: dict[str, Any]) -> None:
    from quatrain.cli import show
    from quatrain.cli.errors import INTERRUPTED
    from quatrain.cli.progress import TerminalReporter
    from quatrain.train.run import train

    reporter = TerminalReporter()
    outcome = train(given, reporter)
    show.outcome(reporter.console, outcome)
    if outcome.ending == "interrupted":
        raise typer.Exit(INTERRUPTED)
