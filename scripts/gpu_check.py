"""Does the CUDA path work on this GPU, and how fast is it? One command, under ten minutes, no network.

    python scripts/gpu_check.py                      # everything; writes bench/results/gpu_check_<gpu>.json
    python scripts/gpu_check.py --quick              # small shapes only
    python scripts/gpu_check.py --only kernels,graphs
    python scripts/gpu_check.py --device cpu         # without a GPU: what Triton's interpreter can rehearse of it

The sections, each in a process of its own, so that one that crashes or hangs leaves the others their turn:

    environment  GPU, driver, versions, memory
    kernels      every Triton kernel against the reference op on the CPU, per dtype, every way to multiply by a weight
    gradients    loss and gradients of small models against the CPU in fp32
    graphs       20 steps captured and not captured, with changing lr, lengths and accumulation: equal bits
    decoding     greedy tokens against the CPU; captured and not: equal tokens, greedy and sampled, and no host
                 synchronisation
    sync         no host synchronisation inside a step
    memory       the memory taken against the plan
    speed        tokens/s and memory of Qwen3 shapes with random weights, beside PEFT + bitsandbytes and Unsloth
    sanitizer    NVIDIA's compute-sanitizer over the kernels, where it is installed and time is left

Exit status 1 when a check failed. What is not installed is reported and is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = ("environment", "kernels_bf16", "kernels_fp16", "kernels_fp32", "gradients", "graphs", "decoding", "sync")
ALONE = ("memory", "speed", "sanitizer")
"""Nothing else may run beside these."""
NEAR_END = 5
"""Seconds that writing the report may take."""

Row = dict[str, Any]
"""What one check found: `check`, `ok` (None: it could not be made), numbers, perhaps a `message`."""


def main() -> int:
    options = parse()
    sys.path.insert(0, str(ROOT / "bench"))
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if options.section:
        return run_section(options)
    from quatrain.engine.setup import cuda_missing

    if options.device == "cuda" and (missing := cuda_missing()) is not None:
        print(f"gpu_check: no GPU to check: {missing}; `--device cpu` rehearses what can be without one")
        return 1
    report = check(options)
    out = options.out or ROOT / "bench/results" / f"gpu_check_{report['device']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [section["name"] for section in report["sections"] if section["status"] == "failed"]
    print(f"{report['seconds']:.0f} s, {'failed: ' + ', '.join(failed) if failed else 'nothing failed'} -> {out}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    names = [*TOGETHER, *ALONE]

    def chosen(text: str) -> list[str]:
        found = [name for name in names if any(name == part or name.startswith(f"{part}_") for part in text.split(","))]
        if not found:
            raise argparse.ArgumentTypeError(f"want some of {', '.join(names)}, got {text!r}")
        return found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--only", type=chosen, default=names, metavar="SECTION,...", help="kernels: all dtypes")
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    parser.add_argument("--budget", type=float, default=570, help="seconds; what no longer fits is skipped")
    parser.add_argument("--out", type=Path, help="the report; default: bench/results/gpu_check_<gpu>.json")
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    return parser.parse_args()


# The parent: sections in processes, the table, the report.


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen sections and prints each when it is over."""
    import torch

    start = time.monotonic()
    end, cuda = start + options.budget - NEAR_END, options.device == "cuda"
    sections = []
    with ThreadPoolExecutor(4 if cuda else 1) as pool:
        for done in pool.map(lambda name: apart(name, options, end), [n for n in TOGETHER if n in options.only]):
            sections.append(shown(done))
    for name in ALONE:
        if name in options.only:
            sections.append(shown(apart(name, options, end)))
    name = torch.cuda.get_device_name() if cuda else "cpu rehearsal"
    return {
        "device": re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"),
        "command": " ".join(sys.argv),
        "quick": options.quick,
        "seconds": time.monotonic() - start,
        "sections": sections,
    }


def apart(name: str, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """A section in a fresh process, with the rows that it wrote before it ended, however it ended."""
    start, late = time.monotonic(), False
    left = end - start
    if left < NEAR_END:
        return {"name": name, "status": "skipped", "seconds": 0.0, "message": "the time is used up", "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        words = [sys.executable, __file__, "--section", name, "--device", options.device, "--out", str(rows)]
        words += ["--budget", str(left), *(["--quick"] if options.quick else [])]
        threads = {} if name in ALONE else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4))}
        with log.open("w") as errors:
            child = subprocess.Popen(
                words, env=os.environ | threads, stdout=errors, stderr=errors, start_new_session=True
            )
            try:
                child.wait(left)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # it may have started others
        code, message = child.wait(), f"stopped after {left:.0f} s" if late else ""
        found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
        if code and not message:
            message = (log.read_text().strip().splitlines() or [f"ended with status {code}"])[-1]
    wrong = bool(code) or any(row["ok"] is False for row in found)
    status = "failed" if wrong else "ok" if any(row["ok"] for row in found) else "skipped"
    return {"name": name, "status": status, "seconds": time.monotonic() - start, "message": message, "rows": found}


def shown(section: dict[str, Any]) -> dict[str, Any]:
    """Prints a section's lines: all that failed or that hold figures to read, and how many others were right."""
    rows = section["rows"]
    right = sum(row["ok"] is True for row in rows)
    print(f"{section['name']:<14}{section['status']:<9}{section['seconds']:6.1f} s  {right} of {len(rows)} right")
    if section["message"]:
        print(f"    {section['message']}")
    for row in rows:
        if row["ok"] is not True or not section["name"].startswith("kernels"):
            print("    " + "  ".join([mark(row["ok"]), *(cell(key, row[key]) for key in row if key not in HIDDEN)]))
    worst = max((row for row in rows if "error" in row), key=lambda row: row["error"] / row["bound"], default=None)
    if worst is not None:
        print(f"    nearest to its bound: {worst['check']}: {worst['error']:.1e} of {worst['bound']:.1e}")
    sys.stdout.flush()
    return section


HIDDEN = ("ok", "ops", "spans", "all_ms", "outputs")


def mark(ok: bool | None) -> str:
    return {True: "right", False: "WRONG", None: "-    "}[ok]


def cell(key: str, value: Any) -> str:
    if key in ("check", "message"):
        return str(value)
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {value / 2**20:,.0f} MiB"
    return f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"


# The child: one section.


def run_section(options: argparse.Namespace) -> int:
    """Writes a line of JSON for each row as soon as it is there."""
    import gpu_sections
    import gpu_speed

    where = gpu_sections.Where(options.device, options.quick, time.monotonic() + options.budget - NEAR_END)
    name, _, dtype = options.section.partition("_")
    module = gpu_speed if name in ALONE else gpu_sections
    rows: Iterator[Row] = getattr(module, name)(where, *([dtype] if dtype else []))
    with options.out.open("a", encoding="utf-8") as out:
        for row in rows:
            print(
                json.dumps({key: None if value != value else value for key, value in row.items()}), file=out, flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
