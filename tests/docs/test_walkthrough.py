"""The walkthrough is true to the code: every file and name it quotes exists."""

from __future__ import annotations

import re
from pathlib import Path

_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w/]+\.(?:py|h)")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_NOT_NAMES = {"hidden.l", "hidden.l+1", "u", "f", "r"}


def quoted(text: str) -> set[str]:
    return set(_CODE.findall(text))


def missing(quotes: set[str], root: Path) -> list[str]:
    """The quoted files and names that do not exist under src/quatrain (headers: under native/src)."""
    package = root / "src" / "quatrain"
    sources = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    words = set(re.findall(r"\w+", sources))
    gone = []
    for quote in sorted(quotes - _NOT_NAMES):
        if _FILE.fullmatch(quote):
            if not (package / quote).is_file() and not (root / "native" / "src" / quote).is_file():
                gone.append(quote)
        elif _NAME.fullmatch(quote) and not all(part in words for part in quote.split(".") if not part.isdigit()):
            gone.append(quote)
    return gone


def test_every_quoted_name_and_file_exists(root: Path) -> None:
    quotes = quoted((root / "docs" / "walkthrough.md").read_text())
    assert len([q for q in quotes if _NAME.fullmatch(q)]) > 40
    assert len([q for q in quotes if _FILE.fullmatch(q)]) >= 6
    assert missing(quotes, root) == []


def test_a_stale_name_or_file_is_found(root: Path) -> None:
    assert missing({"block_sideways", "model/blocks.py", "Optimizer.end_step"}, root) == [
        "block_sideways",
        "model/blocks.py",
    ]


def test_the_order_is_loop_block_op(root: Path) -> None:
    text = (root / "docs" / "walkthrough.md").read_text()
    places = [text.index(f"## {title}") for title in ("The loop", "The block", "The op", "The update")]
    assert places == sorted(places)
