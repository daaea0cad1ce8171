"""Checkpoints of a run: everything needed to go on bit for bit, in folders named by optimizer step.

`checkpoints/step-000040/` holds `state.safetensors` (adapter masters, both moments, counters; keyed by parameter name),
`progress.json` (where the run stood, its options and the hashes of its data and model) and the manifest. Nothing in it
is an absolute path: a run folder can be moved.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.atomic import recover, staged_folder, verify_folder
from quatrain.errors import CheckpointError

if TYPE_CHECKING:
    import torch

STATE = "state.safetensors"
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, verified against its manifest; tensors are not read yet."""

    path: Path
    step: int
    progress: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The saved state, on the CPU, dtypes as saved."""
        from safetensors.torch import load_file

        return load_file(self.path / STATE)


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint: step-000040."""
    return f"step-{step:06d}"


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], progress: dict[str, Any]) -> Path:
    """Write `folder/step-…` atomically and return its path. `progress` must be JSON.

    Raises CheckpointError when a tensor holds a non-finite value (named; nothing is written) or the disk refuses.
    """
    from safetensors.torch import save_file

    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"step {step}: {len(bad)} tensors hold non-finite values, first {bad[0]}; nothing was saved",
            hint="resume from the checkpoint before, with a lower learning rate (--override)",
        )
    target = folder / step_name(step)
    with staged_folder(target) as staging:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, staging / STATE)
        (staging / PROGRESS).write_text(json.dumps({"step": step, **progress}, indent=1, allow_nan=False))
    return target


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoint folders, by step as a number; complete or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def newest_complete(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and one line for each newer one that is not (why it was passed over)."""
    passed_over = []
    for leftover in folder.glob(".step-*.previous") if folder.is_dir() else ():
        recover(folder / leftover.name[1 : -len(".previous")])
    for step, path in reversed(checkpoints_in(folder)):
        try:
            verify_folder(path)
            progress = json.loads((path / PROGRESS).read_text())
        except (CheckpointError, OSError, ValueError) as error:
            passed_over.append(f"passing over checkpoint {path.name}: {error}")
            continue
        return Checkpoint(path, step, progress), passed_over
    return None, passed_over


def rotate(folder: Path, keep: int, best_step: int | None) -> list[Path]:
    """Delete all but `keep` checkpoints: the newest one and the best one in any case, then the newest of the others.
    Returns what was deleted.

    Call it after the newest is complete: an old checkpoint is never deleted before its successor exists.
    """
    *others, _newest = checkpoints_in(folder)
    spare = keep - 1 - sum(step == best_step for step, _ in others)
    old = [path for step, path in others if step != best_step]
    old = old[: len(old) - max(spare, 0)]
    for path in old:
        shutil.rmtree(path)
    return old


def check_same_parameters(saved: Iterable[str], wanted: Iterable[str], where: Path) -> None:
    """Raise CheckpointError that names the differing entries when two states are not about the same parameters."""
    have, want = set(saved), set(wanted)
    if have == want:
        return
    parts = []
    if missing := _modules(want - have):
        parts.append(f"the checkpoint has none for {missing}")
    if extra := _modules(have - want):
        parts.append(f"the run has no {extra}")
    raise CheckpointError(
        f"{where}: its state belongs to other parameters: " + "; ".join(parts),
        hint="resume with the lora_targets, lora_rank and train_norms of the saved run, or start a new run",
    )


def _modules(names: set[str], most: int = 6) -> str:
    """`o_proj, up_proj`: the modules that parameter names belong to."""
    modules = sorted({next((p for p in name.split(".") if p.endswith(("_proj", "norm"))), name) for name in names})
    return ", ".join(modules[:most]) + (f" and {len(modules) - most} more" if len(modules) > most else "")
