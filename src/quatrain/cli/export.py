"""`quatrain export`: an adapter and its base as one model, for other programs."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from quatrain.cli.complete import models, runs
from quatrain.cli.options import Group, with_options
from quatrain.config import ExportOptions, InstructConfig

NAME = "export"
HELP = """Write a trained adapter as a model that other programs load.

Merges the adapter into its base tensor by tensor, writes, reads the result back and compares token ids and logits with
those of the adapter. Only then does the folder appear. Base and adapter are never changed.

An adapter trained in 4 bits has learned against the dequantised weights, so these are what it is merged into (--base
source takes the model's own weights instead, and says how far the logits are off).

Example: quatrain export --adapter runs/first --format ollama --out first-ollama
"""
ENGINE = ("quantize", "double_quant")


@with_options(Group("Export", ExportOptions), Group("How it was trained", InstructConfig, ENGINE))
def command(
    given: dict[str, Any],
    adapter: Annotated[
        str, typer.Option("--adapter", autocompletion=runs, help="an adapter folder or a run folder")
    ] = "",
    model: Annotated[
        str, typer.Option("--model", autocompletion=models, help="the base model; default: what the adapter names")
    ] = "",
) -> None:
    from quatrain.cli.console import block, megabytes, stdout
    from quatrain.cli.use import open_for_use
    from quatrain.config import build
    from quatrain.errors import ConfigError
    from quatrain.memory.process import peak_resident_bytes
    from quatrain.train.export import Job, check_target, export

    if not adapter:
        raise ConfigError("nothing given for adapter", hint="give --adapter: an adapter folder or a run folder")
    options = build(ExportOptions, {name: value for name, value in given.items() if name not in ENGINE})
    check_target(options)
    it = open_for_use(model, adapter)
    assert it.adapter is not None
    engine = build(InstructConfig, {**it.engine, **{name: value for name, value in given.items() if name in ENGINE}})
    console = stdout()
    block(console, "model", [f"{it.source.name} with {it.adapter}"])
    tokenizer, renderer = it.text_tools()
    job = Job(options, it.source, it.adapter, engine, tokenizer, renderer, it.data)
    done = export(job, lambda text: block(console, "now", [text]))
    base = "its dequantised NF4 weights" if done.base == "dequantised" else "the model's own weights"
    block(console, "merged", [f"into {base}, stored as {done.type}"])
    if done.difference is not None:
        said = f"max |logit difference| to the adapter on a probe prompt: {done.difference:.3g}"
        said += f" ({done.share:.2%} of their spread in the root mean square)"
        block(console, "compared", [said, f"the adapter itself moved these logits by up to {done.effect:.3g}"])
    if "quantize" not in it.engine | given and options.base == "auto":
        guess = "the adapter lies in no run folder, so it is taken to be trained in NF4; --quantize none says otherwise"
        done.notices.append(guess)
    for line in [*it.notices, *done.notices]:
        block(console, "note", [line])
    block(console, "files", [f"{name}  {megabytes(size)}" for name, size in done.files.items()])
    block(console, "done", [f"{done.folder}; peak memory {megabytes(peak_resident_bytes())}"])
    if options.format != "gguf-adapter":
        folder = shlex.quote(str(options.out))
        create = [f"ollama create my-model -f {folder}/Modelfile"] if options.format == "ollama" else []
        block(console, "try it", [*create, f"quatrain chat --model {folder}"])
