"""`quatrain bench`: what this machine gives: its limits, every kernel against them and beside torch, whole steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quatrain.cli.options import Group, with_options
from quatrain.config import InstructConfig
from quatrain.errors import ConfigError
from quatrain.model.shapes import SHAPES

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.bench.run import Bench

NAME = "bench"
HELP = """Measure this machine: its limits, every kernel against them and beside torch, and whole training steps.

Nothing but Quatrain and torch is needed. Every kernel must agree with the reference op on a small input before it is
timed; times are medians of repeats in turns, with empty caches. `peak` is the share of the limit that binds, products
or memory; the limits are the best rates of the whole run, in which they are looked at again and again. `torch` is
torch's own op at the same work (for linears its product with a weight that is already dense), `x` its time over ours.
Each length of a step runs in a fresh process. With --shape the weights are random and nothing is read.

Example: quatrain bench --shape qwen2.5-0.5b --only kernels --json bench.json
"""

ENGINE = ("lora_rank", "checkpoint", "compute_dtype", "kernels", "memory_budget", "cache", "cache_dir")
DEFAULT_MODEL = "smollm2-135m"


@with_options(Group("Engine", InstructConfig, ENGINE))
def command(
    given: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model; default: smollm2-135m.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NAME", help=f"random weights in the shape of {', '.join(SHAPES)}"),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", metavar="INTEGER", min=1, help="tokens of a kernel's input; default: 2048", show_default=False
        ),
    ] = 2048,
    steps_tokens: Annotated[
        str,
        typer.Option(
            "--steps-tokens",
            metavar="A,B",
            help="tokens of a step; default: 512,1024,2048,4096,8192",
            show_default=False,
        ),
    ] = "512,1024,2048,4096,8192",
    row: Annotated[
        int,
        typer.Option(
            "--row", metavar="INTEGER", min=2, help="tokens of a row at most; default: 512", show_default=False
        ),
    ] = 512,
    repeats: Annotated[
        int,
        typer.Option("--repeats", metavar="INTEGER", min=1, help="timed calls of each; default: 7", show_default=False),
    ] = 7,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="INTEGER", min=1, max=1024, help="CPU threads, torch's too; default: what torch finds"
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="kernels|steps", help="leave the other part out")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="also write everything to FILE as JSON")
    ] = None,
) -> None:
    if model and shape:
        raise ConfigError("a model and --shape contradict each other: give one of them")
    if only not in (None, "kernels", "steps"):
        raise ConfigError(f"only: want kernels or steps, got {only!r}")
    lengths = _lengths(steps_tokens)
    if json_file:
        _check_file(Path(json_file))
    from quatrain.bench.run import Bench
    from quatrain.cli.console import stdout
    from quatrain.config import build

    if threads:
        import torch

        torch.set_num_threads(threads)
    build(InstructConfig, given)
    bench = Bench(model or DEFAULT_MODEL, shape, tokens, lengths, row, repeats, given)
    report = _measure(bench, only, stdout())
    if json_file:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any("error" in step for step in report["steps"]):
        raise typer.Exit(1)


def _check_file(path: Path) -> None:
    """Raises ConfigError for a file that could not be written after an hour of measuring."""
    if path.is_dir():
        raise ConfigError(f"json: {path} is a folder", hint="give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"json: {path.parent} is no folder", hint="create it, or give another name for the file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"json: {path} cannot be written", hint="give a file that you may write to")


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 1 for part in parts):
        raise ConfigError(f"steps-tokens: want numbers of tokens such as 512,2048, got {text!r}")
    return tuple(map(int, parts))


def _measure(bench: Bench, only: str | None, console: Console) -> dict[str, Any]:
    """Prints each part as soon as it is there; returns all of them."""
    from quatrain.bench.kernels import table
    from quatrain.cli.console import block
    from quatrain.cli.doctor import examine

    machine = examine()
    spec, cpu = bench.source.spec, machine["cpu"]
    block(console, "machine", [f"{cpu['name']}, {cpu['usable']} cores", " ".join(cpu["features"])])
    block(console, "model", [f"{bench.source.name}: {spec.num_layers} layers, hidden size {spec.hidden_size}"])
    block(console, "kernels", [f"{bench.backend.name}: {bench.backend.reason}; {bench.dtype_name}"])
    bench.look_at_limits()
    if only != "steps":
        with console.status("checking the kernels against the reference ops") as status:
            for name in bench.measure_kernels():
                status.update(f"measured {name}")
        block(console, f"{bench.tokens}", _kernel_lines(table(bench.timed, bench.limits)))
    if only != "kernels":
        for step in bench.measure_steps():
            block(console, f"{step['tokens']}", [_step_line(step)])
    rates = [f"{flops / 1e9:,.0f} GFLOP/s {name}" for name, flops in bench.flops.items()]
    block(console, "limits", [", ".join([*rates, f"{bench.bandwidth / 1e9:,.1f} GB/s"])])
    shown = ("system", "cpu", "memory", "torch", "packages")
    return {**bench.report(), "machine": {name: machine[name] for name in shown}}


def _kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    from quatrain.cli.console import columns

    cells = [["kernel", "ms", "GFLOP/s", "GB/s", "peak", "limit", "torch ms", "x"]]
    for row in rows:
        torch_ms, over = row["torch_ms"], row["torch_over_ours"]
        cells.append(
            [
                row["kernel"], f"{row['ms']:.2f}", f"{row['gflops']:,.0f}" if row["gflops"] else "-",
                f"{row['gbytes']:.1f}", f"{row['percent_of_peak']:.0f}%", row["limit"],
                *(("-", "-") if torch_ms is None else (f"{torch_ms:.2f}", f"{over:.2f}")),
            ]
        )  # fmt: skip
    return columns(cells)


def _step_line(step: dict[str, Any]) -> str:
    from quatrain.cli.console import megabytes

    if "error" in step:
        return f"failed: {step['error']}"
    return (
        f"{step['ms']:,.0f} ms a step, {step['tokens_per_second']:,.0f} tokens/s, {step['percent_of_peak']:.0f}% of "
        f"the peak; planned {megabytes(step['planned_bytes'])}, measured {megabytes(step['measured_peak_bytes'])}"
    )
