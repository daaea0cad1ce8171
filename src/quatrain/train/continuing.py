"""Going on from an adapter that exists: one of ours, or one that PEFT has saved.

What the adapter is (rank, alpha, targets, rsLoRA, dropout, trained norms) comes from its own files; its weights are
the start, the optimizer is fresh. A checkpoint remembers the start, so that a resumed run needs the folder no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.peft import WEIGHTS_FILE, SavedAdapter, check_base, read_adapter
from quatrain.config import InstructConfig, build
from quatrain.errors import ConfigError
from quatrain.model.adapters import match_targets
from quatrain.train.preflight import find_adapter
from quatrain.train.settings import Settings

if TYPE_CHECKING:
    import torch

    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.tokenizer import Tokenizer

_B = ".lora_B.weight"


@dataclass(frozen=True)
class Start:
    """An adapter that a run begins with."""

    saved: SavedAdapter
    notices: list[str]

    def record(self) -> dict[str, Any]:
        """Where the run came from, as JSON values: for `run.json`, and for a resumed run to compare with."""
        return {
            "folder": str(self.saved.folder),
            "weights_sha256": hashlib.sha256((self.saved.folder / WEIGHTS_FILE).read_bytes()).hexdigest(),
            "base_name": self.saved.base_name,
            "base_fingerprint": self.saved.base_fingerprint,
            "lora_B": digests(self.saved.tensors),
        }


def start_from(settings: Settings, source: ModelSource) -> tuple[Settings, Start]:
    """The settings with the adapter's own options in them, and the adapter. Reads it in full.

    Raises ConfigError that names every option that was given with another value than the adapter's, CheckpointError
    for an adapter that cannot be used or belongs to another base.
    """
    given = Path(str(settings.run.adapter)).expanduser()
    folder = find_adapter(given)
    if folder is None:
        raise ConfigError(
            f"adapter: {given} holds no adapter_config.json", hint="give an adapter folder or a run folder"
        )
    out = Path(settings.run.out).expanduser().resolve()
    if settings.run.overwrite and out in folder.resolve().parents:
        raise ConfigError(
            f"adapter: {folder} lies in {settings.run.out}, which --overwrite would empty before there is another",
            hint="choose another --out",
        )
    saved = read_adapter(folder)
    notices = check_base(saved, source.fingerprint())
    own = {**saved.options(), "lora_dropout": saved.dropout}
    asked = settings.engine.model_dump()
    wrong = [name for name in own if name in settings.given and not _same(name, asked, own, source)]
    if wrong:
        raise ConfigError(
            f"adapter {folder} was trained with other options: "
            + "; ".join(f"{name}: {own[name]} there, {asked[name]} given" for name in wrong),
            hint="leave them out: they come from the adapter",
        )
    engine = build(InstructConfig, {**settings.engine.model_dump(exclude_unset=True), **own}, where=f"adapter {folder}")
    return replace(settings, engine=engine, given={**settings.given, **own}), Start(saved, notices)


def other_template(start: Start, tokenizer: Tokenizer) -> list[str]:
    """A line when the adapter carries another chat template than the one that its training now goes on with."""
    own = type(tokenizer).from_folder(start.saved.folder)
    if own is None or own.chat_template is None or own.chat_template == tokenizer.chat_template:
        return []
    return [f"the adapter in {start.saved.folder} was trained with another chat template (see --chat-template)"]


def _same(name: str, asked: Mapping[str, Any], own: Mapping[str, Any], source: ModelSource) -> bool:
    if name != "lora_targets":
        return bool(asked[name] == own[name])
    return match_targets(source.spec, asked[name]) == match_targets(source.spec, own[name])


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """A digest of every B by module name; None for one that is all zero, as an adapter is before its first update."""
    found: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        if name.endswith(_B):
            content = tensor.float().contiguous().numpy().tobytes()
            found[name.removesuffix(_B)] = hashlib.sha256(content).hexdigest()[:16] if tensor.any() else None
    return found
