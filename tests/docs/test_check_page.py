"""docs/check.md names every finding as the program does."""

from __future__ import annotations

import re
from pathlib import Path

from quatrain.data.findings import KINDS


def share(value: float) -> str:
    return "" if value > 1 else "one row" if value == 0 else f"{100 * value:g}%"


def test_every_finding_is_explained(root: Path) -> None:
    page = (root / "docs" / "check.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([a-z0-9-]+)` \| ", page.partition("## The findings")[2], re.MULTILINE)
    assert table == list(KINDS)
    for kind, rules in KINDS.items():
        shares = f"{share(rules.warning_from)} | {share(rules.error_from)}"
        assert f"| `{kind}` | {rules.says} | {rules.advice} | {shares} |\n" in page, kind
