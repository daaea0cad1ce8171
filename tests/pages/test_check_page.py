"""The page of `quatrain check --html`: complete, self-contained, and safe with any text in the data."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from data.toys import byte_level, chat, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.pipeline import examine
from quatrain.pages.check import render

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=y> \u202eesrever \x00\x1b[31m \ud83d & &amp; "\'>'


class Page(HTMLParser):
    """Tags, the texts inside samples, and what the tokens of samples say of themselves."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tokens: list[tuple[str, str]] = []  # title, class
        self.texts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        given = dict(attrs)
        if tag == "pre":
            self.inside = True
        if tag == "span" and self.inside:
            self.tokens.append((given["title"] or "", given.get("class") or ""))
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data


def page_of(folder: Path, *rows: object, **options: object) -> str:
    path = write_jsonl(folder / "rows.jsonl", *rows)
    prepared = examine([path], DataOptions(**options), byte_level(), max_seq_len=600)  # type: ignore[arg-type]
    return render(prepared, "a model")


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "<b>rows & more.jsonl"
    rows = [{"messages": chat(HOSTILE, HOSTILE), "<i>": 1}, {"messages": chat("a", "")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = render(examine([path], DataOptions(), byte_level(), max_seq_len=999), "<u>model</u>")
    page = Page(text)
    assert not set(page.names) & {"script", "img", "b", "i", "u"}
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", text)
    shown = "".join(page.texts)
    assert '</script><script>alert("x")' in shown and "\\u202eesrever \\u0000\\u001b[31m \ufffd & &amp;" in shown
    text.encode("utf-8")


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = page_of(tmp_path, {"prompt": "a", "completion": "b"})
    assert not re.search(r"https?:|url\(|@import|src=|<link|<script", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and "max_seq_len" in text


def test_samples_show_every_token_and_what_is_learned(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, {"messages": chat("q\n", "aé", "r", "b")}))
    assert "".join(page.texts) == (
        "<|im_start|>user⏎\nq⏎\n<|im_end|>⏎\n<|im_start|>assistant⏎\naé<|im_end|>⏎\n"
        "<|im_start|>user⏎\nr<|im_end|>⏎\n<|im_start|>assistant⏎\nb<|im_end|>⏎\n"
    )
    learned = [text for text, (_, kind) in zip(page.texts, page.tokens, strict=True) if "learned" in kind]
    assert "".join(learned) == "aé<|im_end|>b<|im_end|>"
    special = {text for text, (_, kind) in zip(page.texts, page.tokens, strict=True) if "special" in kind}
    assert special == {"<|im_start|>", "<|im_end|>"}
    assert page.tokens[0][0] == "token 0: id 256, label -100, only read"
    assert [title for title, kind in page.tokens if "learned" in kind][-1].endswith("id 257, label 257, learned")


def test_the_verdict_and_what_it_rests_on(tmp_path: Path) -> None:
    good = [{"prompt": f"What is {word}?", "completion": f"{word} it is."} for word in ("up", "down", "left")]
    assert "ready to train on" in page_of(tmp_path, *good)
    warned = page_of(tmp_path, *good, good[0])
    assert (
        "look at the warnings" in warned and "rows.jsonl:4: see" in warned and "What to do: leave the copies" in warned
    )
    refused = page_of(tmp_path, *({"prompt": f"<|im_start|>user\n{row['prompt']}", "completion": "a"} for row in good))
    assert "cannot be trained on" in refused and "Training would refuse these rows: " in refused


def test_what_is_left_out_is_shown_with_places_and_limits(tmp_path: Path) -> None:
    text = page_of(
        tmp_path, {"prompt": "q", "completion": "a"}, {"prompt": "q" * 700, "completion": "a"}, max_unsupervised=1.0
    )
    for part in (
        "longer than max_seq_len", "1 of 2 rows (50%) left out", "rows.jsonl:2: 7", "1,200", "&gt; 600",
        "the last bar shows the rows that are longer (1) and left out",
    ):  # fmt: skip
        assert part in text


def test_a_phone_needs_no_scrolling_to_the_side(tmp_path: Path) -> None:
    """In a real browser, in a frame of a phone's width, with long names and long words."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    folder = tmp_path / ("long-name-" * 12)
    folder.mkdir()
    row = {"prompt": "q" * 300, "completion": "a\ufffd" * 100}
    text = page_of(folder, row, row, {"prompt": "q" * 900, "completion": "a"}, max_unsupervised=1.0)
    frame = tmp_path / "frame.html"
    measure = "document.title = 'width ' + this.contentDocument.documentElement.scrollWidth"
    frame.write_text(f'<iframe width="360" srcdoc="{html.escape(text)}" onload="{measure}"></iframe>', encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    done = subprocess.run([browser, *words, frame.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>width (\d+)</title>", done.stdout)
    assert found is not None, done.stderr
    assert int(found[1]) <= 360
