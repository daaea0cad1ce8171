"""Reading an Ollama Modelfile: the model it names, and the template, system text and parameters beside it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quatrain.errors import ModelError

MODELFILE = "Modelfile"
_COMMAND = re.compile(r'^[ \t]*([A-Za-z]+)[ \t]+(?:"""(.*?)"""|"([^\n]*)"|([^\n]*?))[ \t]*$', re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r'(\w+)[ \t]+(?:"(.*)"|(.*?))[ \t]*', re.DOTALL)
# Ollama's parameters that `GenerateConfig` has, by its names.
_OPTIONS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "seed": ("seed", int),
    "num_predict": ("max_new_tokens", int),
}
_NO_CHANGE = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "num_predict": -1}


@dataclass(frozen=True)
class Modelfile:
    """`model` is what FROM names; `sampling` holds options of `GenerateConfig`; `others` are parameters without a
    counterpart, as written."""

    path: Path
    model: Path
    template: str | None = None
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def read_modelfile(path: Path) -> Modelfile:
    """Raises ModelError for a file without FROM, for a model that is no local file, for an ADAPTER, and for a parameter
    that should be a number and is none."""
    commands: dict[str, list[str]] = {}
    for found in _COMMAND.finditer(_without_comments(path.read_text(encoding="utf-8"))):
        text = next((group for group in found.groups()[1:] if group is not None), "")
        commands.setdefault(found[1].upper(), []).append(text)
    if "FROM" not in commands:
        raise ModelError(f"{path}: no FROM line", hint="a Modelfile begins with FROM and a GGUF file")
    if "ADAPTER" in commands:
        raise ModelError(
            f"{path}: ADAPTER {commands['ADAPTER'][-1]}: a base with an adapter as GGUF is not supported",
            hint="give the adapter folder that it was exported from, or --format ollama for a merged model",
        )
    named = commands["FROM"][-1]
    model = path.parent / Path(named).expanduser()
    if not model.exists():
        raise ModelError(
            f"{path}: FROM {named}: no such file", hint="models of Ollama's own store cannot be opened here"
        )
    sampling, others = _parameters(path, commands.get("PARAMETER", []))
    template, system = (commands.get(name, [None])[-1] for name in ("TEMPLATE", "SYSTEM"))
    return Modelfile(path, model, template, system, sampling, others)


def _without_comments(text: str) -> str:
    """Lines that begin with # say nothing, outside of long texts."""
    parts = text.split('"""')
    parts[::2] = [re.sub(r"(?m)^[ \t]*#.*$", "", part) for part in parts[::2]]
    return '"""'.join(parts)


def _parameters(path: Path, lines: list[str]) -> tuple[dict[str, Any], list[str]]:
    sampling: dict[str, Any] = {}
    others = []
    for line in lines:
        found = _PARAMETER.fullmatch(line)
        name, value = (found[1], found[2] or found[3] or "") if found else (line, "")
        try:
            if name == "stop":
                sampling.setdefault("stop", []).append(value)
            elif name in _NO_CHANGE and float(value) == _NO_CHANGE[name]:
                pass
            elif name in _OPTIONS:
                option, kind = _OPTIONS[name]
                sampling[option] = kind(value)
            else:
                others.append(line)
        except ValueError:
            wanted = "whole number" if name in _OPTIONS and _OPTIONS[name][1] is int else "number"
            raise ModelError(
                f"{path}: PARAMETER {name}: want a {wanted}, got {value!r}", hint="correct that line"
            ) from None
    return sampling, others
