"""Whether vLLM would load an adapter folder as it is: its LoRA loader's rules, checked on headers and configuration.

The rules are those of vLLM 0.14 (docs.vllm.ai/en/v0.14.0 and its repository), each named below by the file there that
holds it. vLLM itself is not needed, and no weight is read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quatrain.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from quatrain.checkpoint.safetensors_file import SafetensorsFile
from quatrain.errors import CheckpointError, ModelError
from quatrain.model.spec import LINEARS

VERSION = "0.14"
# vllm/config/lora.py: `--max-lora-rank` takes only these, and 16 unless told otherwise. It takes 1 as well, which
# versions before 0.12 refuse: an adapter of rank 1 is served under 8.
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_MAX_RANK = 16
# vllm/lora/utils.py: every linear of the model, and what its class calls embedding modules. Those exist for Llama and
# Mistral, for Qwen2 and Qwen3 in recent versions only.
EMBEDDINGS = ("embed_tokens", "lm_head")
# vllm/lora/peft_helper.py: required keys of adapter_config.json; all others but those checked here are not read, so
# that what they ask for is silently left out.
REQUIRED = ("r", "lora_alpha", "target_modules")
UNREAD = ("rank_pattern", "alpha_pattern", "fan_in_fan_out")
# vllm/lora/utils.py: weights of the base that PEFT saved along are passed over.
BASE_WEIGHTS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


@dataclass(frozen=True)
class Verdict:
    """`problems` are what vLLM refuses, or would compute otherwise; `flags` are what its server needs to be given."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: str = ""

    @property
    def loads(self) -> bool:
        return not self.problems

    def lines(self) -> list[str]:
        """For people: the verdict first."""
        if self.loads:
            return [f"loads in vLLM {VERSION}: {self.flags}", *self.notes]
        return [f"vLLM {VERSION} does not take it: {'; '.join(self.problems)}", *self.notes]

    def as_json(self) -> dict[str, Any]:
        return {"version": VERSION, "loads": self.loads, **asdict(self)}


def check(folder: str | Path) -> Verdict:
    """The verdict on an adapter folder. Raises CheckpointError where there is no readable adapter at all."""
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        shapes = {name: info.shape for name, info in SafetensorsFile(folder / WEIGHTS_FILE).tensors.items()}
    except (OSError, ValueError, ModelError) as error:
        raise CheckpointError(f"{folder}: no adapter that can be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG_FILE}: want a JSON object, got {type(config).__name__}")
    problems = [*_features(config), *_names(config, shapes)]
    notes = [f"{name} is adapted: only models whose class lists it take that" for name in _embeddings(shapes)]
    rank = config.get("r", DEFAULT_MAX_RANK)
    fits = [size for size in MAX_RANKS if isinstance(rank, int) and rank <= size]
    flags = "--enable-lora" + (f" --max-lora-rank {fits[0]}" if fits and fits[0] != DEFAULT_MAX_RANK else "")
    return Verdict(problems, notes, flags)


def _features(config: dict[str, Any]) -> list[str]:
    """What vllm/lora/peft_helper.py refuses in the configuration, and what it would leave out."""
    found = [f"{name} is missing" for name in REQUIRED if config.get(name) is None]
    if config.get("modules_to_save"):
        found.append(f"modules_to_save={config['modules_to_save']!r} (trained norms, embeddings or heads)")
    if config.get("use_dora"):
        found.append("use_dora=True")
    if config.get("bias", "none") != "none":
        found.append(f"bias={config['bias']!r}")
    found += [f"{name}={config[name]!r} would be ignored" for name in UNREAD if config.get(name)]
    rank = config.get("r")
    if isinstance(rank, int) and rank > MAX_RANKS[-1]:
        found.append(f"r={rank} is above {MAX_RANKS[-1]}, the largest max_lora_rank")
    return found


def _names(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What vllm/lora/lora_model.py refuses among the tensors: their names decide, not target_modules."""
    found, parts_of, rank = [], defaultdict(set), config.get("r")
    for name, shape in shapes.items():
        if name.endswith(BASE_WEIGHTS):
            continue
        module, part = _parse(name)
        if part is None:
            found.append(f"{name} is no LoRA weight's name")
            continue
        parts_of[module].add(part)
        if module.rpartition(".")[2] not in (*LINEARS, *EMBEDDINGS):
            found.append(f"{module} is not one of {', '.join((*LINEARS, *EMBEDDINGS))}")
        if part == "A" and shape[0] != rank:
            found.append(f"{name} has rank {shape[0]}, r is {rank}")
    found += [f"{module} has a lora_{next(iter(parts))} alone" for module, parts in parts_of.items() if len(parts) == 1]
    return found if len(found) <= 4 else [*found[:4], f"and {len(found) - 4} more"]


def _parse(name: str) -> tuple[str, str | None]:
    """(module, "A" or "B") of a tensor's name, as vllm/lora/utils.py reads it; None where it does not."""
    parts = name.removeprefix("base_model.model.").split(".")
    if parts[-1] == "weight" and parts[-2:-1] in (["lora_A"], ["lora_B"]):
        return ".".join(parts[:-2]), parts[-2][-1]
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[:-1]), parts[-1][-1]
    return name, None


def _embeddings(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    modules = {_parse(name)[0].rpartition(".")[2] for name in shapes if _parse(name)[1] is not None}
    return [name for name in EMBEDDINGS if name in modules]
