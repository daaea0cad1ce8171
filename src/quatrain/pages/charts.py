"""Charts as inline SVG: lines and bars. Values that are None or not finite leave a gap; a tooltip is the `<title>` of
an invisible strip, so no script is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quatrain.pages.shell import COLOURS, Html, legend, tag

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 34
MOST_POINTS = 400  # of a line: more than there are pixels
MOST_STRIPS = 120  # tooltips

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """A line: `points` by rising x. `style` is `faint`, `dashed` or nothing; `dots` marks each point."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """Values to pixels between `start` and `end`, with the ticks to draw."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(value) if self.log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def line_chart(
    title: str, series: Sequence[Series], *, x: str = "step", log: bool = False, from_zero: bool = False, note: str = ""
) -> Html:
    """Series over a common x. `log` leaves out what is not positive; a chart without a value says so."""
    shown = [(line, thinned(_drawable(line.points, log))) for line in series]
    xs = [at for _, points in shown for at, value in points if value is not None]
    ys = [value for _, points in shown for _, value in points if value is not None]
    caption = tag("h3", title)
    if not ys:
        return tag("figure", caption, tag("figcaption", "no value yet"))
    low, high = _spread(min(xs), max(xs), whole=True)
    across = Axis(low, high, LEFT, WIDTH - RIGHT, _ticks(low, high, 6, whole=True))
    up = _vertical(min(0.0, *ys) if from_zero else min(ys), max(ys), log)
    drawing = tag(
        "svg", *_grid(across, up, x), *(part for line, points in shown for part in _line(line, points, across, up)),
        *_strips(shown, across, x), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title,
    )  # fmt: skip
    below = [legend([(line.name, line.colour, line.style) for line in series])] if len(series) > 1 else []
    if note:
        below.append(tag("figcaption", note))
    return tag("figure", caption, drawing, *below)


def bar_chart(title: str, bars: Sequence[tuple[str, float]], *, x: str = "", note: str = "") -> Html:
    """Upright bars with a label each, such as a histogram; labels are thinned where they would touch."""
    caption = tag("h3", title)
    if not bars:
        return tag("figure", caption, tag("figcaption", "no value yet"))
    up = _vertical(0.0, max(0.0, *(height for _, height in bars)) or 1.0, log=False)
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    every = max(1, math.ceil(max(len(label) for label, _ in bars) * 7 / step))
    drawn: list[Html] = []
    for at, (label, height) in enumerate(bars):
        left, top = LEFT + at * step, up(max(0.0, height))
        drawn.append(
            tag("rect", x=_px(left + step * 0.06), y=_px(top), width=_px(step * 0.88), height=_px(up(0.0) - top),
                style="fill: var(--c0)")
        )  # fmt: skip
        if at % every == 0:
            drawn.append(tag("text", label, x=_px(left + step / 2), y=HEIGHT - BOTTOM + 15, text_anchor="middle"))
        hit = tag("title", f"{label}: {number(height)}")
        drawn.append(tag("rect", hit, x=_px(left), y=TOP, width=_px(step), height=HEIGHT - TOP - BOTTOM, class_="hit"))
    drawing = tag(
        "svg", *_grid(None, up, x), *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title
    )  # fmt: skip
    return tag("figure", caption, drawing, *((tag("figcaption", note),) if note else ()))


def number(value: float) -> str:
    """Four significant digits, without noise: `1,234,567`, `12.35`, `0.0002`, `3.1e-07`."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points that draw the same line: the lowest and highest of each stretch, its gaps, and both
    ends."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) * 2 / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        values = [(value, at) for at, (_, value) in enumerate(stretch) if value is not None]
        gap = next((at for at, (_, value) in enumerate(stretch) if value is None), None)
        chosen = {min(values)[1], max(values)[1]} if values else set()
        kept += [stretch[at] for at in sorted(chosen | ({gap} if gap is not None else set()))]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def smoothed(points: Sequence[Point], most: int = 20) -> list[Point]:
    """The mean of the last few points at each one: a twentieth of all, at least 2 and at most `most`. Gaps count as no
    point."""
    window = max(2, min(most, len(points) // 20))
    result: list[Point] = []
    recent: list[float] = []
    for at, value in points:
        if value is not None:
            recent = [*recent[1 - window :], value]
        result.append((at, sum(recent) / len(recent) if recent else None))
    return result


def _drawable(points: Sequence[Point], log: bool) -> list[Point]:
    return [
        (at, value if value is not None and math.isfinite(value) and (value > 0 or not log) else None)
        for at, value in points
    ]


def _vertical(low: float, high: float, log: bool) -> Axis:
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        high = high if high > low else low * 10
        decades = round(math.log10(high / low))
        every = max(1, decades // 5)
        ticks = tuple(low * 10.0**power for power in range(0, decades + 1, every))
    else:
        low, high = _spread(low, high)
        ticks = _ticks(low, high, 5)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    return Axis(low, high, HEIGHT - BOTTOM, TOP, ticks, log)


def _spread(low: float, high: float, whole: bool = False) -> tuple[float, float]:
    """A range that is not empty."""
    if high > low:
        return low, high
    room = 1.0 if whole else abs(high) * 0.1 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, about: int, whole: bool = False) -> tuple[float, ...]:
    """Round numbers 1, 2 or 5 times a power of ten apart, inside the range or one step around it for `whole` False."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step), math.ceil(high / step)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def _grid(across: Axis | None, up: Axis, x: str) -> Iterator[Html]:
    floor = HEIGHT - BOTTOM
    for value in up.ticks:
        y = _px(up(value))
        yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield tag("text", number(value), x=LEFT - 6, y=_px(up(value) + 4), text_anchor="end")
    if across is not None:
        for value in across.ticks:
            yield tag("text", number(value), x=_px(across(value)), y=floor + 15, text_anchor="middle")
    yield tag("text", x, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 3, text_anchor="middle")


def _line(line: Series, points: Sequence[Point], across: Axis, up: Axis) -> Iterator[Html]:
    colour = f"var(--c{line.colour % COLOURS})"
    commands, pen_down = [], False
    alone: list[Point] = []
    for index, (at, value) in enumerate(points):
        if value is not None:
            commands.append(f"{'L' if pen_down else 'M'}{_px(across(at))} {_px(up(value))}")
            after = points[index + 1][1] if index + 1 < len(points) else None
            if line.dots or (not pen_down and after is None):
                alone.append((at, value))  # a line of one point would not be seen
        pen_down = value is not None
    yield tag("path", d=" ".join(commands), class_=f"series {line.style}".strip(), style=f"stroke: {colour}")
    for at, value in alone:
        if value is not None:
            yield tag("circle", cx=_px(across(at)), cy=_px(up(value)), r=2.5, style=f"fill: {colour}")


def _strips(shown: Sequence[tuple[Series, list[Point]]], across: Axis, x: str) -> Iterator[Html]:
    """Invisible strips from the middle between two places to the next, each with what the lines are at its place."""
    values = [(line.name, {at: value for at, value in points if value is not None}) for line, points in shown]
    places = sorted({at for _, known in values for at in known})
    if len(places) > MOST_STRIPS:
        places = places[:: math.ceil(len(places) / MOST_STRIPS)]

    def between(a: int, b: int) -> float:
        return (across(places[a]) + across(places[b])) / 2

    for index, at in enumerate(places):
        left = between(index - 1, index) if index else LEFT
        right = between(index, index + 1) if index + 1 < len(places) else WIDTH - RIGHT
        text = "\n".join([f"{x} {number(at)}", *(f"{name}: {number(v[at])}" for name, v in values if at in v)])
        yield tag(
            "rect", tag("title", text), x=_px(left), y=TOP, width=_px(max(0.5, right - left)),
            height=HEIGHT - TOP - BOTTOM, class_="hit",
        )  # fmt: skip


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
