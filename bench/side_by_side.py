"""Training steps of Quatrain beside PEFT: tokens a second and whole-process peak memory.

SmolLM2-135M, r=16, alpha 32 on all seven linears, AdamW, clip 1.0, bf16 compute. The sides:

    quatrain             NF4 with double quantisation, as it comes: blocks are kept as far as memory allows
    quatrain_lean        the same, every block recomputed
    peft_nf4             PEFT + bitsandbytes NF4 with double quantisation, its fastest: no gradient checkpointing
    peft_nf4_autocast    the same under torch.autocast, as a Trainer with bf16=True runs it
    peft_nf4_lean        the same with gradient checkpointing, its leanest
    peft_bf16            PEFT on plain bf16 weights, no quantisation
    peft_bf16_lean       the same with gradient checkpointing

and the workloads:

    4x512                4 rows of 512 tokens of the demo's text, loss on all of them
    gsm8k                8 rows of GSM8K a step in file order, loss on the answer; --data is the folder of its file

All sides start from the same weights (the plain ones went through NF4 once) and the same adapter, whose B is not zero.
Before any timing each side runs one step in fp32, in a process of its own: the same token ids and labels as the first
side, the loss within 0.1 % and the gradient's norm within 1 % of its, and a gradient in every A and every B. fp32 sums
of 10,000 terms in another order differ by about 1e-5; a hundred times that allows for 30 layers in a row, and a
gradient is the more sensitive one. A wrong mask, scale or position moves both by more.

Then every run is a fresh process in bf16: a step to warm up, then the timed ones. The sides take turns, round after
round. Before it times anything a process checks ids and gradients again, and its loss against fp32 within 3 %: each of
about 60 additions to the residual stream rounds by 2^-9, together 1.5 % of it, and the loss may be off by as much where
the errors are common to all tokens. (Norms of bf16 gradients are only kept: this model's differ by tens of percent.)

With --isa avx2 all sides are held to what a machine without AVX-512 has, in fp32, which is the fastest there (it has no
bf16 products): Quatrain by its option, torch and its libraries by their environment variables. bitsandbytes' own
kernels take no such hint.

    python bench/side_by_side.py --workload 4x512
    python bench/side_by_side.py --workload gsm8k --data FOLDER
    python bench/side_by_side.py --workload 4x512 --quick       # a smoke run: short rows, one round
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
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
    padded,
    peft_loss,
    peft_model,
    record,
    run_apart,
    write,
)

FP32_LOSS, FP32_NORM, BF16_LOSS = 1e-3, 1e-2, 0.03
"""The bounds of the gate, relative."""
ROWS_PER_STEP = {"4x512": 4, "gsm8k": 8}
PEFT_SIDES = {
    "peft_nf4": {"nf4": True},
    "peft_nf4_autocast": {"nf4": True, "autocast": True},
    "peft_nf4_lean": {"nf4": True, "checkpointing": True},
    "peft_bf16": {"nf4": False},
    "peft_bf16_lean": {"nf4": False, "checkpointing": True},
}
QUATRAIN_SIDES = {"quatrain": "auto", "quatrain_lean": "block"}
"""Their `checkpoint`."""
SIDES = (*QUATRAIN_SIDES, *PEFT_SIDES)
HELD_TO = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""Environment variables by --isa."""

Step = Callable[[Rows], tuple[float, float]]
"""One optimizer step: (mean loss, gradient norm before clipping)."""


def main() -> int:
    options = parse()
    if options.work is not None:
        write_side(options)
        return 0
    os.environ |= HELD_TO.get(options.isa, {})  # the inner processes have it before torch is imported
    rounds, timed = (1, 1) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, options.workload, options.data, 1 + timed, options.quick)
        words = ["--work", work, "--threads", options.threads, "--isa", options.isa, "--side"]
        gates = {}
        for side in options.sides:
            gates[side] = run_apart(__file__, [*words, side, "--gate"], work / f"{side}.json")
            print(f"gate, {side}: loss {gates[side]['loss']:.5f}, norm {gates[side]['gradient_norm']:.4f}", flush=True)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
        for number in range(rounds):
            for side in options.sides:
                runs[side].append(run_apart(__file__, [*words, side], work / f"{side}.json"))
                print(f"round {number + 1}, {side}: {tokens_per_second(runs[side][-1]):,.1f} tokens/s", flush=True)
    sides = {side: summary(found) for side, found in runs.items()}
    show(sides)
    result = {
        **record(__file__),
        "workload": options.workload,
        "threads": options.threads,
        "isa": options.isa,
        "rounds": rounds,
        "timed_steps": timed,
        "bounds": {"fp32_loss": FP32_LOSS, "fp32_gradient_norm": FP32_NORM, "bf16_loss": BF16_LOSS},
        "gate": gates,
        "sides": sides,
    }
    held = "" if options.isa == "auto" else f"_{options.isa}"
    name = f"side_by_side_{options.workload}{held}{'_quick' if options.quick else ''}.json"
    write(options.out / name, result)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=ROWS_PER_STEP, default="4x512")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_train_2k.jsonl")
    parser.add_argument(
        "--sides", type=lambda text: text.split(","), default=list(SIDES), help="default: all, by comma"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a process")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", choices=["auto", *HELD_TO], default="auto", help="hold all sides to it, in fp32")
    parser.add_argument("--quick", action="store_true", help="only to see that it works: results go to build/")
    parser.add_argument("--out", type=Path, help="folder of the results; default: bench/results")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # set for the inner processes, with --side
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workload == "gsm8k" and options.work is None and options.data is None:
        parser.error("gsm8k needs --data, the folder with gsm8k_train_2k.jsonl")
    if unknown := set(options.sides) - set(SIDES):
        parser.error(f"no side {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    options.out = options.out or (ROOT / "build" if options.quick else ROOT / "bench" / "results")
    return options


# What all sides start from.


def prepare(work: Path, workload: str, data: Path | None, steps: int, quick: bool) -> None:
    """Writes steps.json, the weights before and after NF4, and an adapter whose B is not zero."""
    import torch

    from quatrain import InstructPipeline
    from quatrain.checkpoint.open import open_source

    source = open_source(MODEL)
    rows = make_rows(source.tokenizer(), workload, data, steps, quick)
    (work / "steps.json").write_text(json.dumps(rows), encoding="utf-8")
    export(source, work / "base", "bf16")
    base = open_source(str(work / "base"))
    export(base, work / "plain_bf16", "bf16", through_nf4=True)
    export(base, work / "plain_fp32", "fp32", through_nf4=True)
    pipe = InstructPipeline.from_source(base, config(work, "bf16", "auto"))
    generator = torch.Generator().manual_seed(0)
    for name, view in pipe.adapters.named().items():
        if name.endswith("lora_B.weight"):
            view.copy_(torch.randn(view.shape, generator=generator).mul_(0.02))
    pipe.save_adapter(work / "adapter")


def make_rows(tokenizer: Any, workload: str, data: Path | None, steps: int, quick: bool) -> list[Rows]:
    """The rows of each step."""
    each = 2 if quick else ROWS_PER_STEP[workload]
    if workload == "gsm8k":
        assert data is not None
        rows = gsm8k_rows(tokenizer, data / "gsm8k_train_2k.jsonl", each * steps)
    else:
        length = 64 if quick else 512
        ids = tokenizer.encode((ROOT / "examples" / "smart_home" / "train.jsonl").read_text(encoding="utf-8"))
        cut = [ids[at : at + length] for at in range(0, each * steps * length, length)]
        rows = [(row, row) for row in cut]
        assert all(len(row) == length for row in cut), "the demo's text is too short for so many steps"
    return [rows[at : at + each] for at in range(0, each * steps, each)]


def config(work: Path, dtype: str, checkpoint: str, kernels: str = "auto") -> Any:
    from quatrain import InstructConfig

    return InstructConfig(
        lora_rank=RANK, lora_alpha=ALPHA, learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=CLIP,
        clip="global", quantize="nf4", double_quant=True, compute_dtype=dtype, max_seq_len=LONGEST_ROW,
        checkpoint=checkpoint, kernels=kernels, cache_dir=str(work / "cache"),
    )  # fmt: skip


# One side, in its own process.


def write_side(options: argparse.Namespace) -> None:
    """The first step with its checks: in fp32 and alone for the gate, else in the dtype that is timed, followed by the
    timed ones."""
    import torch

    from quatrain.memory.process import peak_resident_bytes

    work, side = options.work, options.side
    torch.set_num_threads(options.threads)
    dtype = "fp32" if options.gate or options.isa != "auto" else "bf16"
    steps: list[Rows] = json.loads((work / "steps.json").read_text(encoding="utf-8"))
    if side in QUATRAIN_SIDES:
        step, gradients, fed = quatrain_side(work, dtype, QUATRAIN_SIDES[side], options.isa)
    else:
        step, gradients, fed = peft_side(work, dtype, **PEFT_SIDES[side])
    loss, norm = step(steps[0])
    result: dict[str, Any] = {"loss": loss, "gradient_norm": norm, "ids": digest(fed(steps[0]))}
    result["adapter_tensors"] = all_have_gradients(side, gradients())
    check(work / "gate.json", side, result, dtype)
    if not options.gate:
        seconds = []
        for rows in steps[1:]:
            began = time.perf_counter()
            step(rows)
            seconds.append(round(time.perf_counter() - began, 3))
        tokens = [sum(len(ids) for ids, _ in rows) for rows in steps[1:]]
        result |= {"tokens": tokens, "seconds": seconds, "peak_memory_mb": round(peak_resident_bytes() / 1e6, 1)}
    (work / f"{side}.json").write_text(json.dumps(result), encoding="utf-8")


Side = tuple[Step, Callable[[], Iterator[tuple[str, Any]]], Callable[[Rows], Rows]]
"""Its step; (name, gradient) of every A and B as the last step left them; the rows as its batches hold them."""


def quatrain_side(work: Path, dtype: str, checkpoint: str, kernels: str) -> Side:
    from quatrain import InstructPipeline
    from quatrain.data.row import Row
    from quatrain.engine.inputs import pack_rows

    pipe = InstructPipeline.from_pretrained(work / "base", config(work, dtype, checkpoint, kernels))
    pipe.load_adapter(work / "adapter")

    def as_rows(rows: Rows) -> list[Row]:
        return [Row(tuple(ids), tuple(labels)) for ids, labels in rows]

    def step(rows: Rows) -> tuple[float, float]:
        result = pipe.train_step(as_rows(rows))
        assert not result.skipped, "the step had no finite gradient"
        return result.loss, result.grad_norm

    def fed(rows: Rows) -> Rows:
        batch = pack_rows(as_rows(rows))
        targets = dict(zip((batch.loss_rows + 1).tolist(), batch.targets.tolist(), strict=True))
        ids, bounds = batch.ids.tolist(), batch.cu_seqlens
        return [(ids[a:b], [targets.get(at, -100) for at in range(a, b)]) for a, b in pairwise(bounds)]

    return step, lambda: iter(pipe.adapters.named_grads().items()), fed


def peft_side(work: Path, dtype: str, *, nf4: bool, checkpointing: bool = False, autocast: bool = False) -> Side:
    import torch

    base, kind = work / ("base" if nf4 else f"plain_{dtype}"), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = peft_model(base, work / "adapter", kind, nf4=nf4, checkpointing=checkpointing)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(rows: Rows) -> tuple[float, float]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == "bf16"):
            total, count = peft_loss(model, rows)
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        return loss.item(), norm.item()

    def fed(rows: Rows) -> Rows:
        ids, labels, _ = padded(rows)
        lengths = [len(row) for row, _ in rows]
        found = [(ids[i, :n].tolist(), labels[i, :n].tolist()) for i, n in enumerate(lengths)]
        # What stands behind a row, and its first token, which nothing predicts, are not learned.
        assert all(bool((labels[i, n:] == -100).all()) for i, n in enumerate(lengths))
        return [(row, [-100, *wanted[1:]]) for row, wanted in found]

    return step, lambda: ((name, parameter.grad) for name, parameter in trained.items()), fed


def digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def all_have_gradients(side: str, gradients: Iterator[tuple[str, Any]]) -> int:
    """How many A and B there are. AssertionError where one has no gradient, or zeros."""
    found = dict(gradients)
    still = [name for name, grad in found.items() if grad is None or not bool(grad.any())]
    assert not still, f"{side}: {len(still)} of {len(found)} adapter tensors have no gradient, first {still[0]}"
    return len(found)


def check(path: Path, side: str, result: dict[str, Any], dtype: str) -> None:
    """Against the fp32 step of the first side, which the first call leaves in `path`. AssertionError where it
    differs."""
    if not path.is_file():
        path.write_text(json.dumps(result), encoding="utf-8")
        return
    want = json.loads(path.read_text(encoding="utf-8"))
    for name in ("ids", "adapter_tensors"):
        assert result[name] == want[name], f"{side}: {name}: {result[name]}, the first side had {want[name]}"
    bounds = {"loss": FP32_LOSS, "gradient_norm": FP32_NORM} if dtype == "fp32" else {"loss": BF16_LOSS}
    for name, bound in bounds.items():
        apart = abs(result[name] - want[name]) / want[name]
        assert apart <= bound, (
            f"{side} in {dtype}: {name} {result[name]:.5f}, the first side in fp32 {want[name]:.5f}: "
            f"{apart:.2%} apart, want at most {bound:.1%}"
        )


# What is printed and kept.


def tokens_per_second(run: dict[str, Any]) -> float:
    return float(sum(run["tokens"]) / sum(run["seconds"]))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the processes, and every value."""
    rates = [round(tokens_per_second(run), 1) for run in runs]
    return {
        "tokens_per_second": median(rates),
        "peak_memory_mb": median(run["peak_memory_mb"] for run in runs),
        "all_tokens_per_second": rates,
        "all_step_seconds": [run["seconds"] for run in runs],
        "step_tokens": runs[0]["tokens"],
        "all_peak_memory_mb": [run["peak_memory_mb"] for run in runs],
        "first_loss": runs[0]["loss"],
        "first_gradient_norm": runs[0]["gradient_norm"],
    }


def show(sides: dict[str, dict[str, Any]]) -> None:
    """Each side, and how the first one compares with it; the ratios are kept beside the numbers."""
    ours = next(iter(sides.values()))
    print(f"{'':16}{'tokens/s':>10}{'ratio':>8}{'peak MB':>10}{'ratio':>8}{'first loss':>12}{'norm':>8}")
    for side, it in sides.items():
        it["speed_ratio"] = round(ours["tokens_per_second"] / it["tokens_per_second"], 3)
        it["memory_ratio"] = round(ours["peak_memory_mb"] / it["peak_memory_mb"], 3)
        print(
            f"{side:16}{it['tokens_per_second']:10,.1f}{it['speed_ratio']:8.2f}{it['peak_memory_mb']:10,.1f}"
            f"{it['memory_ratio']:8.2f}{it['first_loss']:12.4f}{it['first_gradient_norm']:8.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
