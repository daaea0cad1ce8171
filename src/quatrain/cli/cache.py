"""`quatrain cache`: the quantised models that earlier runs have left on disk for the next start."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quatrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quatrain.checkpoint.cache import Entry

NAME = "cache"
HELP = """List or clear the quantised models that are kept on disk.

A model is quantised once; later starts map the result, as long as the model's files and the settings are the same.
Every entry is verified in full before it is used: one that is damaged is written again, and all can be deleted any
time. The folder is $QUATRAIN_CACHE_DIR, else quatrain in $XDG_CACHE_HOME or ~/.cache.

Example: quatrain cache --clear all
"""

_SHORT_KEY = 12


def command(
    clear: Annotated[
        str | None, typer.Option("--clear", metavar="KEY|all", help="Delete the entry with this key, or all.")
    ] = None,
    cache_dir: Annotated[str | None, typer.Option("--cache-dir", metavar="FOLDER", help="another cache folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.checkpoint.cache import BaseCache, cache_folder
    from quatrain.cli.console import block, megabytes, several, stdout

    cache = BaseCache(cache_folder(cache_dir))
    try:
        entries = cache.entries()
        if clear is not None:
            gone = cache.clear(None if clear == "all" else _one_key(clear, entries))
    except OSError as error:
        raise CheckpointError(f"{cache.folder}: {error.strerror or error}") from error
    shown = entries if clear is None else gone
    total = sum(entry.num_bytes for entry in shown)
    if as_json:
        facts = {"folder": str(cache.folder), "total_bytes": total}
        print(json.dumps({**facts, "entries" if clear is None else "deleted": [_as_json(entry) for entry in shown]}))
        return
    console = stdout()
    if shown and clear is None:
        block(console, "entries", _table(shown))
    what = several(len(shown), "entry").replace("entrys", "entries")
    done = f"{what} deleted" if clear is not None else what
    block(console, "cache", [f"{cache.folder}: {done}, {megabytes(total)}"])


def _one_key(clear: str, entries: list[Entry]) -> str:
    """The key that starts with `clear`, as the list shows it. Raises ConfigError when none does, or several do."""
    found = [entry.key for entry in entries if entry.key.startswith(clear)]
    if not clear or len(found) != 1:
        raise ConfigError(
            f"clear: {len(found)} entries have a key that starts with {clear!r}",
            hint="`quatrain cache` lists the keys; `--clear all` deletes everything",
        )
    return found[0]


def _table(entries: list[Entry]) -> list[str]:
    from quatrain.cli.console import columns, megabytes

    rows = []
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        rows.append([entry.key[:_SHORT_KEY], megabytes(entry.num_bytes), f"used {used}", _made_of(entry)])
    return columns(rows)


def _made_of(entry: Entry) -> str:
    if entry.made is None:
        return "not an entry of this version"
    nested = ", double quantisation" if entry.made.double_quant else ""
    return f"{entry.made.model}: nf4{nested}, {entry.made.compute_dtype}, version {entry.made.version}"


def _as_json(entry: Entry) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "key": entry.key,
        "bytes": entry.num_bytes,
        "last_used": round(entry.last_used, 3),
        "made": None if entry.made is None else asdict(entry.made),
    }
