"""`quatrain schema`: the JSON schema of a run's YAML file, for editors to complete and check it while it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quatrain.cli.options import ALIASES

NAME = "schema"
HELP = """Write the JSON schema of the YAML file that --config takes, for editors.

Without FILE it is printed. `quatrain init` writes it beside the starter file, which points to it.

Example: quatrain schema quatrain.schema.json
"""

TITLE = "Options of a Quatrain run"
DEFAULT_FILE = "quatrain.schema.json"


def command(
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is no such schema.")] = False,
) -> None:
    if file is None:
        print(text(), end="")
        return
    write(Path(file).expanduser(), overwrite=overwrite)
    print(f"written: {file}")


def write(path: Path, *, overwrite: bool) -> None:
    """Write the schema; an older one is replaced. Raises ConfigError for a file that is something else, unless
    `overwrite`, and CheckpointError where it cannot be written."""
    from quatrain.checkpoint.atomic import write_file
    from quatrain.errors import CheckpointError, ConfigError

    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="give the name of a file in it")
    if path.exists() and not overwrite and not _is_ours(path):
        raise ConfigError(f"{path} exists and is no schema of Quatrain's", hint="choose another name, or --overwrite")
    try:
        write_file(path, text().encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """The schema, with every option of a run in the order of its definition. Values may be typed as YAML gives them."""
    from quatrain.config import EXCLUSIVE
    from quatrain.train.settings import OPTION_SETS

    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for options in OPTION_SETS:
        described = options.model_json_schema(ref_template="#/definitions/{model}")
        definitions |= described.get("$defs", {})
        for name, field in described["properties"].items():
            properties[name] = {key: value for key, value in field.items() if key not in ("title", "prefixItems")}
            if "anyOf" in properties[name]:  # says it all; a `type` beside it would narrow it
                properties[name].pop("type", None)
    entry = properties["data"].pop("items")  # one entry need not be in a list
    properties["data"] = {**properties["data"], "type": ["string", "object", "array"], "if": {"type": "array"},
                          "then": {"items": entry}, "else": entry}  # fmt: skip
    for name, alias in ALIASES.items():
        properties[alias.lstrip("-")] = properties[name]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": TITLE,
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "definitions": definitions,
        "allOf": [{"not": _both(*pair)} for pair in EXCLUSIVE],
    }


def _both(first: str, second: str) -> dict[str, Any]:
    """Both options set to something."""
    some = {"not": {"type": "null"}}
    return {"required": [first, second], "properties": {first: some, second: some}}


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_bytes())["title"] == TITLE)
    except (OSError, ValueError, TypeError, KeyError):
        return False
