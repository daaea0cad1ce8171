"""Quatrain beside PEFT + bitsandbytes: the same model, adapters, tokens and labels; two loss curves.

SmolLM2-135M-Instruct on the first 256 rows of GSM8K in file order, 8 rows a step; the loss on the first 64 test rows
before and after. Each side runs in a process of its own, so that its peak memory is its own. Exit status 1 when the two
losses after training differ by more than 1 percent.

    python bench/gsm8k_parity.py --data FOLDER            # both sides; FOLDER holds the two GSM8K files
    python bench/gsm8k_parity.py --data FOLDER --steps 2  # a smoke run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    ALPHA,
    CLIP,
    LEARNING_RATE,
    LONGEST_ROW,
    MODEL,
    RANK,
    ROOT,
    Rows,
    export,
    gsm8k_rows,
    peft_loss,
    peft_model,
    record,
    run_apart,
    write,
)

TRAIN_ROWS, TEST_ROWS, ROWS_PER_STEP = 256, 64, 8
TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description="loss parity with PEFT + bitsandbytes on GSM8K")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the GSM8K files")
    parser.add_argument("--side", choices=["quatrain", "peft", "both"], default="both")
    parser.add_argument("--steps", type=int, default=TRAIN_ROWS // ROWS_PER_STEP, help="optimizer steps (32: all rows)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="compute dtype of both sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # set for the two inner processes
    options = parser.parse_args()
    if options.work is not None:
        side = {"quatrain": run_quatrain, "peft": run_peft}[options.side]
        result = side(options.work, options.steps, options.dtype, options.threads)
        (options.work / f"{options.side}.json").write_text(json.dumps(result), encoding="utf-8")
        return 0
    sides = ["quatrain", "peft"] if options.side == "both" else [options.side]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, options.data, options.dtype)
        same = ["--work", work, "--steps", options.steps, "--dtype", options.dtype, "--threads", options.threads]
        results = {side: run_apart(__file__, [*same, "--side", side], work / f"{side}.json") for side in sides}
    show(results)
    name = f"gsm8k_parity_{options.dtype}_{'_'.join(sides)}_{options.steps}.json"
    write(options.out / name, {**record(__file__), "sides": results})
    return gate(results)


# What both sides start from.


def prepare(work: Path, data: Path, dtype: str) -> None:
    """Writes rows.json, the dequantised base model and the freshly initialised adapter into `work`."""
    from quatrain import InstructConfig, InstructPipeline
    from quatrain.checkpoint.open import open_source

    source = open_source(MODEL)
    tokenizer = source.tokenizer()
    assert tokenizer is not None, f"{MODEL} carries its tokenizer"
    rows = {
        "train": gsm8k_rows(tokenizer, data / "gsm8k_train_2k.jsonl", TRAIN_ROWS),
        "test": gsm8k_rows(tokenizer, data / "gsm8k_test.jsonl", TEST_ROWS),
    }
    (work / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    export(source, work / "base")
    pipe = InstructPipeline.from_source(source, InstructConfig(lora_rank=RANK, lora_alpha=ALPHA, compute_dtype=dtype))
    pipe.save_adapter(work / "adapter")


def read_rows(work: Path) -> tuple[Rows, Rows]:
    rows = json.loads((work / "rows.json").read_text(encoding="utf-8"))
    return rows["train"], rows["test"]


def steps_of(rows: Rows, steps: int) -> list[Rows]:
    return [rows[at : at + ROWS_PER_STEP] for at in range(0, len(rows), ROWS_PER_STEP)][:steps]


# The two sides. Each returns before, curve, after, seconds (training alone) and peak_memory_mb.


def run_quatrain(work: Path, steps: int, dtype: str, threads: int) -> dict[str, Any]:
    import torch

    from quatrain import InstructConfig, InstructPipeline
    from quatrain.data.row import Row

    torch.set_num_threads(threads)
    config = InstructConfig(
        lora_rank=RANK, lora_alpha=ALPHA, learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=CLIP,
        clip="global", quantize="nf4", double_quant=True, compute_dtype=dtype, max_seq_len=LONGEST_ROW,
    )  # fmt: skip
    pipe = InstructPipeline.from_pretrained(work / "base", config)
    pipe.load_adapter(work / "adapter", any_base=True)  # made on the GGUF file that the base folder was written from
    train, test = ([Row(tuple(ids), tuple(labels)) for ids, labels in rows] for rows in read_rows(work))
    before = pipe.evaluate(test).avg_loss
    began = time.perf_counter()
    curve = [
        pipe.train_step(train[at : at + ROWS_PER_STEP]).loss for at in range(0, steps * ROWS_PER_STEP, ROWS_PER_STEP)
    ]
    seconds = time.perf_counter() - began
    return summary(before, curve, pipe.evaluate(test).avg_loss, seconds)


def run_peft(work: Path, steps: int, dtype: str, threads: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = peft_model(work / "base", work / "adapter", compute)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)

    @torch.no_grad()
    def evaluate(rows: Rows) -> float:
        parts = [peft_loss(model, batch) for batch in steps_of(rows, len(rows))]
        return sum(total.item() for total, _ in parts) / sum(count for _, count in parts)

    train, test = read_rows(work)
    before, curve = evaluate(test), []
    began = time.perf_counter()
    for batch in steps_of(train, steps):
        total, count = peft_loss(model, batch)
        loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    seconds = time.perf_counter() - began
    return summary(before, curve, evaluate(test), seconds)


def summary(before: float, curve: list[float], after: float, seconds: float) -> dict[str, Any]:
    from quatrain.memory.process import peak_resident_bytes

    peak = round(peak_resident_bytes() / 1e6, 1)
    return {"before": before, "curve": curve, "after": after, "seconds": round(seconds, 1), "peak_memory_mb": peak}


# What is printed and kept.


def show(results: dict[str, dict[str, Any]]) -> None:
    """Both curves step by step, then the losses, the seconds and the peaks."""
    names = list(results)
    print("step".rjust(8), *(name.rjust(10) for name in names))
    for step, losses in enumerate(zip(*(results[name]["curve"] for name in names), strict=True), 1):
        print(str(step).rjust(8), *(f"{loss:10.4f}" for loss in losses))
    for field, form in (("before", "10.4f"), ("after", "10.4f"), ("seconds", "10.1f"), ("peak_memory_mb", "10.1f")):
        print(field.rjust(8), *(format(results[name][field], form) for name in names))


def gate(results: dict[str, dict[str, Any]]) -> int:
    """0 when both losses after training agree within the tolerance (or only one side ran), else 1."""
    if len(results) < 2:
        return 0
    ours, theirs = results["quatrain"]["after"], results["peft"]["after"]
    apart = abs(ours - theirs) / theirs
    print(f"after training: {ours:.4f} against {theirs:.4f}, {apart:.2%} apart (at most {TOLERANCE:.0%})")
    return 0 if apart <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
