"""A Hugging Face model folder: config.json, safetensors (one file or shards with an index), tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint import bnb
from quatrain.checkpoint.safetensors_file import SafetensorsFile
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.errors import ModelError
from quatrain.model.from_config import spec_from_config

if TYPE_CHECKING:
    import torch

    from quatrain.data.tokenizer import Tokenizer
    from quatrain.ops.nf4 import Nf4Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HfFolder(ModelSource):
    """Raises ModelError if the configuration is not supported, or if a file is missing, damaged or not as indexed."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or str(folder)
        config = read_json(folder / CONFIG)
        notes: list[str] = []
        self.spec = spec_from_config(config, str(folder / CONFIG), notes)
        self.notes = tuple(notes)
        check_quantization(config, str(folder / CONFIG))
        weight_map, index_files = _weight_map(folder)
        shards = {file: SafetensorsFile(folder / file) for file in dict.fromkeys(weight_map.values())}
        self._shard_of = _placed(folder, weight_map, shards, bool(index_files))
        self._inventory = bnb.logical_infos(self._raw_infos(), self._quant_state)
        self.is_nf4 = any(info.dtype == "NF4" for info in self._inventory.values())
        if self.is_nf4:
            stored = [name for name, info in self._inventory.items() if info.dtype == "NF4"]
            self.stored_nf4_nested = all(f"{name}.nested_absmax" in self._shard_of for name in stored)
        self.files = (folder / CONFIG, *index_files, *(folder / file for file in shards))
        self.eos_token_ids = _eos_token_ids(folder, config)

    def inventory(self) -> dict[str, TensorInfo]:
        return dict(self._inventory)

    def tensor(self, name: str) -> torch.Tensor | Nf4Tensor:
        if self._inventory[name].dtype == "NF4":
            return bnb.read_nf4(name, self._read, self._shard_of.__contains__)
        return self._read(name)

    def read_tokenizer(self) -> Tokenizer | None:
        from quatrain.data.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.folder)

    def _read(self, name: str) -> torch.Tensor:
        return self._shard_of[name].read(name)

    def _raw_infos(self) -> dict[str, TensorInfo]:
        return {name: shard.tensors[name] for name, shard in self._shard_of.items()}

    def _quant_state(self, name: str) -> dict[str, Any]:
        return bnb.parse_state(name, self._read(f"{name}.quant_state.bitsandbytes__nf4"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError with the file and the place of the fault."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", hint=_missing_hint(path.parent)) from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: want a JSON object, got a {type(content).__name__}")
    return content


def check_quantization(config: dict[str, Any], where: str) -> None:
    """Raises ModelError for weights quantised by anything else than bitsandbytes NF4, naming the method."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    hint = "use the unquantised model: Quatrain quantises to NF4 itself"
    if not isinstance(quantization, dict):
        raise ModelError(f"{where}: quantization_config: want an object, got {quantization!r}", hint=hint)
    method = quantization.get("quant_method", "bitsandbytes" if "load_in_4bit" in quantization else "unknown")
    if method != "bitsandbytes":
        raise ModelError(
            f"{where}: weights quantised by {method} are not supported; supported: bitsandbytes nf4", hint=hint
        )
    if not quantization.get("load_in_4bit"):
        raise ModelError(
            f"{where}: bitsandbytes 8-bit weights are not supported; supported: bitsandbytes nf4", hint=hint
        )
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise ModelError(f"{where}: bitsandbytes {kind} weights are not supported; supported: nf4", hint=hint)


def _missing_hint(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "this folder is an adapter: give the base model, and the adapter with its own option"
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f"give the GGUF file itself: {folder / gguf[0]}"
    return "want a Hugging Face model folder (config.json and *.safetensors) or a .gguf file"


def _weight_map(folder: Path) -> tuple[dict[str, str], tuple[Path, ...]]:
    """({tensor name: file name} in file order, the index file if there is one). A lone file is found by its name."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ModelError(f"{folder / INDEX}: weight_map is missing or empty")
        for tensor, file in listed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{folder / INDEX}: {tensor}: want the name of a file in the folder, got {file!r}")
        absent = sorted({file for file in listed.values() if not (folder / file).is_file()})
        if absent:
            raise ModelError(
                f"{folder}: the index lists files that are missing: {', '.join(absent)}", hint="download them again"
            )
        return dict(sorted(listed.items(), key=lambda item: item[1])), (folder / INDEX,)
    found = sorted(path.name for path in folder.glob("*.safetensors") if path.name != "adapter_model.safetensors")
    if SINGLE in found:
        found = [SINGLE]
    if len(found) == 1:
        return dict.fromkeys(SafetensorsFile(folder / found[0]).tensors, found[0]), ()
    if found:
        raise ModelError(f"{folder}: several safetensors files and no {INDEX}: {', '.join(found)}")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when read; want safetensors",
            hint="convert with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise ModelError(f"{folder}: no weights: want {SINGLE}, or {INDEX} with its shards")


def _placed(
    folder: Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile], indexed: bool
) -> dict[str, SafetensorsFile]:
    """{tensor: its file}, in the order of the data, each tensor from the file that the index names."""
    lost = [f"{name} (in {file})" for name, file in weight_map.items() if name not in shards[file].tensors]
    stray = [
        f"{name} (in {file})" for file, shard in shards.items() for name in shard.tensors if name not in weight_map
    ]
    if indexed and (lost or stray):
        said = [f"listed but not there: {', '.join(lost)}"] if lost else []
        said += [f"there but not listed: {', '.join(stray)}"] if stray else []
        raise ModelError(f"{folder / INDEX}: {'; '.join(said)}")
    return {name: shard for file, shard in shards.items() for name in shard.tensors if weight_map[name] == file}


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json's, else config.json's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    ids = config.get("eos_token_id") if ids is None else ids
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(token for token in ids if type(token) is int and token >= 0)
