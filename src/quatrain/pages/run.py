"""`report.html`: what a run is, how it goes and what it was made of, from `run.json` and `metrics.jsonl` alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from quatrain.pages.charts import Point, Series, bar_chart, line_chart, number
from quatrain.pages.metrics import Metrics
from quatrain.pages.shell import (
    Html,
    bar,
    charts,
    figures,
    mark,
    more,
    page,
    pairs,
    paragraph,
    pre,
    section,
    status,
    table,
)

REFRESH_SECONDS = 10
MOST_LINES = 5  # of a chart over the layers
KINDS = {"finished": "good", "stopped early": "good", "running": "warn", "interrupted": "warn"}

Record = dict[str, Any]


def run_page(name: str, record: Record, metrics: Metrics, updated: str = "") -> str:
    """The page of the run folder `name`. `record` is run.json's content; parts that an older version did not write are
    left out. While the run goes on an open page loads itself again."""
    ending = state(record)
    running = ending == "running"
    about = [
        _text(record, "model", "name") or _text(record, "options", "model"),
        ", ".join(record.get("data", {}).get("files", [])),
        f"started {when(record)}" if "started" in record else "",
        f"updated {updated}" if updated and running else "",
    ]
    return page(
        name,
        *_sections(record, metrics),
        status=status(ending, KINDS.get(ending, "bad")),
        subtitle=" · ".join(part for part in about if part),
        refresh=REFRESH_SECONDS if running else None,
    )


def state(record: Record) -> str:
    """How the run ended, or `running`."""
    return str(record.get("result", {}).get("ending", "unknown"))


def when(record: Record) -> str:
    """`2026-11-30 14:04`, when the run began; empty where it is not known."""
    return str(record.get("started", ""))[:16].replace("T", " ")


def _sections(record: Record, metrics: Metrics) -> Iterator[Html]:
    yield _overview(record, metrics)
    yield _curves(record, metrics)
    if metrics.layers:
        yield _layers(metrics)
    if record.get("samples"):
        yield _samples(record["samples"], metrics)
    if "plan" in record:
        yield _memory(record, metrics)
    if "data" in record:
        yield _data(record["data"])
    yield _configuration(record)
    yield _provenance(record)


# How it goes.


def _overview(record: Record, metrics: Metrics) -> Html:
    total = record.get("steps", {}).get("total")
    done = int(metrics.steps[-1]) if metrics.steps else 0
    values: dict[str, str | tuple[str, str]] = {"step": (f"{done:,} of {total:,}" if total else f"{done:,}", "")}
    epoch = metrics.last("epoch")
    if epoch is not None:
        values["step"] = (str(values["step"][0]), f"epoch {epoch:.2f}")
    losses = metrics.smoothed_points("loss")
    shown = [value for _, value in losses if value is not None]
    if shown:
        values["loss"] = (f"{shown[-1]:.4f}", f"mean of the last steps, {shown[0]:.4f} at the start")
    if metrics.best is not None:
        below = f"best, at step {metrics.best['step']:,}; perplexity {number(metrics.best.get('eval_perplexity') or 0)}"
        values["evaluation loss"] = (f"{metrics.best['eval_loss']:.4f}", below)
    speed = metrics.last("tokens_per_s", statistics.median)
    if speed is not None:
        values["tokens/s"] = (f"{speed:,.0f}", "median of the last steps")
    spent, left = _seconds(metrics, done, total)
    values["training time"] = (duration(spent), f"about {duration(left)} left" if left else "evaluations not counted")
    peak, planned = peak_bytes(record, metrics), record.get("plan", {}).get("total_bytes")
    if peak:
        values["peak memory"] = (megabytes(peak), f"planned {megabytes(planned)}" if planned else "")
    skipped = int(sum(value for value in metrics.columns["skipped"] if value == value))
    if skipped:
        values["skipped steps"] = (str(skipped), "their gradients were not finite")
    return section(
        "Overview", figures(values), *(paragraph(f"Note: {text}", "note") for text in record.get("notes", []))
    )


def _seconds(metrics: Metrics, done: int, total: int | None) -> tuple[float, float]:
    """(spent in steps, expected for the steps that are left)."""
    times = [
        tokens / speed
        for tokens, speed in zip(metrics.columns["tokens"], metrics.columns["tokens_per_s"], strict=True)
        if speed > 0
    ]
    left = (total - done) * statistics.mean(times[-50:]) if total and times and done < total else 0.0
    return sum(times), left


def _curves(record: Record, metrics: Metrics) -> Html:
    loss, evaluation = metrics.points("loss"), metrics.evaluation_points()
    lines = [
        Series("each step", loss, 0, "faint"),
        Series("mean of the last steps", metrics.smoothed_points("loss"), 0),
    ]
    if evaluation:
        lines.append(Series("evaluation", evaluation, 1, "dashed", dots=True))
    clipped = record.get("options", {}).get("clip", "none") != "none"
    limit = record.get("options", {}).get("max_grad_norm")
    norms = [Series("gradient norm", metrics.points("grad_norm"), 2)]
    if clipped and limit and len(metrics.steps) > 1:
        ends: list[Point] = [(metrics.steps[0], limit), (metrics.steps[-1], limit)]
        norms.append(Series("clipped above", ends, 4, "dashed"))
    return section(
        "Curves",
        charts(
            line_chart("Loss", lines, note="Nats for each learned token; lower is better."),
            line_chart("Gradient norm, before clipping", norms, log=True),
            line_chart("Learning rate", [Series("learning rate", metrics.points("lr"), 3)], from_zero=True),
            line_chart("Tokens a second", [Series("tokens/s", metrics.points("tokens_per_s"), 5)], from_zero=True),
        ),
        note="Point at a curve for its values.",
    )


def _layers(metrics: Metrics) -> Html:
    """A line for some of the measurements, the oldest faint."""
    count = len(metrics.layers)
    chosen = sorted({round(at * (count - 1) / (MOST_LINES - 1)) for at in range(MOST_LINES)} if count > 1 else {0})

    def lines(key: str) -> list[Series]:
        found = []
        for colour, at in enumerate(chosen):
            line = metrics.layers[at]
            points = [(layer, value) for layer, value in enumerate(line.get(key) or [])]
            found.append(Series(f"step {line['step']:,}", points, colour, dots=len(points) < 3))
        return found

    return section(
        "Layers",
        charts(
            line_chart("How far each layer has moved", lines("adapter_norms"), x="layer", from_zero=True,
                       note="Frobenius norm of what the adapters add to the layer's weights."),
            line_chart("Gradient norm of each layer", lines("grad_norms"), x="layer", log=True,
                       note="Of the mean gradient of that step, before clipping."),
        ),
    )  # fmt: skip


def _samples(prompts: list[Record], metrics: Metrics) -> Html:
    """What the model answers to some validation prompts, the newest first."""
    parts = []
    for at, prompt in enumerate(prompts):
        answers = [(line["step"], line["samples"][at]) for line in metrics.samples if at < len(line["samples"])]
        rows = [(f"step {step:,}", pre(text)) for step, text in reversed(answers)]
        shown = table((), [("wanted", pre(mark(prompt["answer"]))), *rows[:1]])
        older = [more(f"earlier answers ({len(rows) - 1})", table((), rows[1:]))] if len(rows) > 1 else []
        parts += [paragraph(prompt["source"], "note"), pre(prompt["prompt"]), shown, *older]
    note = "The likeliest answer to some prompts of the validation rows at each evaluation, cut after a few tokens."
    return section("Sample answers", *parts, note=note)


# What it is made of.


def _memory(record: Record, metrics: Metrics) -> Html:
    plan = record["plan"]
    total = plan["total_bytes"]
    sizes = {**plan.get("groups", {}), "planned peak": total, "measured peak": peak_bytes(record, metrics)}
    longest = max(sizes.values())
    rows = [(name, megabytes(size), f"{size / total:.0%}", bar(size / longest)) for name, size in sizes.items() if size]
    if plan.get("host_bytes"):
        rows.append(("on the host besides", megabytes(plan["host_bytes"]), "", bar(0)))
    chosen = [paragraph(text, "note") for text in plan.get("choices", [])]
    note = "Every byte was laid out before the first weight was read; the measured peak is the whole process."
    return section("Memory", table(("", "size", "of the plan", ""), rows, numbers=(1, 2)), *chosen, note=note)


def _data(data: Record) -> Html:
    values: dict[str, str | tuple[str, str]] = {
        "training rows": f"{data.get('train_rows', 0):,}",
        "validation rows": f"{data.get('validation_rows', 0):,}",
        "rows read": f"{data.get('read', 0):,}",
    }
    values |= {f"left out: {reason}": f"{count:,}" for reason, count in data.get("skipped", {}).items()}
    if data.get("truncated"):
        values["truncated"] = f"{data['truncated']:,}"
    parts = [figures(values)]
    stats = [
        (label, data.get(key)) for key, label in (("lengths", "tokens of a row"), ("supervised", "of them learned"))
    ]
    rows = [
        (label, *(number(found[key]) for key in ("min", "median", "p95", "max", "total")))
        for label, found in stats
        if found
    ]
    if rows:
        parts.append(table(("", "least", "median", "95 % up to", "most", "all rows"), rows))
    histogram = data.get("histogram")
    if histogram:
        titles = (("rows", "Rows by their tokens"), ("supervised", "Rows by their learned tokens"))
        edges = [f"{edge:,}" for edge in histogram["edges"]]
        bars = ((title, list(zip(edges, histogram[key], strict=False))) for key, title in titles)
        parts.append(charts(*(bar_chart(title, heights, x="tokens, from") for title, heights in bars)))
    parts += [_finding(finding) for finding in data.get("findings", [])]
    parts += [paragraph(f"Note: {text}", "note") for text in data.get("notes", [])]
    shown = [
        pre(*(mark(part["text"]) if part["supervised"] else part["text"] for part in sample["segments"]))
        for sample in data.get("samples", [])[:2]
    ]
    if shown:
        parts.append(more("rows as the model sees them; what it learns to write is marked", *shown))
    return section("Data", *parts)


def _finding(finding: Record) -> Html:
    places = ", ".join(finding.get("places", []))
    text = f"{finding.get('text', '')}" + (f" ({places})" if places else "")
    kind = {"error": "bad", "warning": "warn"}.get(str(finding.get("severity")), "note")
    return paragraph(f"{finding.get('severity')}: {text}", kind)


def _configuration(record: Record) -> Html:
    options = record.get("options", {})
    hidden = {"resume", "override", "overwrite"}
    given = {name: options.get(name, value) for name, value in record.get("given", {}).items() if name not in hidden}
    modules = [
        (name, f"{found['modules']:,}", f"{found['parameters']:,}") for name, found in record.get("modules", {}).items()
    ]
    if modules:
        total = sum(found["parameters"] for found in record["modules"].values())
        modules.append(("all", f"{sum(found['modules'] for found in record['modules'].values()):,}", f"{total:,}"))
    return section(
        "Configuration",
        pairs({name: option_text(value) for name, value in given.items()}),
        *([more("what is trained", table(("linear", "modules", "parameters"), modules))] if modules else []),
        more("every option, defaults included", pairs({name: option_text(value) for name, value in options.items()})),
    )


def option_text(value: Any) -> str:
    """An option's value as it is shown."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def _provenance(record: Record) -> Html:
    facts = dict(record.get("machine", {}))
    facts["device"] = record.get("device")
    facts["kernels"] = f"{_text(record, 'kernels', 'name')}: {_text(record, 'kernels', 'reason')}"
    facts["threads"] = record.get("threads")
    facts |= record.get("versions", {})
    facts["model (SHA-256)"] = record.get("model_sha256")
    facts["rows (SHA-256)"] = record.get("data_sha256")
    return section("Provenance", pairs({name: value for name, value in facts.items() if value not in (None, "")}))


def peak_bytes(record: Record, metrics: Metrics) -> int:
    """The measured peak: at the end of the run, or the last one on the way; 0 where none is known."""
    measured = [line["peak_memory_bytes"] for line in metrics.layers if line.get("peak_memory_bytes")]
    return int(max([record.get("result", {}).get("peak_memory_bytes") or 0, *measured]))


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    """`2:03`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _text(record: Record, *path: str) -> str:
    found: Any = record
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return "" if found is None else str(found)
