"""`quatrain cache`: the quantised models and tokenised data that earlier runs have left on disk for the next start."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quatrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quatrain.data.disk import Entry

NAME = "cache"
HELP = """List or clear what is kept on disk: quantised models and tokenised data.

A model is quantised once, data files are tokenised once; later starts map the result, as long as the contents of the
files, the template and the settings are the same.
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
    from quatrain.checkpoint.cache import BaseCache
    from quatrain.cli.console import block, megabytes, several, stdout
    from quatrain.data.cache import RowCache
    from quatrain.data.disk import cache_folder

    folder = cache_folder(cache_dir)
    caches = (BaseCache(folder), RowCache(folder))
    try:
        shown = [entry for cache in caches for entry in cache.entries()]
        if clear is not None:
            key = None if clear == "all" else _one_key(clear, shown)
            shown = [entry for cache in caches for entry in cache.clear(key)]
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}") from error
    shown.sort(key=lambda entry: -entry.last_used)
    total = sum(entry.num_bytes for entry in shown)
    if as_json:
        facts = {"folder": str(folder), "total_bytes": total}
        print(json.dumps({**facts, "entries" if clear is None else "deleted": [_as_json(entry) for entry in shown]}))
        return
    console = stdout()
    if shown and clear is None:
        block(console, "entries", _table(shown))
    what = several(len(shown), "entry").replace("entrys", "entries")
    done = f"{what} deleted" if clear is not None else what
    block(console, "cache", [f"{folder}: {done}, {megabytes(total)}"])


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
    made = entry.made
    if entry.path.suffix == ".rows":
        names = [name for name, _ in made.files]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more}: rows of up to {made.settings['max_seq_len']} tokens, version {made.version}"
    nested = ", double quantisation" if made.double_quant else ""
    return f"{made.model}: nf4{nested}, {made.compute_dtype}, version {made.version}"


def _as_json(entry: Entry) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "key": entry.key,
        "bytes": entry.num_bytes,
        "last_used": round(entry.last_used, 3),
        "made": None if entry.made is None else asdict(entry.made),
    }
