"""The page of `quatrain check --html`: what a run would read, for someone who has never seen it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quatrain.data.encode import TOO_LONG
from quatrain.data.findings import KINDS, escape
from quatrain.data.row import IGNORE
from quatrain.pages.charts import bar_chart, number
from quatrain.pages.shell import Html, charts, figures, join, more, page, paragraph, section, status, table, tag

if TYPE_CHECKING:
    from quatrain.data.findings import Finding
    from quatrain.data.pipeline import Prepared
    from quatrain.data.report import DataReport, Histogram, Sample, SampleToken, SourceRows

_PILLS = {"error": "bad", "warning": "warn", "note": ""}
# The learned part is underlined and bold besides its colour, special tokens are framed, and neighbouring tokens differ
# in a thin line between them: all of it can be told without colours.
_STYLE = Html(
    ".tokens { line-height: 1.9 }"
    ".tokens span { border-right: 1px dotted var(--muted); padding: .05rem 0 }"
    ".tokens .learned { background: var(--mark); font-weight: 600; text-decoration: underline var(--good) 2px;"
    " text-underline-offset: .25em }"
    ".tokens .special { border: 1px solid var(--muted); border-radius: .25rem; padding: 0 .2rem; margin: 0 1px;"
    " color: var(--c3) }"
    ".tokens span:hover, .tokens span:focus { outline: 2px solid var(--c0) }"
    '.tokens span:focus::after { content: " " attr(title) " "; color: var(--c0); font-weight: 400 }'
    ".refused { margin-top: 1rem } .scroll { margin-bottom: .6rem }"
    ".places { margin: .1rem 0 .2rem; padding-left: 1.1rem; font-size: .88rem; overflow-wrap: anywhere }"
    ".finding { margin: 0 0 .9rem } .finding p { margin: 0 0 .15rem }"
)
_INVISIBLE = {"\n": "⏎\n", "\t": "⇥\t"}


def render(prepared: Prepared, model: str) -> str:
    """The whole document. The shell escapes the texts of the data; what cannot be seen in them is written out here."""
    reports = [("", prepared.report)]
    if prepared.validation_report is not None:
        reports.append((" of the validation file", prepared.validation_report))
    sections = [tag("style", _STYLE), _verdict(prepared)]
    for title, report in reports:
        sections += [_totals(report, title), _findings(report, title), _lengths(report, title)]
    sections.append(_samples(prepared.report.samples))
    files = ", ".join(prepared.report.files)
    return page("Data check", *sections, status=_status(prepared), subtitle=f"{files} · read for {model}")


def _status(prepared: Prepared) -> Html:
    findings = _all_findings(prepared)
    if prepared.problem is not None:
        return status("cannot be trained on", "bad")
    if any(found.severity != "note" for found in findings):
        return status("look at the warnings", "warn")
    return status("ready to train on", "good")


def _all_findings(prepared: Prepared) -> list[Finding]:
    validation = prepared.validation_report
    return [*prepared.report.findings, *(validation.findings if validation is not None else [])]


def _verdict(prepared: Prepared) -> Html:
    report = prepared.report
    tiles: dict[str, str | tuple[str, str]] = {
        "rows read": f"{report.read:,}",
        "rows used": (f"{report.used:,}", f"{report.read - report.used:,} skipped"),
    }
    if report.lengths and report.supervised:
        share = report.supervised.total / report.lengths.total
        tiles["tokens"] = (f"{report.lengths.total:,}", f"{report.supervised.total:,} learned ({share:.0%})")
        tiles["longest row"] = (f"{report.lengths.max:,}", f"limit (max_seq_len) {report.max_seq_len:,}")
    if prepared.validation:
        tiles["training rows"] = (f"{len(prepared.train):,}", f"{len(prepared.validation):,} held out")
    tiles["chat template"] = report.template
    parts = [figures(tiles)]
    if prepared.problem is not None:
        first_line = str(prepared.problem).splitlines()[0]  # the rest are places, which stand below
        parts.append(tag("p", tag("strong", "Training would refuse these rows: "), first_line, class_="bad refused"))
        if prepared.problem.hint:
            parts.append(paragraph(f"Try: {prepared.problem.hint}"))
    note = (
        "A model reads text in tokens. Of each row it learns to write the answer, and only reads the rest. "
        "This page shows what it would read and learn from these files, before any training."
    )
    return section("At a glance", *parts, note=note)


def _totals(report: DataReport, title: str) -> Html:
    parts: list[Html] = []
    if not report.skipped:
        parts.append(paragraph("Every row is used."))
    for reason, count in sorted(report.skipped.items(), key=lambda item: -item[1]):
        head = tag(
            "p", tag("strong", reason), f": {count:,} of {report.read:,} rows ({count / report.read:.0%}) left out"
        )
        parts.append(tag("div", head, _places(report.skipped_at.get(reason, []), count), class_="finding"))
    if report.truncated:
        parts.append(paragraph(f"{report.truncated:,} rows are cut at max_seq_len and lose their end."))
    if len(report.would_fit) > 1:
        fits = [(f"{limit:,}", f"{rows:,}") for limit, rows in report.would_fit.items()]
        parts.append(paragraph("Rows that fit whole, by max_seq_len (longer ones need more memory and time):"))
        parts.append(table(["max_seq_len", "rows"], fits))
    if len(report.sources) > 1 or any(source.weight != 1 for source in report.sources):
        parts.append(paragraph("What an epoch takes of the data:"))
        parts.append(tag("ul", *map(_source, report.sources), class_="places"))
    if report.schemas:
        kinds = ", ".join(f"{name} ({count:,})" for name, count in report.schemas.items())
        parts.append(paragraph(f"Forms of the rows: {kinds}"))
    parts += [paragraph(text) for text in report.notes]
    return section(f"Rows{title}", *parts)


def _source(source: SourceRows) -> Html:
    weight = f", weight {source.weight:g}" if source.weight != 1 else ""
    return tag("li", f"{source.name}: {source.epoch:,} of its {source.train:,} training rows{weight}")


def _findings(report: DataReport, title: str) -> Html:
    if not report.findings:
        seen = "Nothing looks wrong." if report.used else "There is no row to look at."
        return section(f"Findings{title}", paragraph(seen))
    note = (
        "Guesses about what may be wrong, the worst first. An error stops training; a warning is worth a look before "
        "it; a note is often right as it is."
    )
    return section(f"Findings{title}", *map(_finding, report.findings), note=note)


def _finding(found: Finding) -> Html:
    head = tag("p", status(found.severity, _PILLS[found.severity]), " ", tag("strong", found.kind), ": ", found.text)
    advice = paragraph(f"What to do: {KINDS[found.kind].advice}.", "muted")
    return tag("div", head, _places(found.places, found.count), advice, class_="finding")


def _places(places: Iterable[str], count: int) -> Html:
    shown = list(places)
    items = [tag("li", _written_out(place)) for place in shown]
    if count > len(shown):
        items.append(tag("li", f"and {count - len(shown):,} more", class_="muted"))
    return tag("ul", *items, class_="places")


def _lengths(report: DataReport, title: str) -> Html:
    parts: list[Html] = []
    if report.histogram is not None:
        longer = report.skipped.get(TOO_LONG, 0)
        parts.append(charts(*_histograms(report.histogram, report.max_seq_len, longer)))
    if report.lengths and report.supervised:
        rows = [
            (name, *(number(value) for value in (s.min, s.median, round(s.mean, 1), s.p95, s.max, s.total)))
            for name, s in (("a row", report.lengths), ("learned", report.supervised))
        ]
        parts.append(table(["tokens", "least", "median", "mean", "95% have at most", "most", "total"], rows))
    if report.token_counts:
        counts = [(f"rows that {what}", f"{count:,}") for what, count in report.token_counts.items()]
        parts.append(more("How rows begin and end", table((), counts, numbers=(1,)), _ABOUT_ENDS))
    return section(f"Lengths{title}", *parts, note="In tokens. Long rows cost time; learned tokens are what teaches.")


_ABOUT_ENDS = paragraph(
    "BOS is the token that some models expect once at the very beginning. The end token is what makes a model stop: "
    "it must be learned behind every answer.",
    "note",
)


def _histograms(histogram: Histogram, max_seq_len: int, longer: int) -> Iterable[Html]:
    rows, learned = (
        [(f"{low:,}", number) for low, number in zip(histogram.edges, counts, strict=False)]
        for counts in (histogram.rows, histogram.supervised)
    )
    limit = f"The limit, max_seq_len, is {max_seq_len:,}: "
    if longer:
        rows.append((f"> {max_seq_len:,}", longer))
        limit += f"the last bar shows the rows that are longer ({longer:,}) and left out."
    else:
        limit += "no row is left out for it."
    yield bar_chart("Rows by length", rows, x="tokens, from", note=limit)
    yield bar_chart("Rows by learned tokens", learned, x="tokens, from")


def _samples(samples: Iterable[Sample]) -> Html:
    legend = tag(
        "p",
        "How to read them: ",
        tag("span", tag("span", "learned", class_="learned"), class_="tokens"),
        " is what the model learns to write (shaded, bold, underlined); the rest it only reads. ",
        tag("span", tag("span", "<|special|>", class_="special"), class_="tokens"),
        " is a special token, such as the one that ends an answer. Dotted lines stand between tokens; point at one, or "
        "tap it, to see its number. ⏎ is a line end.",
    )
    rows = [join(tag("h3", _written_out(sample.source)), _tokens(sample)) for sample in samples]
    return section("Samples", legend, *rows)


def _tokens(sample: Sample) -> Html:
    """A span for each token; tokens without a text of their own (a character in several pieces) join the next one."""
    return tag("pre", *(_token(at, token) for at, token in enumerate(sample.tokens)), class_="tokens")


def _token(at: int, token: SampleToken) -> Html:
    what = f"label {token.id}, learned" if token.supervised else f"label {IGNORE}, only read"
    names = [name for name, yes in (("learned", token.supervised), ("special", token.special)) if yes]
    title = f"token {at}: id {token.id}, {what}"
    return tag("span", _written_out(token.text, _INVISIBLE), title=title, class_=" ".join(names) or None, tabindex=-1)


def _written_out(text: str, signs: dict[str, str] | None = None) -> str:
    """`text` with control and direction characters as escapes, and those of `signs` as they say."""
    known = signs or {}
    return "".join(known.get(c, c if c.isprintable() else escape(c)) for c in text)
