"""The data report in the terminal: a few lines before training, all of it for `quatrain check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quatrain.cli.console import block, columns, count, several

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.data.pipeline import Prepared
    from quatrain.data.report import DataReport, Sample, Stats

_OPEN, _CLOSE = "[[", "]]"  # marks the learned part where there are no colours


def short_lines(prepared: Prepared) -> list[str]:
    """What a run shows before its first step."""
    report = prepared.report
    lines = [_totals(report), *_skipped(report)]
    if report.lengths and report.supervised:
        learned = report.supervised.total / report.lengths.total
        lines.append(
            f"{count(report.lengths.total)} tokens, {count(report.supervised.total)} of them learned ({learned:.0%}); "
            f"rows of {report.lengths.min} to {report.lengths.max} tokens"
        )
    if report.validation_rows:
        lines.append(f"{several(report.train_rows, 'row')} to train on, {count(report.validation_rows)} held out")
    lines += _sources(report)
    if prepared.validation_report is not None:
        lines.append("validation file: " + _totals(prepared.validation_report))
        lines += _skipped(prepared.validation_report)
    return lines + report.notes


def full(console: Console, prepared: Prepared) -> None:
    """Everything `quatrain check` has to say."""
    reports = [("", prepared.report)]
    if prepared.validation_report is not None:
        reports.append(("validation", prepared.validation_report))
    for title, report in reports:
        block(console, title or "files", report.files)
        block(console, "template", [report.template])
        block(console, "rows", [_totals(report), *_skipped(report, places=True)])
        if report.schemas:
            block(console, "schemas", [", ".join(f"{name} {count(number)}" for name, number in report.schemas.items())])
        if report.lengths and report.supervised:
            head = ["", "min", "median", "mean", "p95", "max", "total"]
            block(console, "tokens", columns([head, _row("a row", report.lengths), _row("learned", report.supervised)]))
        if title == "" and (lines := _sources(report)):
            block(console, "sources", lines)
        if report.notes:
            block(console, "notes", report.notes)
    if prepared.validation:
        block(
            console,
            "split",
            [f"{several(len(prepared.train), 'row')} to train on, {count(len(prepared.validation))} held out"],
        )
    if prepared.notices:
        block(console, "cache", prepared.notices)
    for sample in prepared.report.samples:
        _sample(console, sample)


def _totals(report: DataReport) -> str:
    truncated = f", {count(report.truncated)} of them cut short" if report.truncated else ""
    skipped = count(report.read - report.used)
    return f"{several(report.read, 'row')} read, {count(report.used)} used{truncated}, {skipped} skipped"


def _sources(report: DataReport) -> list[str]:
    """What an epoch takes of each entry of `data`, where that is not simply all of one."""
    if all(source.weight == 1 for source in report.sources) and len(report.sources) == 1:
        return []
    return [
        f"{source.name}: {several(source.train, 'row')}"
        + (f", weight {source.weight:g}: {count(source.epoch)} an epoch" if source.weight != 1 else "")
        for source in report.sources
    ]


def _skipped(report: DataReport, places: bool = False) -> list[str]:
    lines = []
    for reason, number in sorted(report.skipped.items(), key=lambda item: -item[1]):
        lines.append(f"skipped {count(number)} ({number / report.read:.0%}): {reason}")
        if places:
            shown = report.skipped_at.get(reason, [])
            lines += [f"  {place}" for place in shown]
            if number > len(shown):
                lines.append(f"  and {count(number - len(shown))} more")
    return lines


def _row(name: str, stats: Stats) -> list[str]:
    numbers = (stats.min, stats.median, stats.mean, stats.p95, stats.max, stats.total)
    return [name, *(f"{number:,.1f}".removesuffix(".0") for number in numbers)]


def _sample(console: Console, sample: Sample) -> None:
    """The decoded row; what the model learns to write is green, or in [[ ]] where there are no colours."""
    from rich.text import Text

    coloured = console.is_terminal and console.color_system is not None
    text = Text()
    for segment in sample.segments:
        if not segment.supervised:
            text.append(segment.text, "dim" if coloured else None)
        elif coloured:
            text.append(segment.text, "bold green")
        else:
            text.append(f"{_OPEN}{segment.text}{_CLOSE}")
    learned = "what is learned is green" if coloured else f"what is learned is in {_OPEN} {_CLOSE}"
    console.print()
    block(console, "sample", [f"{sample.source} ({learned})"])
    console.print(text, soft_wrap=True)
