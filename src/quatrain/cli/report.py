"""The data report in the terminal: a few lines before training, all of it for `quatrain check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from quatrain.cli.console import block, columns, count, several

if TYPE_CHECKING:
    from rich.console import Console

    from quatrain.data.findings import Finding, Severity
    from quatrain.data.pipeline import Prepared
    from quatrain.data.report import DataReport, Histogram, Stats

SEVERITY_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_BAR = 18  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    found = all_findings(prepared)
    if found:
        kinds = ", ".join(f"{finding.kind} ({count(finding.count)})" for finding in found)
        lines.append(f"{severities(found)}: {kinds}; `quatrain check` shows where")
    return lines + report.notes


def all_findings(prepared: Prepared) -> list[Finding]:
    """Those of the training rows, then those of a validation file."""
    more = prepared.validation_report.findings if prepared.validation_report is not None else []
    return [*prepared.report.findings, *more]


def severities(found: Sequence[Finding]) -> str:
    """`1 warning, 2 notes`."""
    counts = Counter(finding.severity for finding in found)
    return ", ".join(several(counts[severity], severity) for severity in SEVERITY_STYLES if counts[severity])


def full(console: Console, prepared: Prepared) -> None:
    """Everything `quatrain check` has to say about the rows, but for the samples."""
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
        if report.histogram:
            block(console, "lengths", _bars(report.histogram, report))
        if len(report.would_fit) > 1:
            fits = [[count(limit), count(rows)] for limit, rows in report.would_fit.items()]
            block(console, "limits", columns([["max_seq_len", "rows that fit"], *fits]))
        if report.token_counts:
            rows = [[what, count(number)] for what, number in report.token_counts.items()]
            block(console, "begin, end", columns([["rows that", ""], *rows]))
        if report.notes:
            block(console, "notes", report.notes)
        _findings(console, report)
    if prepared.validation:
        block(
            console,
            "split",
            [f"{several(len(prepared.train), 'row')} to train on, {count(len(prepared.validation))} held out"],
        )
    if prepared.notices:
        block(console, "cache", [line.removeprefix("cache ") for line in prepared.notices])


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


def _bars(histogram: Histogram, report: DataReport) -> list[str]:
    """A line for each range of lengths, with a bar for the rows of that length and one for those that learn as much;
    the limit is marked where it stands."""
    from quatrain.data.encode import NOTHING_LEFT, TOO_LONG

    edges = histogram.edges
    most = max(*histogram.rows, *histogram.supervised)
    labels = [f"{count(low)}-{count(high - 1)}" for low, high in pairwise(edges)]
    width, wide = max(6, *map(len, labels)), len(count(most))
    lines = [f"{'tokens':>{width}}  {'rows':<{wide + 1 + _BAR}}  learned tokens"]
    longer = report.skipped.get(TOO_LONG, 0) + report.skipped.get(NOTHING_LEFT, 0) + report.truncated
    limit = f"{'':>{width}}  ── max_seq_len {count(report.max_seq_len)}: {several(longer, 'row')} longer ──"
    numbers = zip(histogram.rows, histogram.supervised, strict=True)
    for label, (low, high), pair in zip(labels, pairwise(edges), numbers, strict=True):
        bars = (f"{count(number):>{wide}} {_bar(number, most):<{_BAR}}" for number in pair)
        lines.append(f"{label:>{width}}  {'  '.join(bars)}".rstrip())
        if low <= report.max_seq_len < high:
            lines.append(limit)
    if report.max_seq_len >= edges[-1]:
        lines.append(limit)
    return lines


def _bar(number: int, most: int) -> str:
    """A bar whose length is exact to an eighth of a character; what is not nothing shows."""
    eighths = max(round(8 * _BAR * number / most), 1 if number else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _findings(console: Console, report: DataReport) -> None:
    from quatrain.data.findings import KINDS

    if not report.used:
        block(console, "findings", ["there is no row to look at"])
    elif not report.findings:
        block(console, "findings", ["nothing looks wrong"], "bold green")
    for found in report.findings:
        lines = [f"{found.kind}: {found.text}", *(f"  {place}" for place in found.places)]
        if found.count > len(found.places):
            lines.append(f"  and {count(found.count - len(found.places))} more")
        block(console, found.severity, [*lines, f"→ {KINDS[found.kind].advice}"], SEVERITY_STYLES[found.severity])
