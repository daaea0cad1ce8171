"""The page shell: escaping, self-containment, charts."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

from quatrain.pages.charts import Series, bar_chart, line_chart, number, smoothed, thinned
from quatrain.pages.shell import charts, figures, legend, mark, more, page, pairs, pre, section, status, table, tag

HOSTILE = '<script>alert("x")</script> & \x00 \ud800 <img src=http://a.b/c>'


class Balanced(HTMLParser):
    """Counts the elements and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(name)
        self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)


def everything(text: str) -> str:
    chart = line_chart(text, [Series(text, [(1, 2.0), (2, 1.0)]), Series(text, [(1, 1.0)])], x=text, note=text)
    return page(
        text,
        section(text, figures({text: text, "b": (text, text)}), table([text, text], [[text, text]]), note=text),
        section(text, pairs({text: text}), more(text, pre(text, mark(text)))),
        section(text, charts(chart, bar_chart(text, [(text, 1)]))),
        section(text, legend([(text, 0, "dashed")])),
        status=status(text, "good"), subtitle=text, refresh=5,
    )  # fmt: skip


def test_every_piece_escapes_what_it_is_given() -> None:
    text = everything(HOSTILE)
    seen = Balanced(text).seen
    assert "script" not in seen and "img" not in seen
    assert text.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 20
    text.encode()  # a lone surrogate was replaced
    assert "\x00" not in text


def test_a_page_fetches_nothing() -> None:
    text = everything("a")
    assert not re.search(r"https?:|url\(|@import|src=|<link|<script", text)
    assert '<meta http-equiv="refresh" content="5"/>' in text and 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_attribute_values_are_escaped_and_absent_ones_left_out() -> None:
    assert tag("td", None, 1, class_='"x', hidden=False, aria_label=None) == '<td class="&quot;x">–1</td>'


def test_numbers_stand_right_in_a_table_and_texts_do_not() -> None:
    assert table(["a", "b"], [["x", "1,000"], ["y", None]]).count('class="number"') == 3
    assert 'class="number"' not in table(["a", "b"], [["x", "one"], ["y", 2]])


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot() -> None:
    points = [(1, 1.0), (2, None), (3, math.nan), (4, 2.0), (5, 3.0)]
    drawn = line_chart("loss", [Series("loss", points)])
    path = re.search(r'd="([^"]+)"', drawn)
    assert path and path[1].count("M") == 2 and path[1].count("L") == 1
    assert drawn.count("<circle") == 1
    assert Balanced(drawn).titles == ["step 1\nloss: 1", "step 4\nloss: 2", "step 5\nloss: 3"]
    assert "nan" not in drawn


def test_a_log_chart_has_decades_and_no_room_for_zero() -> None:
    drawn = line_chart("norm", [Series("norm", [(1, 0.0), (2, 0.03), (3, 40.0)])], log=True)
    ticks = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert ticks == ["0.01", "0.1", "1", "10", "100"]
    assert Balanced(drawn).titles[0].startswith("step 2")


def test_ticks_are_round_and_enclose_the_values() -> None:
    drawn = line_chart("loss", [Series("loss", [(0, 0.37), (37, 2.61)])])
    assert re.findall(r'text-anchor="end">([^<]+)<', drawn) == ["0", "0.5", "1", "1.5", "2", "2.5", "3"]
    assert re.findall(r'text-anchor="middle">([^<]+)<', drawn) == ["0", "10", "20", "30", "step"]


def test_one_value_and_none_are_charts_too() -> None:
    assert "<svg" in line_chart("a", [Series("a", [(3, 2.0)])])
    assert "no value yet" in line_chart("a", [Series("a", [(3, None)])])
    assert "no value yet" in bar_chart("a", [])


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    points: list[tuple[float, float | None]] = [(i, 1.0) for i in range(10_000)]
    points[5_001], points[7_003] = (5_001, 9.0), (7_003, None)
    kept = thinned(points, 100)
    assert len(kept) <= 104
    assert (5_001, 9.0) in kept and (7_003, None) in kept and kept[-1] == points[-1]
    assert kept == sorted(kept, key=lambda point: point[0])


def test_smoothing_is_the_mean_of_the_last_points() -> None:
    assert smoothed([(1, 2.0), (2, None), (3, 4.0), (4, 8.0)]) == [(1, 2.0), (2, 2.0), (3, 3.0), (4, 6.0)]


def test_bars_are_as_high_as_their_value() -> None:
    drawn = bar_chart("lengths", [("0-9", 5), ("10-19", 10), ("20-29", 0)])
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" style', drawn)]
    assert heights[1] > 0 and abs(heights[1] - 2 * heights[0]) < 0.2 and heights[2] == 0


def test_numbers_are_short() -> None:
    assert [number(v) for v in (3.0, 1234567.0, 12.3456, 0.0002, 3.1e-7, 1234.5)] == [
        "3", "1,234,567", "12.35", "0.0002", "3.1e-07", "1,234",
    ]  # fmt: skip
