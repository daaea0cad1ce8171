"""How the facts of a run look in the terminal."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from quatrain.cli.console import block, columns, count, duration, megabytes, millions, several

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from quatrain.checkpoint.source import ModelSource
    from quatrain.config import InstructConfig
    from quatrain.engine.layout import Layout
    from quatrain.ops.select import Backend
    from quatrain.train.batching import Batching
    from quatrain.train.run import Outcome, Preparation


def preparation(console: Console, it: Preparation) -> None:
    """Everything about a run that is known before its first step."""
    from quatrain.cli.report import short_lines

    model(console, it.source, it.config, it.layout)
    kernels(console, it.layout.backend)
    modules(console, it)
    block(console, "data", short_lines(it.prepared))
    steps(console, it)
    plan(console, it.layout)
    options(console, it.settings.non_default())
    for note in it.notes:
        block(console, "note", [note], "yellow")


def model(console: Console, source: ModelSource, config: InstructConfig, layout: Layout) -> None:
    """The model, how it is held, where it runs and why there."""
    spec = source.spec
    parameters = sum(math.prod(info.shape) for info in source.inventory().values())
    held = (
        "as NF4" + (" with double quantisation" if config.double_quant else "")
        if config.quantize == "nf4"
        else "unquantised"
    )
    dtype = str(layout.compute_dtype).removeprefix("torch.")
    block(
        console,
        "model",
        [
            f"{source.name}: {spec.family}, {millions(parameters)} parameters, {spec.num_layers} layers, "
            f"hidden size {spec.hidden_size}, vocabulary {count(spec.vocab_size)}",
            f"linears {held}, computing in {dtype} on {device_reason(config, layout.device)}",
            *source.notes,
        ],
    )


def kernels(console: Console, backend: Backend) -> None:
    """Which implementation of the ops a run uses, and why; in yellow when it is the slow one, unasked."""
    slow = backend.name == "reference" and backend.reason != "as asked"
    block(console, "kernels", [f"{backend.name}: {backend.reason}"], "yellow" if slow else "")


def device_reason(config: InstructConfig, device: str) -> str:
    """Where a run computes, with the reason when `auto` chose the CPU."""
    from quatrain.engine.setup import not_on_cuda

    if device != "cpu":
        return "a GPU"
    return "CPU" if config.device == "cpu" else f"CPU because {not_on_cuda()}"


def modules(console: Console, it: Preparation) -> None:
    """The matched modules and what is trainable in them."""
    config, found = it.config, it.modules()
    total = sum(parameters for _, parameters in found.values())
    scale = f"alpha {config.lora_alpha:g}" + (", rsLoRA" if config.use_rslora else "")
    rows = [
        [name, f"{number} modules", f"{count(parameters)} parameters"] for name, (number, parameters) in found.items()
    ]
    rows.append(["all", f"{sum(n for n, _ in found.values())} modules", f"{count(total)} parameters to train"])
    block(console, "adapters", [f"rank {config.lora_rank}, {scale}", *columns(rows)])
    if config.lora_rank > min(min(it.source.spec.linear_shape(name)) for name in found):
        block(
            console,
            "warning",
            [f"rank {config.lora_rank} is larger than the smaller side of some linears: it adds nothing"],
        )


def steps(console: Console, it: Preparation) -> None:
    """How long the run is, and its learning rate."""
    schedule = it.schedule
    warmup = f"{schedule.warmup_steps} of them warm-up" if schedule.warmup_steps else "no warm-up"
    block(
        console,
        "steps",
        [
            f"{several(it.total_steps, 'optimizer step')}, {warmup}; {batch_line(it.batching)}",
            f"learning rate {schedule.peak:g}, {schedule.kind}"
            + (f", floor {schedule.floor:g} of it" if schedule.floor else ""),
        ],
    )


def batch_line(batching: Batching) -> str:
    """What an optimizer step holds."""
    options, length = batching.options, batching.length
    epochs = f"{several(options.num_epochs, 'epoch')}, " if options.max_steps is None else ""
    if options.batch_tokens is not None:
        return f"{epochs}up to {count(options.batch_tokens)} tokens a step, rows packed"
    rows = (
        f"{options.batch_size} rows"
        if options.accumulation == 1
        else f"{options.batch_size} × {options.accumulation} rows"
    )
    return f"{epochs}{rows} a step, largest micro-batch {count(length.largest_micro_batch)} tokens"


def plan(console: Console, layout: Layout) -> None:
    """The memory plan by group, and what was chosen to make it fit."""
    memory = layout.plan
    rows = [[name, megabytes(size)] for name, size in memory.groups().items()]
    rows.append(["planned peak", megabytes(memory.total_bytes)])
    if memory.host:
        rows.append(["on the host besides", megabytes(memory.host_bytes)])
    block(console, "memory", columns(rows))
    if layout.choices:
        block(console, "chosen", layout.choices)


def options(console: Console, values: dict[str, Any]) -> None:
    """The options that are not the defaults."""
    hidden = {"model", "data", "out", "template_date", "resume", "override", "overwrite"}
    shown = [f"{name} = {value}" for name, value in values.items() if name not in hidden]
    block(console, "options", [", ".join(shown) if shown else "all at their defaults"])


def vllm(console: Console, adapter: Path) -> None:
    """Whether vLLM would load an adapter as it lies there."""
    from quatrain.checkpoint.vllm import check

    verdict = check(adapter)
    block(console, "vllm", verdict.lines(), "bold cyan" if verdict.loads else "yellow")


def outcome(console: Console, it: Outcome) -> None:
    """How a run ended, and what to do next."""
    folder = shlex.quote(str(it.folder))
    took = f"{it.ending} after step {it.steps} of {it.total_steps}, {duration(it.seconds)}"
    lines = [f"{took}, peak memory {megabytes(it.peak_bytes)}"]
    if it.skipped:
        lines.append(f"{several(it.skipped, 'step')} skipped for gradients that were not finite")
    if it.best_loss is not None:
        lines.append(f"best evaluation: loss {it.best_loss:.4f} at step {it.best_step}")
    block(console, "run", lines)
    if it.ending == "interrupted":
        block(console, "go on", [f"quatrain train --resume --out {folder}"])
    elif it.adapter is not None:
        which = f"step {it.best_step}, the best" if it.best_step is not None else f"step {it.steps}, the last"
        block(console, "adapter", [f"{it.adapter} ({which})"])
        vllm(console, it.adapter)
        block(console, "try it", [f"quatrain chat --model {folder}"])
