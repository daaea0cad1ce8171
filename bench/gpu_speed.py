"""The sections of `scripts/gpu_check.py` that nothing may run beside: memory, speed, compute-sanitizer. Whatever is
measured has a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_sections import DTYPES, Row, Where, looked_at

from quatrain.bench.steps import Request, measure_apart
from quatrain.bench.steps import row as step_row
from quatrain.config import GenerateConfig
from quatrain.model.shapes import num_parameters, shape_spec
from quatrain.profile.limits import Limits, best_rate

SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
TARGETS = {"qwen3-0.6b": 36_000, "qwen3-1.7b": 36_000, "qwen3-4b": 18_000, "qwen3-8b": 11_000}
"""Tokens a second that an H200 should reach."""
TOKENS, ROW = 4096, 2048
PLAN_BOUND = 0.03
DECODED = SHAPES[:2]
"""Shapes whose decoding is measured too."""


def memory(where: Where) -> Iterator[Row]:
    if not where.cuda:
        yield {"check": "memory taken against the plan", "ok": None, "message": "needs a GPU"}
        return
    for checkpoint in ("block",) if where.quick else ("block", "auto"):
        shape = SHAPES[0] if where.quick else SHAPES[1]
        look = partial(taken, where, shape, checkpoint)
        yield looked_at("memory taken against the plan", look, shape=shape, checkpoint=checkpoint)


def taken(where: Where, shape: str, checkpoint: str) -> Row:
    """Without graphs: what the plan has for them is a limit, not a size."""
    measured = measure_apart(request(where, shape, 2, checkpoint=checkpoint, cuda_graph="off"))
    if "error" in measured:
        return {"ok": False, "message": measured["error"]}
    planned, used = measured["planned_bytes"], measured["measured_peak_bytes"]
    apart = used / planned - 1
    return {"ok": abs(apart) <= PLAN_BOUND, "planned_bytes": planned, "measured_bytes": used, "apart": apart}


def request(where: Where, shape: str, repeats: int, **options: Any) -> Request:
    tokens, row = (TOKENS, ROW) if where.cuda else (64, 32)
    options = {"device": where.device, "lora_rank": 16, **options}
    return Request(shape, shape, tokens, row, os.cpu_count() or 1, repeats, options)


def speed(where: Where) -> Iterator[Row]:
    """Smallest shape first; a shape is left out when the time that is left is less than it should take."""
    found = looked_at("limits", partial(apart, gpu_limits, where) if where.cuda else lambda: {"ok": None})
    yield found
    limits = Limits(*(found.get(name, math.nan) for name in ("flops_per_second", "bytes_per_second")))
    graph_modes = {"quatrain": "on", "quatrain uncaptured": "off"} if where.cuda else {"quatrain": "auto"}
    shapes = SHAPES[: 1 if where.quick else None] if where.cuda else ("smollm2-135m",)
    seconds, before = 0.0, shapes[0]
    for shape in shapes:
        growth = num_parameters(shape_spec(shape)) / num_parameters(shape_spec(before))
        if time.monotonic() + seconds * (1 + growth) / 2 > where.deadline:
            yield {"check": shape, "ok": None, "message": f"left out: {before} took {seconds:.0f} s"}
            continue
        start = time.monotonic()
        for side, mode in graph_modes.items():
            yield looked_at(side, partial(our_speed, where, shape, mode, limits), shape=shape)
        for side in ("peft", "unsloth"):
            found = looked_at(side, partial(their_speed, where, side, shape), shape=shape)
            yield {**found, "ok": None}  # a side that fails is no fault of ours
        if shape in DECODED or not where.cuda:
            yield looked_at("decoding", partial(apart, partial(decoding_speed, shape=shape), where), shape=shape)
        seconds, before = time.monotonic() - start, shape


def apart(look: Callable[[Where], Row], where: Where) -> Row:
    """In a process that is gone, with what it held of the GPU, before anything else is measured."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(look, where).result()


def gpu_limits(where: Where) -> Row:
    """The best bf16 (before 8.0: fp16) product and the best copy."""
    dtype = DTYPES[where.dtypes[0]]
    a = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)

    def copy() -> float:
        b.copy_(a)
        torch.cuda.synchronize()
        return 2.0 * a.nbytes

    product, traffic = best_rate(where.backend(dtype).peak_product(dtype), 20), best_rate(copy, 20)
    return {"ok": True, "dtype": str(dtype), "flops_per_second": product, "bytes_per_second": traffic}


def our_speed(where: Where, shape: str, mode: str, limits: Limits) -> Row:
    measured = measure_apart(request(where, shape, 10 if where.cuda else 1, cuda_graph=mode))
    if "error" in measured:
        return {"ok": False, "message": measured["error"]}
    target = {"h200_target": TARGETS[shape]} if shape in TARGETS else {}
    return {"ok": True, **step_row(measured, limits), **target}


def decoding_speed(where: Where, shape: str) -> Row:
    """Greedy tokens a second of one row and of eight, behind prompts of 64 tokens."""
    count, length = (128, 64) if where.cuda else (2, 4)
    pipeline = where.open(
        shape_spec(shape), max_seq_len=256, micro_batch_tokens=2048 if where.cuda else 256, lora_rank=16
    )
    found: Row = {"ok": True}
    for rows in (1, 8):
        prompts = [list(range(1, 1 + length))] * rows
        for new in (8, count):  # the first time compiles and captures
            start = time.perf_counter()
            pipeline.generate_ids(prompts, GenerateConfig(max_new_tokens=new))
            seconds = time.perf_counter() - start
        found[f"tokens_per_second_{rows}"] = rows * count / seconds
    return found


def their_speed(where: Where, side: str, shape: str) -> Row:
    """Of PEFT without gradient checkpointing where that fits, else with it."""
    asked = request(where, shape, 10 if where.cuda else 1)
    words = [shape, asked.tokens, asked.row, where.device, asked.repeats]
    script, message = Path(__file__).with_name("gpu_peers.py"), ""
    for name in (side, f"{side}_checkpointing") if side == "peft" else (side,):
        done = run([sys.executable, script, name, *words], where)
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            return {"message": f"not installed: {found['absent']}"} if "absent" in found else {"side": name, **found}
        message = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"message": f"failed: {message}"}


def run(words: list[Any], where: Where, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command, given the time that is left. Raises TimeoutExpired when that is over."""
    left = max(1.0, where.deadline - time.monotonic())
    return subprocess.run(list(map(str, words)), env=os.environ | environ, capture_output=True, text=True, timeout=left)


def sanitizer(where: Where) -> Iterator[Row]:
    check = "compute-sanitizer memcheck over the kernels"
    if not where.cuda or not shutil.which("compute-sanitizer"):
        yield {"check": check, "ok": None, "message": "not installed" if where.cuda else "needs a GPU"}
    else:
        yield looked_at(check, partial(sanitized, where))


def sanitized(where: Where) -> Row:
    script = Path(__file__).resolve().parents[1] / "scripts/gpu_check.py"
    words = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, script]
    words += ["--quick", "--section", "kernels_fp16", "--out", os.devnull]
    try:  # with torch's allocator it would see one large allocation
        done = run(words, where, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    except subprocess.TimeoutExpired as late:
        return {"ok": None, "message": f"not done after {late.timeout:.0f} s"}
    return {"ok": done.returncode == 0, "message": (done.stdout.strip().splitlines() or ["it said nothing"])[-1]}
