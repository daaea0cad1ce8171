"""Several runs on one page: their list, their curves over each other, and the options that set them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quatrain.pages.charts import Point, Series, line_chart
from quatrain.pages.metrics import Metrics
from quatrain.pages.run import option_text
from quatrain.pages.shell import Content, Html, charts, page, section, table

LIST_HEAD = (
    "run", "state", "model", "data", "steps", "loss", "best evaluation", "tokens/s", "peak MB", "started",
)  # fmt: skip


def list_row(summary: Mapping[str, Any]) -> list[str]:
    """A summary of a run as the cells of a table; a dash for what is not known."""
    total = summary["total_steps"]
    best = summary["best_eval_loss"]
    return [
        summary["name"],
        summary["state"],
        summary["model"] or "–",
        ", ".join(str(path).rpartition("/")[2] for path in summary["data"]) or "–",
        f"{summary['steps']:,}" + (f"/{total:,}" if total else ""),
        _shown(summary["loss"], ".4f"),
        "–" if best is None else f"{best:.4f} at {summary['best_step']:,}",
        _shown(summary["tokens_per_s"], ",.0f"),
        "–" if summary["peak_memory_bytes"] is None else f"{summary['peak_memory_bytes'] / 1e6:,.0f}",
        summary["started"] or "–",
    ]


def runs_page(
    title: str,
    summaries: Sequence[Mapping[str, Any]],
    metrics: Sequence[Metrics],
    compared: Sequence[str],
    differences: Mapping[str, Sequence[Any]],
) -> str:
    """The page of runs whose summaries and metrics are given in the same order; `differences` are those of the runs
    named `compared`."""
    names = [str(summary["name"]) for summary in summaries]
    rows = [list_row(summary) for summary in summaries]
    parts = [section("Runs", table(LIST_HEAD, rows, numbers=(4, 5, 6, 7, 8)))]
    if differences:
        cells: list[list[Content]] = [[name, *map(option_text, values)] for name, values in differences.items()]
        parts.append(section("Options that differ", table(["", *compared], cells, numbers=())))
    losses = [found.smoothed_points("loss") for found in metrics]
    evaluations = [found.evaluation_points() for found in metrics]
    norms = [found.points("grad_norm") for found in metrics]
    speeds = [found.points("tokens_per_s") for found in metrics]
    parts.append(
        section(
            "Curves",
            charts(
                _overlaid("Loss, mean of the last steps", names, losses),
                _overlaid("Evaluation loss", names, evaluations, dots=True),
                _overlaid("Gradient norm, before clipping", names, norms, log=True),
                _overlaid("Tokens a second", names, speeds, from_zero=True),
            ),
            note="Losses compare only where runs learn and evaluate the same rows.",
        )
    )
    return page(title, *parts, subtitle=f"{len(names)} runs" if len(names) != 1 else "1 run")


def _overlaid(title: str, names: Sequence[str], lines: Sequence[Sequence[Point]], **more: Any) -> Html:
    """More runs than there are colours come again, dashed."""
    dots = more.pop("dots", False)
    series = [
        Series(name, points, at, "dashed" if at // 8 % 2 else "", dots)
        for at, (name, points) in enumerate(zip(names, lines, strict=True))
    ]
    return line_chart(title, series, **more)


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
