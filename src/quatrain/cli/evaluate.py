"""`quatrain eval`: token-weighted loss and perplexity of a model, or of what a run has made of it, on data files."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quatrain.cli.complete import models, runs
from quatrain.cli.options import Group, with_options
from quatrain.config import DataOptions, InstructConfig
from quatrain.errors import ConfigError

NAME = "eval"
HELP = """Loss and perplexity of a model, an adapter or a run on data files.

Every supervised token counts the same, whatever the batches. A run folder brings its own data options along.

Example: quatrain eval --model runs/first held_out.jsonl
"""

ENGINE = (
    "max_seq_len",
    "quantize",
    "double_quant",
    "compute_dtype",
    "device",
    "memory_budget",
    "micro_batch_tokens",
    "cache",
    "cache_dir",
)
_TRAINING_ONLY = ("val_split", "validation")
DATA = tuple(name for name in DataOptions.model_fields if name not in _TRAINING_ONLY)


@with_options(Group("Data", DataOptions, DATA), Group("Engine", InstructConfig, ENGINE))
def command(
    given: dict[str, Any],
    files: Annotated[list[str] | None, typer.Argument(metavar="DATA", help="Data files.", show_default=False)] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="a data file (repeatable)")] = None,
    model: Annotated[
        str, typer.Option("--model", autocompletion=models, help="a run, an adapter or a model", show_default=False)
    ] = "",
    adapter: Annotated[
        str | None, typer.Option("--adapter", autocompletion=runs, help="an adapter folder for --model to be its base")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.cli.console import block, count, stdout
    from quatrain.cli.report import short_lines
    from quatrain.cli.use import open_for_use
    from quatrain.config import build
    from quatrain.data.disk import configured_folder
    from quatrain.data.pipeline import prepare

    paths = [*(files or []), *(data or [])]
    if not paths:
        raise ConfigError("no data file given", hint="quatrain eval --model MODEL FILE")
    it = open_for_use(model, adapter)
    if useless := [name for name in _TRAINING_ONLY if name in given]:
        raise ConfigError(f"{', '.join(useless)} has no meaning for eval: it takes every row of its files")
    options = it.data_options({name: value for name, value in given.items() if name not in ENGINE})
    engine = build(InstructConfig, {**it.engine, **{name: value for name, value in given.items() if name in ENGINE}})
    rows = it.source.spec.vocab_size
    prepared = prepare(
        paths, options, it.tokenizer(), max_seq_len=engine.max_seq_len, seed=engine.seed, vocab_rows=rows,
        cache=configured_folder(engine),
    )  # fmt: skip
    if any(source.weight != 1 for source in prepared.report.sources):
        raise ConfigError("a weight has no meaning for eval: it takes every row of its files once")
    console = stdout()
    if not as_json:
        block(console, "model", [it.source.name + (f" with {it.adapter}" if it.adapter else ", without an adapter")])
        block(console, "data", [*short_lines(prepared), *prepared.notices])
    pipeline, notices = it.load({name: value for name, value in given.items() if name in ENGINE})
    result = pipeline.evaluate(prepared.train)
    if as_json:
        facts = {"eval_loss": result.avg_loss, "eval_perplexity": result.perplexity, "rows": len(prepared.train)}
        print(json.dumps({**facts, "response_tokens": result.total_response_tokens, "notices": notices}))
        return
    for line in notices:
        block(console, "note", [line])
    block(
        console,
        "eval",
        [
            f"loss {result.avg_loss:.4f}, perplexity {result.perplexity:.3f}, over "
            f"{count(result.total_response_tokens)} supervised tokens in {count(len(prepared.train))} rows"
        ],
    )
