"""`quatrain plan`: how many steps, how many tokens, how much memory; no weight is read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig, RunOptions, TrainOptions

NAME = "plan"
HELP = """Show what a training run would need, without reading a weight.

Takes the options of `train`. Without data the memory is planned for micro-batches of --micro-batch-tokens.

Example: quatrain plan --model smollm2-135m --data rows.jsonl --batch-size 16
"""

GROUPS = (
    Group("Run", RunOptions, ("model", "data")),
    Group("Training", TrainOptions),
    Group("Data", DataOptions),
    Group("Adapters, optimizer, memory", InstructConfig),
)


@with_options(*GROUPS)
def command(
    given: dict[str, Any],
    names: Annotated[bool, typer.Option("--names", help="Show every entry by name, not only the groups.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.cli import show
    from quatrain.cli.console import block, columns, megabytes, stdout
    from quatrain.train.settings import Settings

    settings = Settings.resolve(given).require("model")
    console = stdout()
    if settings.run.data:
        from quatrain.cli.progress import TerminalReporter
        from quatrain.train.reporter import Reporter
        from quatrain.train.run import prepare_run

        it = prepare_run(settings, Reporter() if as_json else TerminalReporter())
        memory, length = it.plan, it.batching.length
        if not as_json:
            show.preparation(console, it)
        facts: dict[str, Any] = {"total_steps": length.total_steps, "largest_micro_batch": length.largest_micro_batch}
    else:
        from quatrain.checkpoint.open import open_source
        from quatrain.train.run import layout_of

        source = open_source(settings.run.model)
        memory, facts = layout_of(source, settings.engine).plan, {}
        if not as_json:
            show.model(console, source, settings.engine)
            block(
                console, "capacity", [f"{settings.engine.capacity} tokens a micro-batch (give --data to plan for it)"]
            )
            show.plan(console, memory)
    if as_json:
        print(json.dumps({**facts, **memory.as_json()}))
    elif names:
        rows = [[f"{entry.group}: {entry.name}", megabytes(entry.nbytes)] for entry in memory.entries]
        block(console, "by name", columns(rows))
