"""`quatrain plan`: what a run will take (steps, tokens, memory, time, disk) and what each knob would save."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig, RunOptions, TrainOptions

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.engine.layout import Layout
    from quatrain.train.settings import Settings

NAME = "plan"
HELP = """Show what a training run would need, without reading a weight.

Takes the options of `train`. Steps and memory are exact; the time comes from a few steps of a piece of the model in
this run's shapes, with random weights (--no-measure leaves them out); the knobs are runs that are really laid out.

Without data the memory is planned for micro-batches of --micro-batch-tokens. With --shape
no model is needed, and with --device cuda no GPU: the plan is then for --memory-budget, or for the smallest usual card.

Example: quatrain plan --model smollm2-135m --data rows.jsonl --batch-size 16

Example: quatrain plan --shape qwen3-8b --device cuda --tokens 4096
"""

GROUPS = (
    Group("Run", RunOptions, ("model", "data", "out", "adapter")),
    Group("Training", TrainOptions),
    Group("Data", DataOptions),
    Group("Adapters, optimizer, memory", InstructConfig),
)


@with_options(*GROUPS)
def command(
    given: dict[str, Any],
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="NAME", help="Plan for a well-known model by its numbers alone (repeatable)."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="The same as --micro-batch-tokens.")
    ] = None,
    names: Annotated[bool, typer.Option("--names", help="Show every entry by name, not only the groups.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure a second or two for the time estimate.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.cli.console import block, columns, megabytes, stdout
    from quatrain.train.settings import Settings

    if tokens is not None:
        given = {**given, "micro_batch_tokens": tokens}
    settings = Settings.resolve(given)
    console = stdout()
    if shape:
        layouts = {name: _layout_of_shape(name, settings) for name in shape}
        if as_json:
            print(json.dumps({name: _facts(layout) for name, layout in layouts.items()}))
        else:
            _show_shapes(console, layouts, names)
        return
    settings.require("model")
    if settings.run.data:
        layout, facts = _plan_run(console, settings, measure, as_json)
    else:
        layout, facts = _plan_model(console, settings, as_json)
    if as_json:
        print(json.dumps({**facts, **_facts(layout)}))
    elif names:
        rows = [[f"{entry.group}: {entry.name}", megabytes(entry.nbytes)] for entry in layout.plan.entries]
        block(console, "by name", columns(rows))


def _plan_run(console: Console, settings: Settings, measure: bool, as_json: bool) -> tuple[Layout, dict[str, Any]]:
    """A model and its data: everything that a run will take."""
    from quatrain.cli import forecast as shown
    from quatrain.cli import show
    from quatrain.cli.progress import TerminalReporter
    from quatrain.train.reporter import Reporter
    from quatrain.train.run import prepare_run

    it = prepare_run(settings, Reporter() if as_json else TerminalReporter(), absent_gpu=True)
    most_flops = shown.PLAN_FLOPS if measure else None
    if as_json:
        return it.layout, shown.as_json(it, most_flops)
    show.preparation(console, it)
    shown.table(console, it, most_flops)
    return it.layout, {}


def _plan_model(console: Console, settings: Settings, as_json: bool) -> tuple[Layout, dict[str, Any]]:
    """A model alone: memory for micro-batches of the capacity that was asked for, and the knobs."""
    from quatrain.checkpoint.open import open_source
    from quatrain.cli import forecast as shown
    from quatrain.cli import show
    from quatrain.cli.console import block
    from quatrain.train.continuing import start_from
    from quatrain.train.knobs import Setup, knobs
    from quatrain.train.run import layout_of

    source = open_source(settings.run.model)
    if settings.run.adapter is not None:
        settings, _ = start_from(settings, source)
    config = settings.engine
    layout = layout_of(source, config, absent_gpu=True)

    def lay(config: InstructConfig, micro_batches: int) -> Layout:
        return layout_of(source, config, micro_batches, absent_gpu=True)

    found = knobs(Setup(source.spec, config, layout, lay))
    if not as_json:
        show.model(console, source, config, layout)
        block(console, "capacity", [f"{config.capacity} tokens a micro-batch (give --data to plan for it)"])
        show.plan(console, layout)
        shown.show_knobs(console, found)
    return layout, {"knobs": [knob.as_json() for knob in found]}


def _layout_of_shape(name: str, settings: Settings) -> Layout:
    from quatrain.engine.setup import plan_layout
    from quatrain.model.shapes import shape_spec

    return plan_layout(shape_spec(name), settings.engine)


def _facts(layout: Layout) -> dict[str, Any]:
    facts: dict[str, Any] = layout.plan.as_json()
    return facts | {"device": layout.device, "choices": list(layout.choices)}


def _show_shapes(console: Console, layouts: dict[str, Layout], names: bool) -> None:
    """One shape as a plan, several as a table with a row for each."""
    from quatrain.cli import show
    from quatrain.cli.console import block, columns, megabytes

    first = next(iter(layouts.values()))
    where = "on a GPU" if first.device == "cuda" else "on the CPU"
    dtype = str(first.compute_dtype).removeprefix("torch.")
    block(console, "capacity", [f"{first.tokens} tokens a micro-batch, computing in {dtype} {where}"])
    if len(layouts) == 1:
        show.plan(console, first)
        entries = [[f"{entry.group}: {entry.name}", megabytes(entry.nbytes)] for entry in first.plan.entries]
        if names:
            block(console, "by name", columns(entries))
        return
    groups = list(dict.fromkeys(group for layout in layouts.values() for group in layout.plan.groups()))
    rows = [["MB", *groups, "planned peak"]]
    for name, layout in layouts.items():
        sizes = layout.plan.groups()
        cells = [*(sizes.get(group, 0) for group in groups), layout.plan.total_bytes]
        rows.append([name, *(f"{size / 1e6:,.0f}" for size in cells)])
    block(console, "memory", columns(rows))
    for name, layout in layouts.items():
        if layout.choices:
            block(console, name[:10], layout.choices)
