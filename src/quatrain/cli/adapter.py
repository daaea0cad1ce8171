"""`quatrain adapter`: what an adapter folder holds, and whether vLLM would load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quatrain.cli.complete import runs
from quatrain.errors import ConfigError

NAME = "adapter"
HELP = """Show what an adapter is, and whether vLLM's LoRA loader would take it.

FOLDER is an adapter of Quatrain or PEFT, or a run. Exit code 1 when vLLM would refuse it.

Example: quatrain adapter runs/first
"""


def command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="An adapter folder or a run folder.", autocompletion=runs)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from quatrain.checkpoint import vllm
    from quatrain.checkpoint.peft import CONFIG_FILE
    from quatrain.cli.console import block, stdout
    from quatrain.train.preflight import find_adapter

    found = find_adapter(Path(folder).expanduser())
    if found is None:
        raise ConfigError(f"{folder} holds no {CONFIG_FILE}", hint="give an adapter folder or a run folder")
    verdict = vllm.check(found)
    facts = _facts(found)
    if as_json:
        print(json.dumps({**facts, "vllm": verdict.as_json()}))
    else:
        console = stdout()
        block(console, "adapter", [str(found)])
        block(console, "base", [facts["base_name"] or "not named"])
        block(console, "lora", _lines(facts))
        block(console, "vllm", verdict.lines(), "bold cyan" if verdict.loads else "yellow")
    if not verdict.loads:
        raise typer.Exit(1)


def _facts(folder: Path) -> dict[str, Any]:
    """What the adapter is, as JSON values; only a `problem` where Quatrain itself cannot use it."""
    from quatrain.checkpoint.peft import read_adapter
    from quatrain.errors import CheckpointError

    try:
        saved = read_adapter(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "base_name": "", "problem": str(error)}
    modules = {name.rpartition(".lora_")[0] for name in saved.tensors if ".lora_" in name}
    return {
        "folder": str(folder),
        "base_name": saved.base_name,
        "base_fingerprint": saved.base_fingerprint,
        **saved.options(),
        "lora_dropout": saved.dropout,
        "modules": len(modules),
        "parameters": sum(tensor.numel() for tensor in saved.tensors.values()),
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    from quatrain.cli.console import count

    if "problem" in facts:
        return [facts["problem"]]
    scale = f"rank {facts['lora_rank']}, alpha {facts['lora_alpha']:g}" + (", rsLoRA" if facts["use_rslora"] else "")
    targets = facts["lora_targets"]
    return [
        f"{scale}, dropout {facts['lora_dropout']:g}" + (", norms trained" if facts["train_norms"] else ""),
        f"{count(facts['modules'])} modules, {count(facts['parameters'])} parameters: "
        + (targets if isinstance(targets, str) else ", ".join(targets)),
    ]
