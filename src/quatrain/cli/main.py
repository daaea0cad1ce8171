"""The command line. Commands are thin: they read options, call the library, print; errors end here."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Annotated

import typer

from quatrain.cli import (
    adapter,
    bench,
    cache,
    chat,
    check,
    doctor,
    errors,
    evaluate,
    export,
    init,
    plan,
    run_report,
    runs,
    schema,
    train,
)

app = typer.Typer(
    name="quatrain",
    help="Fine-tune instruction models with QLoRA, on a CPU or a GPU.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
# Starting makes several hundred thousand objects that stay (torch's modules, a vocabulary). At Python's default of 700
# a collection, looking through them again and again takes a third of the start.
_OBJECTS_A_COLLECTION = 100_000
COMMANDS = (
    init, train, check, plan, evaluate, chat, runs, run_report, export, adapter, cache, bench, doctor, schema
)  # fmt: skip
for module in COMMANDS:
    # Typer keeps the line breaks of all but the first paragraph, which a narrow terminal would break once more.
    paragraphs = [" ".join(paragraph.split()) for paragraph in module.HELP.split("\n\n")]
    app.command(name=module.NAME, help="\n\n".join(paragraphs))(module.command)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (any command).")] = False,
) -> None:
    """Options that come before the command."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad usage or configuration, 3 bad data, 4 not
    enough memory or disk, 130 interrupted."""
    gc.set_threshold(_OBJECTS_A_COLLECTION)
    _fill_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character ends no answer
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        print(f"quatrain {_version()}")
        return 0
    try:
        code = int(typer.main.get_command(app).main(words, prog_name="quatrain", standalone_mode=False) or 0)
        sys.stdout.flush()
        if code == errors.INTERRUPTED:
            print("interrupted", file=sys.stderr)
        return code
    except _CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        message = getattr(error, "format_message", error.__str__)()
        command = next((word for word in words if not word.startswith("-")), "")
        known = any(command == module.NAME for module in COMMANDS)
        return errors.usage(message, f"quatrain {command}" if known else "quatrain")
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; Python must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost border: everything becomes one line and an exit code
        return errors.report(error, debug=debug)


def _fill_closed_streams() -> None:
    """Python has None for a standard stream that was closed by whoever started us: what is written there is dropped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends


# typer carries its own copy of click in some releases and imports click in others; this is the right one in both.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def _version() -> str:
    from importlib.metadata import version

    return version("quatrain")
