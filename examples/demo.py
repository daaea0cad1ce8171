"""The demo: teach SmolLM2-135M-Instruct to turn plain requests to a smart home into strict JSON commands.

Measures exact match on held-out rows, trains as `quatrain train` does, loads the adapter from its folder into a fresh
model and measures again. Writes build/demo.json. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import quatrain as qt
from quatrain.cli.progress import TerminalReporter
from quatrain.memory.process import peak_resident_bytes
from quatrain.train.run import Preparation, train

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "examples" / "smart_home"
MODEL = "smollm2-135m"
TRAINING = {"learning_rate": 1.5e-3, "epochs": 2, "batch_size": 16, "max_seq_len": 128, "memory_budget": "1.3GB"}
LONGEST_ANSWER = 24  # tokens; no command has more than 22 with its end token
MOST_BEFORE, LEAST_AFTER = 0.05, 0.90


@dataclass(frozen=True)
class Request:
    """One held-out row: what a person says, and the only answer that counts."""

    system: str
    text: str
    command: str


class PlanKeeper(TerminalReporter):
    """Shows what `quatrain train` shows, and keeps the plan to compare it with the measured peak."""

    planned_bytes = 0

    def prepared(self, preparation: Preparation) -> None:
        super().prepared(preparation)
        self.planned_bytes = preparation.plan.total_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description="fine-tune SmolLM2-135M on smart home requests, before against after")
    parser.add_argument("--model", default=MODEL, help="the same model from another place, e.g. a folder")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="the folder for demo.json and the run")
    parser.add_argument("--steps", type=int, help="train this many steps only (a quick look: no score is expected)")
    parser.add_argument("--requests", type=int, help="measure on the first N held-out rows only")
    options = parser.parse_args()

    console = Console(highlight=False)
    requests = read_requests(DATA / "held_out.jsonl")[: options.requests]
    console.print(f"[bold]Before[/bold]: {options.model} answers {len(requests)} requests it has never seen")
    before = answers(load(options.model), requests)
    console.print(f"exact match {percent(exact_match(before, requests))}\n\n[bold]Training[/bold]")

    reporter = PlanKeeper()
    outcome = train(training_options(options.model, options.out / "smart_home", options.steps), reporter)
    assert outcome.adapter is not None, "only an interrupted run has no adapter, and it raised KeyboardInterrupt"

    console.print(f"\n[bold]After[/bold]: the same requests, with the adapter from {outcome.adapter}")
    after = answers(load(options.model, outcome.adapter), requests)
    result = {
        "exact_match_before": exact_match(before, requests),
        "exact_match_after": exact_match(after, requests),
        "train_seconds": round(outcome.seconds, 1),
        "peak_memory_mb": round(peak_resident_bytes() / 1e6, 1),
        "planned_memory_mb": round(reporter.planned_bytes / 1e6, 1),
        "adapter": str(outcome.adapter),
    }
    (options.out / "demo.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(console, requests, before, after, result)
    reached = result["exact_match_before"] <= MOST_BEFORE and result["exact_match_after"] >= LEAST_AFTER
    if options.steps is None and not reached:
        print(f"error: want at most {percent(MOST_BEFORE)} before and at least {percent(LEAST_AFTER)} after")
        return 1
    return 0


def read_requests(path: Path) -> list[Request]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Request(row["system"], row["instruction"], row["response"]) for row in rows]


def training_options(model: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """What would be flags of `quatrain train`."""
    length = {"max_steps": steps, "epochs": None} if steps else {}
    place = {"model": model, "data": str(DATA / "train.jsonl"), "out": str(folder), "overwrite": True}
    return {name: value for name, value in {**place, **TRAINING, **length}.items() if value is not None}


def load(model: str, adapter: Path | None = None) -> qt.InstructPipeline:
    """The model as training has it (4-bit), plain or with an adapter."""
    pipe = qt.InstructPipeline.from_pretrained(model, qt.InstructConfig(max_seq_len=128, micro_batch_tokens=128))
    if adapter is not None:
        pipe.load_adapter(adapter)
    return pipe


def answers(pipe: qt.InstructPipeline, requests: list[Request]) -> list[str]:
    """The model's greedy answer to each request."""
    assert pipe.tokenizer is not None, "the GGUF file carries its tokenizer"
    prompts = [pipe.chat_ids(request.system, request.text) for request in requests]
    rows = pipe.generate_ids(prompts, qt.GenerateConfig(max_new_tokens=LONGEST_ANSWER))
    return [pipe.tokenizer.decode(ids) for ids in rows]


def exact_match(texts: list[str], requests: list[Request]) -> float:
    """The share of answers that are the expected command, character for character."""
    return sum(text == request.command for text, request in zip(texts, requests, strict=True)) / len(requests)


def percent(share: float) -> str:
    return f"{share:.1%}"


def show(
    console: Console, requests: list[Request], before: list[str], after: list[str], result: dict[str, Any]
) -> None:
    """Five answers side by side, then the numbers."""
    table = Table(title="Five held-out requests", show_lines=True)
    for heading in ("request", "before", "after", "expected"):
        table.add_column(heading, overflow="fold")
    for request, old, new in list(zip(requests, before, after, strict=True))[:5]:
        mark = "green" if new == request.command else "red"
        table.add_row(request.text, short(old), f"[{mark}]{short(new)}[/]", request.command)
    console.print(table)
    planned, peak = result["planned_memory_mb"], result["peak_memory_mb"]
    before_score, after_score = percent(result["exact_match_before"]), percent(result["exact_match_after"])
    console.print(f"exact match   {before_score} before, {after_score} after ({len(requests)} held-out requests)")
    console.print(f"training      {result['train_seconds']:.0f} s")
    console.print(f"memory        {planned:.0f} MB planned for training, {peak:.0f} MB measured peak", soft_wrap=True)
    console.print(f"adapter       {result['adapter']}", soft_wrap=True)


def short(answer: str) -> str:
    """An answer on few lines, for a table cell. Model output is not markup."""
    return escape(textwrap.shorten(answer, 90, placeholder=" …"))


if __name__ == "__main__":
    sys.exit(main())
