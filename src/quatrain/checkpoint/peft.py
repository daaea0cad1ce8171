"""Adapters in PEFT's format, out and in: `adapter_config.json` and `adapter_model.safetensors`.

Tensors are fp32 under PEFT's names (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`), the scale
alpha / r stays in the configuration and is never folded into B, and no base weight or embedding is stored. The
fingerprint of the base model travels in the safetensors header: PEFT would warn about a key of its own in
`adapter_config.json`.

A folder is written beside its place, synced, read back and compared bit for bit, and only then renamed into place.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.atomic import staged_folder
from quatrain.checkpoint.names import EMBED, HEAD
from quatrain.errors import CheckpointError
from quatrain.model.spec import LINEARS

if TYPE_CHECKING:
    import torch

    from quatrain.config import InstructConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FINGERPRINT_KEY = "quatrain_base_fingerprint"

_LORA_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(\w+\.\w+))\.lora_([AB])\.weight")
_DEFAULT_SPELLING = re.compile(
    r"(\.lora_[AB])\.default\.weight$"
)  # an adapter's name inside PEFT, which some files keep
_NORM_NAME = re.compile(r"base_model\.model\.model\.(?:layers\.\d+\.(?:\w+\.)?)?(\w*norm)\.weight")

# Keys of adapter_config.json that do not change what the adapter computes once its tensors are matched by name.
_HARMLESS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "ensure_weight_tying", "runtime_config", "trainable_token_indices",
}  # fmt: skip
# Initialisations that leave the base weights alone; pissa, olora, corda, loftq and lora_ga rewrite them.
_HARMLESS_INIT = {True, False, "gaussian", "eva", "orthogonal", None}


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter folder's content, each file checked on its own. `tensors` are fp32 under PEFT's names.

    What it brings for the base's embedding and head (`checkpoint.trained_rows`) is under the base's names: `embeddings`
    stand for the whole tensor, `rows` (ids, values [len(ids), H]) for some of its rows; `tied` if PEFT was told to keep
    the two one."""

    folder: Path
    base_name: str
    base_fingerprint: str | None
    rank: int
    alpha: float
    use_rslora: bool
    targets: list[str] | str
    tensors: dict[str, torch.Tensor]
    dropout: float = 0.0
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[list[int], torch.Tensor]] = field(default_factory=dict)
    tied: bool = False

    @property
    def brings(self) -> list[str]:
        """The tensors of the base that this adapter changes otherwise than by LoRA, or `[]`; trained norms aside."""
        return [name for name in (EMBED, HEAD) if name in self.embeddings or name in self.rows]

    @property
    def train_norms(self) -> bool:
        return any(_NORM_NAME.fullmatch(name) for name in self.tensors)

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def options(self) -> dict[str, Any]:
        """The `InstructConfig` options under which this adapter fits."""
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "lora_targets": self.targets,
            "train_norms": self.train_norms,
        }


def save_adapter(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: InstructConfig,
    *,
    num_layers: int,
    base_name: str,
    base_fingerprint: str,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write an adapter folder that PEFT loads with equal logits; replaces an older one only when complete.

    `tensors` are the fp32 masters by PEFT name; `files` (tokenizer, template) are carried along byte for byte. Raises
    CheckpointError for a non-finite tensor, for a folder with anything but an adapter in it, and when what was written
    does not read back bit for bit.
    """
    import torch
    from safetensors.torch import save

    folder = Path(folder).absolute()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} is not empty and holds no adapter", hint="choose a new folder for the adapter")

    if not tensors:
        raise CheckpointError(f"adapter {folder}: there is no tensor to save")
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise CheckpointError(
            f"adapter {folder}: not saved, {len(bad)} tensors hold NaN or infinity: {_some(bad)}",
            hint="resume from the last checkpoint with a lower learning rate",
        )
    masters = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    text = json.dumps(_peft_config(masters, config, num_layers, base_name), indent=2, sort_keys=True) + "\n"
    weights = save(masters, metadata={"format": "pt", FINGERPRINT_KEY: base_fingerprint})
    with staged_folder(folder) as stage:
        for name, content in {**(files or {}), WEIGHTS_FILE: weights, CONFIG_FILE: text.encode()}.items():
            (stage / name).write_bytes(content)
        _compare(read_adapter(stage), masters, config, base_fingerprint)


def _peft_config(
    tensors: Mapping[str, torch.Tensor], config: InstructConfig, num_layers: int, base_name: str
) -> dict[str, Any]:
    """The keys that every PEFT version since 0.7 knows; newer versions fill in their defaults without a warning."""
    norms = sorted({match[1] for name in tensors if (match := _NORM_NAME.fullmatch(name))})
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "auto_mapping": None,
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": target_modules(tensors, num_layers),
        "modules_to_save": norms or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def target_modules(names: Iterable[str], num_layers: int | None) -> list[str] | str:
    """What to write as `target_modules` so that PEFT matches exactly the modules of `names`.

    A list of last names when each of them is adapted in all layers, else one full-match regular expression.
    """
    layers_of: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := _LORA_NAME.fullmatch(name):
            layers_of[match[3]].add(int(match[2]))
    if num_layers is not None and all(layers == set(range(num_layers)) for layers in layers_of.values()):
        return sorted(module.rpartition(".")[2] for module in layers_of)
    modules_of: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for module, layers in sorted(layers_of.items()):
        modules_of[tuple(sorted(layers))].append(re.escape(module))
    return "|".join(
        rf"model\.layers\.(?:{'|'.join(map(str, layers))})\.(?:{'|'.join(modules)})"
        for layers, modules in modules_of.items()
    )


def _compare(
    saved: SavedAdapter, masters: Mapping[str, torch.Tensor], config: InstructConfig, base_fingerprint: str
) -> None:
    import torch

    wrong = [
        name for name in masters if name not in saved.tensors or not torch.equal(masters[name], saved.tensors[name])
    ]
    wrong += [name for name in saved.tensors if name not in masters]
    if wrong or saved.base_fingerprint != base_fingerprint or saved.scale != config.lora_scale:
        raise CheckpointError(
            f"{saved.folder}: what was written does not read back as it was: {_some(wrong) or CONFIG_FILE}",
            hint="check the disk; the adapter that was there before is untouched",
        )


def read_adapter(folder: str | Path) -> SavedAdapter:
    """Read an adapter folder. Raises CheckpointError that names the file and what is wrong with it."""
    from quatrain.checkpoint.trained_rows import take_embeddings, take_rows

    folder = Path(folder)
    config = _read_config(folder / CONFIG_FILE)
    tensors, metadata = _read_weights(folder / WEIGHTS_FILE)
    rows = take_rows(folder, config.get("trainable_token_indices"), tensors)
    embeddings = take_embeddings(tensors)
    saves = config.get("modules_to_save") or []
    if any(str(name).endswith(("embed_tokens", "lm_head")) for name in saves) and not embeddings:
        raise CheckpointError(f"adapter {folder}: not supported: modules_to_save={saves!r} without such a tensor")
    return SavedAdapter(
        folder=folder,
        base_name=config.get("base_model_name_or_path") or "",
        base_fingerprint=metadata.get(FINGERPRINT_KEY),
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        use_rslora=bool(config.get("use_rslora", False)),
        targets=_targets(config, tensors),
        tensors=tensors,
        dropout=float(config.get("lora_dropout") or 0.0),
        embeddings=embeddings,
        rows=rows,
        tied=bool(config.get("ensure_weight_tying")),
    )


def _targets(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str] | str:
    """`lora_targets` for the adapted modules: the file's own list where that is simple, else derived from the names."""
    listed = config.get("target_modules")
    simple = not config.get("layers_to_transform") and not config.get("exclude_modules")
    if simple and isinstance(listed, list) and set(listed) <= set(LINEARS):
        return sorted(listed)
    return target_modules(tensors, None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror})", hint="an adapter folder holds " + CONFIG_FILE
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})", hint="save or copy the adapter again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: want a JSON object, got {type(config).__name__}")
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind!r}; only LORA adapters are supported")
    problems = [f"{key}={config[key]!r}" for key in config if key not in _HARMLESS and _matters(key, config[key])]
    if problems:
        raise CheckpointError(f"{path}: not supported: {', '.join(sorted(problems))}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"{path}: r: want a whole number of at least 1, got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
        raise CheckpointError(f"{path}: lora_alpha: want a number above 0, got {alpha!r}")
    return config


def _matters(key: str, value: Any) -> bool:
    """Whether this key makes the adapter something else than plain LoRA."""
    if key == "init_lora_weights":
        return value not in _HARMLESS_INIT
    if key == "bias":
        return bool(value != "none")
    if key == "modules_to_save":  # norms are trained here too, an embedding or a head is used as it is
        return not all(str(name).endswith(("norm", "embed_tokens", "lm_head")) for name in value or ())
    return bool(value)


def _read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors as fp32 (each one's own dtype is read from the file), and the header's metadata."""
    import torch
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        raise CheckpointError(
            f"{path}: no such file" + (f"; {path.stem}.bin is a pickle, which is never loaded" if pickled else ""),
            hint="save the adapter as safetensors" if pickled else "give the folder that holds " + WEIGHTS_FILE,
        )
    size = path.stat().st_size
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: is not a complete safetensors file ({size} bytes): {error}",
            hint="the save or download was cut, or the file is a Git LFS pointer; copy it again",
        ) from error
    if not stored:
        raise CheckpointError(f"{path}: holds no tensors")
    problems, tensors = [], {}
    for name, tensor in stored.items():
        plain = _DEFAULT_SPELLING.sub(r"\1.weight", name)
        if plain in tensors:
            problems.append(f"{name} is there under two spellings")
        elif not tensor.dtype.is_floating_point:
            problems.append(f"{name} is {tensor.dtype}, want floating point")
        elif not bool(torch.isfinite(tensor.to(torch.float32)).all()):
            problems.append(f"{name} holds NaN or infinity")
        else:
            tensors[plain] = tensor.to(torch.float32)
    if problems:
        raise CheckpointError(f"{path}: {len(problems)} bad tensors: " + "; ".join(problems))
    return tensors, metadata


def load_adapter(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: InstructConfig,
    *,
    base_fingerprint: str,
    any_base: bool = False,
    rows_in_place: bool = False,
) -> list[str]:
    """Copy a saved adapter into `tensors` (fp32 masters by PEFT name), all of it or, on an error, nothing.

    An adapter with an embedding or a head of its own is refused unless those are the model's already
    (`rows_in_place`).

    An adapter that was trained on another base is refused unless `any_base`; one that does not say (written by PEFT) is
    taken. Either way the returned notices, to be shown, say so. Raises one CheckpointError for all bad tensors.
    """
    saved = read_adapter(folder)
    where = f"adapter {saved.folder}"
    if saved.brings and not rows_in_place:
        raise CheckpointError(
            f"{where} brings its own {' and '.join(saved.brings)} (tokens were added, or modules_to_save names "
            "them), which the engine does not train",
            hint="quatrain chat, eval and export use it as it is; go on training it with PEFT",
        )
    problems = [f"missing {name}" for name in tensors if name not in saved.tensors]
    problems += [f"unexpected {name}" for name in saved.tensors if name not in tensors]
    problems += [
        f"{name} is {list(saved.tensors[name].shape)}, want {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in saved.tensors and saved.tensors[name].shape != tensor.shape
    ]
    if saved.rank != config.lora_rank:
        problems.insert(0, f"its rank is {saved.rank}, here lora_rank is {config.lora_rank}")
    if saved.scale != config.lora_scale:
        problems.insert(0, f"its scale is {saved.scale:g}, here lora_alpha and lora_rank give {config.lora_scale:g}")
    if problems:
        raise CheckpointError(
            f"{where} does not fit ({len(problems)} problems): {_some(problems, separator='; ')}",
            hint="give the rank, alpha, targets and base model that the adapter was trained with",
        )
    notices = check_base(saved, base_fingerprint, any_base=any_base)
    for name, tensor in tensors.items():
        tensor.copy_(saved.tensors[name])
    return notices


def check_base(saved: SavedAdapter, base_fingerprint: str, *, any_base: bool = False) -> list[str]:
    """Notices about the base that an adapter was trained on. Raises CheckpointError for another one than the model that
    is open, unless `any_base`."""
    where = f"adapter {saved.folder}"
    if saved.base_fingerprint is None:
        return [f"{where} does not say which base weights it was trained on; its name for them: {saved.base_name!r}"]
    if saved.base_fingerprint == base_fingerprint:
        return []
    message = f"{where} was trained on other base weights ({saved.base_name!r}, {saved.base_fingerprint[:12]}…)"
    if not any_base:
        raise CheckpointError(message, hint=f"open that base model; the one opened is {base_fingerprint[:12]}…")
    return [message]


def _some(names: list[str], limit: int = 8, separator: str = ", ") -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + rest
