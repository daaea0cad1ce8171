"""`python -m quatrain.cli.docs` writes docs/cli.md to standard output: every command with its flags, from the commands
themselves. A test compares the file with this output."""

from __future__ import annotations

import inspect
import typing
from types import ModuleType
from typing import Any

from quatrain.cli import main
from quatrain.cli.options import ALIASES, Group, default_text, flag_of, metavar_of

HEAD = """# The command line

Written by `python -m quatrain.cli.docs > docs/cli.md`; do not edit it by hand.

Every option of a run can be given as a flag, or in a YAML file (`--config FILE`) under the same name with underscores:
`--learning-rate 1e-4` is `learning_rate: 1e-4`. A flag beats the file, the file beats the default. Unknown names are
refused with the nearest known one. `quatrain init` writes such a file, and the JSON schema with which editors complete
and check it. `quatrain --install-completion` teaches the shell commands, flags and values; `--show-completion` prints
what it would install. `--debug` with any command shows the traceback of an error.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | bad usage or configuration |
| 3 | bad data, or a warning with `quatrain check --strict` |
| 4 | not enough memory or disk |
| 130 | interrupted; a training run has written a checkpoint |
"""

RULES = """## Resuming a run

`quatrain train --resume --out RUN` goes on from the newest complete checkpoint, bit for bit as if it had never stopped
(on the CPU, with the same number of threads and the same versions; a difference in those is printed).

- All options come from the checkpoint. One that is given again with another value is refused by name, unless
  `--override` is given as well: then it applies from the first resumed step on, and is printed. Another
  `adapter` to start from is refused in any case.
- Where things are and what is kept may always differ:
  {free}.
- The model and the rows are compared by content, not by path. Another model is refused; other rows need `--override`.
- Incomplete checkpoints are passed over, with their reason.

One `seed` decides everything that is random: the adapters' start, the split, the order of each epoch and dropout. Each
of them has its own stream, a pure function of the seed and of its place in the run: a checkpoint needs the step alone.

Early stopping: an evaluation counts as a miss when it is not strictly lower than the best; NaN and infinity are misses.
The adapter of the best evaluation is kept in `adapter/`, the last one where there was no evaluation.
"""


def render() -> str:
    """The text of docs/cli.md."""
    from quatrain.train.settings import FREE_ON_RESUME

    free = ", ".join(f"`{name}`" for name in sorted(FREE_ON_RESUME - {"resume", "override", "overwrite"}))
    return "\n".join([HEAD, *(_command(module) for module in main.COMMANDS), RULES.format(free=free)])


def _command(module: ModuleType) -> str:
    parts = [f"## quatrain {module.NAME}\n", module.HELP.strip() + "\n"]
    groups: tuple[Group, ...] = getattr(module.command, "groups", ())
    generated = {name for group in groups for name in group.fields()}
    parameters = inspect.signature(module.command, eval_str=True).parameters
    own = [p for name, p in parameters.items() if name.removeprefix("no_") not in generated]
    parts.append(_table([_own_row(parameter) for parameter in own]))
    parts += [f"**{group.title}**\n\n" + _table([_row(*item) for item in group.fields().items()]) for group in groups]
    return "\n".join(parts)


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _row(name: str, field: Any) -> tuple[str, str, str, str]:
    flags = f"`{flag_of(name)}`" + (f", `{ALIASES[name]}`" if name in ALIASES else "")
    if field.annotation is bool:
        return f"{flags}, `--no-{name.replace('_', '-')}`", "", default_text(field), field.description
    return flags, metavar_of(field.annotation), default_text(field), field.description


def _own_row(parameter: inspect.Parameter) -> tuple[str, str, str, str]:
    info = typing.get_args(parameter.annotation)[1]
    # typer keeps the first name of an annotated option in `default`.
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    flags = ", ".join(f"`{name}`" for name in names) or f"`{info.metavar or parameter.name.upper()}`"
    kind = "" if typing.get_args(parameter.annotation)[0] is bool else (info.metavar or "TEXT")
    return flags, kind, "", info.help or ""


if __name__ == "__main__":
    print(render(), end="")
