"""What a run writes down about itself: `run.json`, and the identity that every checkpoint carries."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quatrain.train.run import Preparation


def identity_of(preparation: Preparation) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that resumes from it."""
    import torch

    settings = preparation.settings
    return {
        "given": settings.given,
        "options": settings.resolved(),
        "data_sha256": _data_hash(preparation),
        "model_sha256": preparation.source.fingerprint(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "started_from": preparation.start.record() if preparation.start is not None else None,
    }


def _data_hash(preparation: Preparation) -> str:
    """SHA-256 over token ids and labels of all rows in order, and over how often an epoch takes them."""
    prepared = preparation.prepared
    weighted = any(share.weight != 1 for share in prepared.shares)  # else it does not matter who gave which rows
    shares = [[share.rows, share.weight] for share in prepared.shares] if weighted else []
    parts = [prepared.train.digest(), prepared.validation.digest(), shares]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def run_record(preparation: Preparation, identity: dict[str, Any], started: str | None = None) -> dict[str, Any]:
    """What `run.json` holds from the start of a run, which is now unless it was `started` earlier."""
    length = preparation.batching.length
    source = preparation.source
    return {
        "started": started or datetime.now().astimezone().isoformat(timespec="seconds"),
        "process": {"pid": os.getpid(), "host": platform.node()},
        "machine": machine(preparation.layout.device),
        "model": {"name": source.name, "family": source.spec.family, "layers": source.spec.num_layers},
        "notes": preparation.notes,
        "samples": [prompt.as_json() for prompt in preparation.prompts],
        "versions": identity["versions"],
        "options": identity["options"],
        "given": identity["given"],
        "model_sha256": identity["model_sha256"],
        "started_from": _without_digests(identity["started_from"]),
        "data_sha256": identity["data_sha256"],
        "data": preparation.prepared.report.as_json(),
        "threads": identity["threads"],
        "kernels": {"name": preparation.layout.backend.name, "reason": preparation.layout.backend.reason},
        "steps": {"total": length.total_steps, "warmup": preparation.schedule.warmup_steps},
        "capacity_tokens": preparation.config.capacity,
        "modules": {name: {"modules": n, "parameters": p} for name, (n, p) in preparation.modules().items()},
        "device": preparation.layout.device,
        "plan": {**preparation.plan.as_json(), "choices": list(preparation.layout.choices)},
    }


def _without_digests(started_from: dict[str, Any] | None) -> dict[str, Any] | None:
    return {name: value for name, value in started_from.items() if name != "lora_B"} if started_from else None


def versions() -> dict[str, str]:
    """Python and the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in ("quatrain", "torch", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine(device: str) -> dict[str, str]:
    """Where a run runs: system, processor and memory, and the GPU where it is on one."""
    found = {"system": platform.platform(), "processor": _processor(), "cores": str(os.cpu_count())}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    if device != "cpu":
        import torch

        found["GPU"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
