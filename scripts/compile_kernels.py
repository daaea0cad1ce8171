"""Compiles every Triton kernel in every shipped configuration to machine code; no GPU is needed.

    python scripts/compile_kernels.py            all architectures and dtypes -> build/kernels.json
    python scripts/compile_kernels.py --subset   one variant of each kernel for three architectures

Each entry of the file says what the compiler made: registers of a thread, shared memory of a block, spilled bytes (on
AMD: spilled registers). Exit code 1 when something does not compile, spills, or takes more shared memory than a block
has. What is compiled stands in each op's `cases` (see quatrain/ops/triton_configs.py).

A run that was interrupted goes on where it was, and a later one builds only what has changed since (`--fresh`: all).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quatrain

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton, which importing quatrain does not
OPS = Path(quatrain.__file__).parent / "ops"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SUBSET = (("sm_75", "fp16"), ("sm_90", "bf16"), ("gfx942", "bf16"))


@dataclass(frozen=True)
class Job:
    """The case numbered `index` of a module's `cases(arch, dtype)`: what a worker process can be sent."""

    module: str
    arch: str
    dtype: str
    index: int


def modules() -> list[str]:
    """The modules that say what to compile."""
    paths = [path for path in sorted(OPS.rglob("triton*.py")) if re.search(r"^def cases\(", path.read_text(), re.M)]
    return [".".join(("quatrain.ops", *path.relative_to(OPS).with_suffix("").parts)) for path in paths]


def jobs(subset: bool, only: str, target: str) -> Iterator[Job]:
    """Every job, or the first variant of each kernel; of kernels with `only` in their name and for `target` alone."""
    from quatrain.ops.triton_configs import CLASSES

    every = [(arch, dtype) for arch in CLASSES for dtype in ("bf16", "fp16", "fp32")]
    every.remove(("sm_75", "bf16"))  # Turing has none
    for arch, dtype in SUBSET if subset else every:
        if target not in ("", arch):
            continue
        seen = set()
        # In the subset, what does not depend on the compute dtype comes along once.
        for kind in (dtype, *(["fp32"] if subset and arch == "sm_90" else [])):
            for module in modules():
                for index, case in enumerate(importlib.import_module(module).cases(arch, kind)):
                    name = case.kernel.__name__
                    if only in name and not (subset and name in seen):
                        yield Job(module, arch, kind, index)
                    seen.add(name)


def fingerprint(job: Job) -> str:
    """Changes with whatever can change what is built: the compiler, the kernel with all that it calls, the case."""
    import triton

    case = importlib.import_module(job.module).cases(job.arch, job.dtype)[job.index]
    parts = (triton.__version__, case.kernel.cache_key, case.types, case.constexprs, case.variant, job.arch, job.dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def build(job: Job) -> dict[str, Any]:
    """Compiles one case; the entry for the report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = importlib.import_module(job.module).cases(job.arch, job.dtype)[job.index]
    cuda = job.arch.startswith("sm_")
    target = GPUTarget("cuda", int(job.arch[3:]), 32) if cuda else GPUTarget("hip", job.arch, 64)
    options = {name: case.constexprs[name] for name in OPTIONS if name in case.constexprs}
    entry = {"kernel": case.kernel.__name__, "variant": case.variant, "dtype": job.dtype, "target": job.arch}
    entry |= {"configuration": case.constexprs, "module": job.module}
    log, start = io.StringIO(), time.monotonic()
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    try:
        with redirect_stdout(log):
            made = triton.compile(ASTSource(case.kernel, *describe(case)), target=target, options=options)
    except Exception as raised:  # noqa: BLE001 - whatever the compiler raises is a line of the report
        cause: BaseException = raised
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return entry | {"error": f"{type(cause).__name__}: {cause}", "where": str(raised)[-2000:]}
    entry |= resources(log.getvalue() if cuda else made.asm["amdgcn"], cuda)
    return entry | {"shared": made.metadata.shared, "seconds": round(time.monotonic() - start, 2)}


def describe(case: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Triton's signature, constants and divisibility hints of a case."""
    words, signature, hints = case.types.split(), {}, {}
    constants = {name: value for name, value in case.constexprs.items() if name not in OPTIONS}
    for number, name in enumerate(case.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        word = words.pop(0)
        if word in ("-", "1"):
            signature[name], constants[name] = "constexpr", None if word == "-" else 1
        else:
            signature[name] = word.split(":")[0]
            if word.startswith("*") or word.endswith(":16"):
                hints[(number,)] = [["tt.divisibility", 16]]
    if words:
        raise ValueError(f"{case.kernel.__name__} {case.variant}: types left over: {' '.join(words)}")
    return signature, constants, hints


def resources(text: str, cuda: bool) -> dict[str, int]:
    """Registers and spills, from ptxas' log or the AMD assembly."""

    def numbers(pattern: str) -> list[int]:
        found = [int(value) for value in re.findall(pattern, text)]
        if not found:
            raise ValueError(f"the compiler's output has no {pattern!r}")
        return found

    if cuda:
        spills = numbers(r"(\d+) bytes spill stores") + numbers(r"(\d+) bytes spill loads")
        return {"registers": max(numbers(r"Used (\d+) registers")), "spills": sum(spills)}
    spills = numbers(r"\.vgpr_spill_count:\s+(\d+)") + numbers(r"\.private_segment_fixed_size:\s+(\d+)")
    return {"registers": max(numbers(r"\.vgpr_count:\s+(\d+)")), "spills": sum(spills)}


def complaint(entry: dict[str, Any]) -> str | None:
    """What is wrong with an entry, if anything."""
    from quatrain.ops.triton_configs import CLASSES, SHARED_KB

    name = " ".join(filter(None, (entry["target"], entry["dtype"], entry["kernel"], entry["variant"])))
    if "error" in entry:
        return f"{name}: {entry['error'].splitlines()[-1]}"
    limit = SHARED_KB[CLASSES[entry["target"]]] * 1024
    if entry["shared"] > limit:
        return f"{name}: {entry['shared']} bytes of shared memory, a block has {limit}"
    return f"{name}: spills {entry['spills']}, {entry['registers']} registers" if entry["spills"] else None


def summary(entries: list[dict[str, Any]]) -> Iterator[str]:
    """One line a kernel."""
    yield f"{'kernel':<28}{'builds':>7}{'registers':>11}{'shared':>9}{'spills':>8}"
    for kernel in sorted({entry["kernel"] for entry in entries}):
        built = [entry for entry in entries if entry["kernel"] == kernel and "error" not in entry]
        most = {key: max((entry[key] for entry in built), default=0) for key in ("registers", "shared", "spills")}
        yield f"{kernel:<28}{len(built):>7}{most['registers']:>11}{most['shared']:>9}{most['spills']:>8}"


def build_all(wanted: list[Job], out: Path, processes: int, fresh: bool) -> list[dict[str, Any]]:
    """The entry of every job in order: taken over from `out` where nothing has changed, else built, and kept beside it
    until all are there."""
    partial, known = out.with_suffix(".partial"), dict[str, dict[str, Any]]()
    if fresh:
        partial.unlink(missing_ok=True)
    elif out.exists():
        known = {entry["fingerprint"]: entry for entry in json.loads(out.read_text()) if "error" not in entry}
    if partial.exists():
        lines = partial.read_text().split("\n")[:-1]  # what follows the last line end is a line cut short
        known |= {entry["fingerprint"]: entry for entry in map(json.loads, lines)}
        partial.write_text("".join(f"{line}\n" for line in lines))
    marks = [fingerprint(job) for job in wanted]
    out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool, open(partial, "a", encoding="utf-8") as kept:
        made = {pool.submit(build, job): mark for job, mark in zip(wanted, marks, strict=True) if mark not in known}
        for done in as_completed(made):
            entry = known[made[done]] = done.result() | {"fingerprint": made[done]}
            print(json.dumps(entry), file=kept, flush=True)
    entries = [known[mark] for mark in marks]
    out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    partial.unlink()
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset", action="store_true", help="one variant of each kernel, three architectures")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    parser.add_argument("--target", default="", help="one architecture, such as sm_90")
    parser.add_argument("--out", type=Path, default=Path("build/kernels.json"), help="where the report goes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--fresh", action="store_true", help="build everything again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        entries = build_all(list(jobs(args.subset, args.only, args.target)), args.out, args.jobs, args.fresh)
    problems = [problem for entry in entries if (problem := complaint(entry))]
    print(*summary(entries), sep="\n")
    print(*problems, sep="\n")
    print(f"{len(entries)} builds, {len(problems)} problems -> {args.out}")
    return 1 if problems or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
