"""How the forecast of a run looks in the terminal: tokens and work, time, disk, knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quatrain.bench.calibrate import rates_of
from quatrain.cli.console import block, columns, count, duration, megabytes, several
from quatrain.train.forecast import Forecast, Rates, TimeEstimate
from quatrain.train.knobs import Knob, Setup, knobs
from quatrain.train.run import Preparation, layout_of
from quatrain.train.watch import SAMPLE_TOKENS, sample_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.config import InstructConfig
    from quatrain.engine.layout import Layout
    from quatrain.train.preflight import DiskNeed

# FLOPs of a measured step: `train` must not start a second later for it, `plan` may take longer.
TRAIN_FLOPS, PLAN_FLOPS = 2e10, 3e11


def measured(it: Preparation, forecast: Forecast, most_flops: float) -> Rates | None:
    """This machine's rates for a run, from steps of `most_flops` at most."""
    return rates_of(it.source.spec, it.layout, it.config, forecast.sample(), most_flops=most_flops)


def run_knobs(it: Preparation) -> list[Knob]:
    """What each knob would save in a run, by laying it out again."""

    def lay(config: InstructConfig, micro_batches: int) -> Layout:
        return layout_of(it.source, config, micro_batches, sample_tokens(it.prompts), absent_gpu=True)

    return knobs(Setup(it.source.spec, it.config, it.layout, lay, it.batching, it.prepared.validation))


def table(console: Console, it: Preparation, most_flops: float | None) -> None:
    """What a run will take, as `plan` and `train` show it: work, time, disk and knobs. The time comes from steps of
    `most_flops` at most and is left out where that is None."""
    forecast = Forecast(it)
    work(console, forecast)
    if most_flops is not None:
        time(console, forecast, measured(it, forecast, most_flops))
    disk(console, forecast.disk())
    show_knobs(console, run_knobs(it))


def work(console: Console, forecast: Forecast) -> None:
    """Tokens and FLOPs."""
    facts = forecast.as_json()
    tokens, flops = facts["tokens"], facts["flops"]
    again = f", {flops['recompute'] / flops['run']:.0%} of it recomputing" if flops["recompute"] else ""
    block(
        console,
        "work",
        [
            f"{count(tokens['epoch'])} tokens an epoch, {count(tokens['step'])} a step, {count(tokens['run'])} in all; "
            f"{count(tokens['supervised_epoch'])} an epoch are learned",
            f"{flops['run'] / 1e12:,.1f} TFLOP{again}"
            + (f", {several(facts['evaluations'], 'evaluation')} included" if facts["evaluations"] else ""),
        ],
    )


def time(console: Console, forecast: Forecast, rates: Rates | None) -> None:
    """The estimate with its range, or why there is none."""
    if rates is None:
        block(console, "time", ["no estimate: it is measured on the CPU only, and where a piece of the model fits"])
        return
    lines = [f"{_range(forecast.time(rates))}, by {rates.tokens} tokens through a piece of the model"]
    if forecast.answers:
        answers = several(forecast.answers, "sample answer")
        lines.append(f"not in it: {answers} of up to {SAMPLE_TOKENS} tokens (--samples 0: none)")
    block(console, "time", lines)


def _range(estimate: TimeEstimate) -> str:
    return (
        f"about {duration(estimate.seconds)} for training and evaluation "
        f"({duration(estimate.least)} to {duration(estimate.most)} if the machine stays as busy as it is now)"
    )


def disk(console: Console, need: DiskNeed) -> None:
    """What the run writes, against what is free."""
    lines = [
        f"{megabytes(need.run_bytes)} in the run folder ({need.checkpoints} checkpoints of "
        f"{megabytes(need.checkpoint)} at once, the adapter {megabytes(need.adapter)}); {megabytes(need.free)} free"
    ]
    if need.cache:
        lines.append(f"{megabytes(need.cache)} in the cache, once for this model (--no-cache)")
    block(console, "disk", lines, "bold cyan" if need.free > need.run_bytes + need.cache else "yellow")


def show_knobs(console: Console, found: Sequence[Knob]) -> None:
    """One line for each knob: what it saves, what it does to the work, what it costs."""
    if not found:
        return
    rows = [["", "memory", "work", ""]]
    for knob in found:
        memory = "" if knob.saved_bytes is None else f"{-knob.saved_bytes / 1e6:+,.1f} MB"
        change = "" if knob.work is None else f"{knob.work - 1:+.0%}"
        rows.append([f"{knob.option}={_value(knob.value)}", memory, change, ""])
    lines = columns(rows)
    block(console, "knobs", [lines[0], *(f"{line}  {knob.cost}" for line, knob in zip(lines[1:], found, strict=True))])


def as_json(it: Preparation, most_flops: float | None) -> dict[str, Any]:
    """The table for machines. `time` is null where nothing was measured."""
    forecast = Forecast(it)
    rates = measured(it, forecast, most_flops) if most_flops is not None else None
    time = None if rates is None else {**asdict(forecast.time(rates)), "rates": asdict(rates)}
    return {**forecast.as_json(), "time": time, "knobs": [knob.as_json() for knob in run_knobs(it)]}


def _value(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)
