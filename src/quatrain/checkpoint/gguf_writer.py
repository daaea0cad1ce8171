"""A merged model, or an adapter alone, as a GGUF file, written as it is computed: one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quatrain.checkpoint.gguf_source import ROPE_FACTORS, neighbours_first
from quatrain.checkpoint.gguf_source import gguf_name as name_of
from quatrain.checkpoint.hf_writer import rounded
from quatrain.checkpoint.names import EMBED, HEAD
from quatrain.errors import CheckpointError
from quatrain.model.to_gguf import frequency_factors, gguf_architecture, metadata_from_spec

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

    from quatrain.checkpoint.merge import Merge
    from quatrain.model.spec import ModelSpec

_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32}  # llama.cpp's
_BLOCK = 32


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type: str
    values: Callable[[], torch.Tensor]


def write_gguf(path: Path, merge: Merge, kind: str, vocabulary: Mapping[str, Any], name: str) -> list[str]:
    """The merged model in `kind` (a key of LARGEST_SHARE's types): matrices so, vectors in F32, and F16 for rows that
    are no multiple of a block. Embedding and head are kept at Q8_0 where the type has fewer bits. Returns notices.

    Raises ModelError for what llama.cpp cannot compute, CheckpointError for a value that the type cannot hold.
    """
    spec = merge.spec
    metadata = {"general.type": "model", "general.name": name, "general.file_type": _FILE_TYPES[kind]}
    if kind.startswith("q"):
        metadata["general.quantization_version"] = 2
    metadata |= metadata_from_spec(spec, merge.source.name)
    entries, odd = [], 0
    for hf_name, shape in merge.shapes.items():
        type_ = _type_of(hf_name, shape, kind)
        odd += type_ == "f16" != kind
        entries.append(_Entry(name_of(hf_name), shape, type_, _reader(merge, hf_name)))
    if (factors := frequency_factors(spec)) is not None:
        tensor = torch.tensor(factors)
        entries.append(_Entry(ROPE_FACTORS, tuple(tensor.shape), "f32", lambda: tensor))
    _write(path, gguf_architecture(spec), {**metadata, **vocabulary}, entries)
    notices = [f"{odd} matrices are stored as f16: their rows are no multiple of {_BLOCK}"] if odd else []
    if spec.family in ("llama", "mistral") and spec.windows[0] is not None:
        notices.append(
            f"llama.cpp knows no sliding window for this architecture: beyond {spec.windows[0]} tokens answers differ"
        )
    return notices


def write_gguf_adapter(path: Path, merge: Merge, kind: str, name: str) -> None:
    """The adapter alone, for `llama-server --lora`. Raises CheckpointError for trained norms, which have no place."""
    adapter, spec = merge.adapter, merge.spec
    if adapter.train_norms:
        raise CheckpointError(f"{adapter.folder}: a GGUF adapter has no place for trained norms", hint="--format gguf")
    entries = []
    for hf_name in merge.shapes:
        if (pair := merge.lora(hf_name)) is not None:
            for part, tensor in zip("ab", (pair[0], reordered(spec, hf_name, pair[1])), strict=True):
                stored = f"{name_of(hf_name)}.lora_{part}"
                entries.append(_Entry(stored, tuple(tensor.shape), kind, lambda tensor=tensor: tensor))  # type: ignore[misc]
    # llama.cpp scales by alpha / rank.
    metadata = {"general.type": "adapter", "general.name": name, "general.file_type": _FILE_TYPES[kind]}
    metadata |= {"adapter.type": "lora", "adapter.lora.alpha": float(adapter.scale * adapter.rank)}
    _write(path, gguf_architecture(spec), metadata, entries)


def reordered(spec: ModelSpec, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """q and k as llama.cpp has them for the architecture llama: rotated pairs are neighbours."""
    if gguf_architecture(spec) == "llama" and ".self_attn.q_proj." in name:
        return neighbours_first(tensor, spec.num_heads)
    if gguf_architecture(spec) == "llama" and ".self_attn.k_proj." in name:
        return neighbours_first(tensor, spec.num_kv_heads)
    return tensor


def _reader(merge: Merge, name: str) -> Callable[[], torch.Tensor]:
    return lambda: reordered(merge.spec, name, merge.merged(name))


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1:
        return "f32"
    if not kind.startswith("q"):
        return kind
    if shape[-1] % _BLOCK:
        return "f16"
    return "q8_0" if name in (EMBED, HEAD) else kind


def _write(path: Path, architecture: str, metadata: Mapping[str, Any], entries: list[_Entry]) -> None:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for entry in entries:
        kind = GGMLQuantizationType[entry.type.upper()]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = entry.shape[-1] // block * block_bytes
        total = torch.Size(entry.shape[:-1]).numel() * row_bytes
        as_bytes = (*entry.shape[:-1], row_bytes)
        writer.add_tensor_info(entry.name, as_bytes, np.dtype(np.uint8), total, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(_bytes_of(entry))
    writer.close()


def _bytes_of(entry: _Entry) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor as it lies in the file."""
    import numpy as np
    from gguf import GGMLQuantizationType, quantize

    values = rounded(entry.name, entry.values(), torch.float16 if entry.type == "f16" else torch.float32)
    raw = quantize(values.to(torch.float32).numpy(), GGMLQuantizationType[entry.type.upper()])
    return np.ascontiguousarray(raw).view(np.uint8)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """A key with the type that llama.cpp wants: uint32 and fp32, and int32 inside arrays."""
    from gguf import GGUFValueType as Kind

    kinds = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    if not isinstance(value, list):
        writer.add_key_value(key, value, kinds[type(value)])
    elif value:  # the library cannot write an empty array
        of = type(value[0])
        writer.add_key_value(key, value, Kind.ARRAY, Kind.INT32 if of is int else kinds[of])
