"""A small Go `text/template`, and what Ollama does around one: the oracle for the Modelfiles that we write.

Written from the documentation of Go's package and of Ollama's Modelfile, and apart from `quatrain.data.modelfile`: a
scanner, a parser and an interpreter for text, trim markers, if / else if / else / end, range with variables, fields,
strings, numbers, and the functions eq, ne, and, or, not, len, slice and index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ACTION = re.compile(r"\{\{(- )?(.*?)( -)?\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|:=|,|[^\s(),]+')
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


@dataclass
class Range:
    names: list[str]
    over: list[str]
    body: list[Any]


@dataclass
class If:
    branches: list[tuple[list[str] | None, list[Any]]]  # None: else


def render(template: str, messages: Sequence[dict[str, str]]) -> str:
    """As Ollama renders a prompt: turns of one role in a row are joined, and system texts are in .System as well."""
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["Role"] == message["role"]:
            joined[-1]["Content"] += "\n\n" + message["content"]
        else:
            joined.append({"Role": message["role"], "Content": message["content"]})
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    data = {"Messages": joined, "System": system, "Response": ""}
    return _run(_parse(template), data, {"$": data})


def modelfile_commands(text: str) -> list[tuple[str, str]]:
    """(COMMAND, argument) pairs of a Modelfile; a text in three quotes is taken as it is, line ends included."""
    found, at = [], 0
    while match := re.compile(r"\s*([A-Z]+) +").match(text, at):
        if text.startswith('"""', match.end()):
            end = text.index('"""', match.end() + 3)
            argument, at = text[match.end() + 3 : end], end + 3
        else:
            argument, _, _ = text[match.end() :].partition("\n")
            at = match.end() + len(argument)
        found.append((match[1], argument))
    assert not text[at:].strip(), f"not a Modelfile from here on: {text[at:]!r}"
    return found


def _parse(template: str) -> list[Any]:
    tokens: list[Any] = []
    at, trim = 0, False
    for match in _ACTION.finditer(template):
        text = template[at : match.start()]
        text = text.lstrip() if trim else text
        tokens += [text.rstrip() if match[1] else text, _WORD.findall(match[2])]
        at, trim = match.end(), bool(match[3])
    tokens.append(template[at:].lstrip() if trim else template[at:])
    body, rest = _block(tokens)
    assert not rest, f"an end too many, before {rest[:2]}"
    return body


def _block(tokens: list[Any]) -> tuple[list[Any], list[Any]]:
    """(nodes up to an else or end of this block, the tokens from there on)."""
    nodes: list[Any] = []
    while tokens:
        head, *tokens = tokens
        if isinstance(head, str):
            nodes.append(head)
        elif head[0] in ("else", "end"):
            return nodes, [head, *tokens]
        elif head[0] == "range":
            names, over = [], head[1:]
            if ":=" in over:
                cut = over.index(":=")
                names, over = [name for name in over[:cut] if name != ","], over[cut + 1 :]
            body, (end, *tokens) = _block(tokens)
            assert end == ["end"]
            nodes.append(Range(names, over, body))
        elif head[0] == "if":
            branches: list[tuple[list[str] | None, list[Any]]] = []
            condition: list[str] | None = head[1:]
            while True:
                body, (end, *tokens) = _block(tokens)
                branches.append((condition, body))
                if end == ["end"]:
                    break
                assert end[0] == "else"
                condition = end[2:] if end[1:2] == ["if"] else None
            nodes.append(If(branches))
        else:
            nodes.append(head)
    return nodes, []


def _run(nodes: list[Any], dot: Any, names: dict[str, Any]) -> str:
    out = ""
    for node in nodes:
        if isinstance(node, str):
            out += node
        elif isinstance(node, Range):
            for index, item in enumerate(_value(node.over, dot, names)):
                own = dict(zip(node.names, [index, item][-len(node.names) :] if node.names else [], strict=True))
                out += _run(node.body, item, names | own)
        elif isinstance(node, If):
            for condition, body in node.branches:
                if condition is None or _value(condition, dot, names):
                    out += _run(body, dot, names)
                    break
        else:
            out += str(_value(node, dot, names))
    return out


def _value(words: list[str], dot: Any, names: dict[str, Any]) -> Any:
    values, rest = _operands(words, dot, names)
    assert not rest
    name, *arguments = values
    if not callable(name):
        assert not arguments, words
        return name
    return name(*arguments)


def _operands(words: list[str], dot: Any, names: dict[str, Any]) -> tuple[list[Any], list[str]]:
    values: list[Any] = []
    while words:
        word, *words = words
        if word == ")":
            return values, words
        if word == "(":
            inner, words = _operands(words, dot, names)
            values.append(inner[0](*inner[1:]) if callable(inner[0]) else inner[0])
        else:
            values.append(_operand(word, dot, names))
    return values, []


def _operand(word: str, dot: Any, names: dict[str, Any]) -> Any:
    if word.startswith('"'):
        return re.sub(r"\\(.)", lambda match: _ESCAPES[match[1]], word[1:-1])
    if word.lstrip("-").isdigit():
        return int(word)
    if word in _FUNCTIONS:
        return _FUNCTIONS[word]
    if word == ".":
        return dot
    root, *path = word.split(".")
    value = dot if not root else names[root]
    for name in path:
        value = value[name]
    return value


def _and(*values: Any) -> Any:
    return next((value for value in values if not value), values[-1])


def _or(*values: Any) -> Any:
    return next((value for value in values if value), values[-1])


_FUNCTIONS: dict[str, Any] = {
    "eq": lambda first, *others: any(first == other for other in others),
    "ne": lambda first, other: first != other,
    "and": _and,
    "or": _or,
    "not": lambda value: not value,
    "len": len,
    "slice": lambda value, begin=0, end=None: value[begin:end],
    "index": lambda value, at: value[at],
}
