"""docs/cases.md is true: every test it names exists and names the class in turn; a class without a test says why."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.*) \| ([^|]*) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def sources(path: Path) -> dict[str, str]:
    """The lines of each function of a file, comments included."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in functions}


def problems(page: str, root: Path) -> list[str]:
    """What is wrong with the rows of a page: a class listed twice, a test that is not there or does not name the class,
    or no test and no "not yet"."""
    found, seen = [], set()
    for code, said, held_by in _ROW.findall(page):
        tests = _TEST.findall(held_by)
        if code in seen:
            found.append(f"{code} is listed twice")
        if not tests and "not yet" not in said:
            found.append(f"{code} has neither a test nor a reason")
        seen.add(code)
        for file, name in tests:
            text = sources(root / file).get(name) if (root / file).is_file() else None
            if text is None:
                found.append(f"{code}: {file}::{name} does not exist")
            elif not re.search(rf"\b{code}\b", text):
                found.append(f"{code}: {file}::{name} does not name it")
    return found


def test_every_class_has_its_tests_and_they_name_it(root: Path) -> None:
    page = (root / "docs" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [A-Z]\d", page, re.MULTILINE)
    assert len(rows) == len(_ROW.findall(page)) > 90
    assert problems(page, root) == []


def test_a_stale_page_is_found(root: Path) -> None:
    here = "`tests/docs/test_cases.py::test_a_stale_page_is_found`"
    page = f"| Z8 | a | b | {here} |\n| Z9 | a | b | {here} |\n| Z9 | a | not yet: c | none |\n| Y1 | a | b | none |\n"
    page += "| Y2 | a | b | `tests/docs/test_cases.py::test_gone`<br>`tests/docs/gone.py::test_gone` |\n"
    name = "Y" + "3"  # so that this test does not name it
    page += f"| {name} | a | b | {here} |\n"
    assert problems(page, root) == [
        "Z9 is listed twice",
        "Y1 has neither a test nor a reason",
        "Y2: tests/docs/test_cases.py::test_gone does not exist",
        "Y2: tests/docs/gone.py::test_gone does not exist",
        f"{name}: tests/docs/test_cases.py::test_a_stale_page_is_found does not name it",
    ]
