"""The text of a starter file: every option of a run with its description; the common ones are set."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from quatrain.cli.options import metavar_of
from quatrain.config import TrainOptions
from quatrain.train.settings import OPTION_SETS

COMMON = (
    "model", "data", "out", "epochs", "batch_size", "val_split", "max_seq_len", "learning_rate", "lora_rank",
    "lora_alpha", "lora_dropout", "seed",
)  # fmt: skip
TITLES = {
    "RunOptions": "Model, data, run folder",
    "TrainOptions": "Training",
    "InstructConfig": "Adapters, optimizer, memory",
    "DataOptions": "How rows are read, and what is learned",
}
# These say what one start of a run does; in a file they would do it every time.
NOT_IN_A_FILE = ("resume", "override", "overwrite")
_WIDTH = 118


def render(options: Mapping[str, Any], reasons: Mapping[str, str], schema: str) -> str:
    """A YAML file that sets `options` and the common ones, and shows all others with their defaults. `reasons` are
    added to the descriptions; `schema` is the path of the JSON schema, for editors."""
    lines = [f"# yaml-language-server: $schema={schema}", *_HEAD.splitlines()]
    for group in OPTION_SETS:
        lines += ["", f"# {TITLES[group.__name__]}", ""]
        for name, field in group.model_fields.items():
            if name in NOT_IN_A_FILE:
                continue
            default = field.get_default(call_default_factory=True)
            default = TrainOptions().num_epochs if name == "epochs" else default
            is_set = name in options or name in COMMON
            lines += _comment(name, field, reasons.get(name))
            lines.append(("" if is_set else "# ") + f"{name}: {scalar(options.get(name, default))}".rstrip())
    return "\n".join(lines) + "\n"


_HEAD = """# Written by `quatrain init`. Train with: quatrain train --config THIS_FILE
# A flag beats this file: quatrain train --config THIS_FILE --epochs 1
# Lines that start with `# name:` show an option's default; take away the `# ` to change it. Paths are relative to the
# folder that the command is run in."""


def _comment(name: str, field: Any, reason: str | None) -> list[str]:
    """An option's description, its choices, and why it was set to what it is."""
    choices = metavar_of(field.annotation)
    text = str(field.description) + (f" [{choices}]" if choices.islower() else "")
    text += f"; here: {reason}" if reason else ""
    return textwrap.wrap(text, _WIDTH, initial_indent="# - ", subsequent_indent="#   ")


def scalar(value: Any) -> str:
    """A value as YAML that YAML 1.1, 1.2 and our reader understand alike."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = f"{value:g}"
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, list | tuple):
        return "[" + ", ".join(scalar(item) for item in value) + "]"
    if isinstance(value, str) and not _is_plain(value):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _is_plain(text: str) -> bool:
    """Whether text stays the same text without quotes, also inside a list."""
    try:
        return bool(yaml.safe_load(f"[{text}]") == [text])
    except yaml.YAMLError:
        return False
