"""A merged model as a Hugging Face folder, written as it is computed: one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quatrain.checkpoint.hf_folder import CONFIG, INDEX, SINGLE, HfFolder, read_json
from quatrain.errors import CheckpointError
from quatrain.model.to_config import config_from_spec

if TYPE_CHECKING:
    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.tokenizer import Tokenizer

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SHARD_BYTES = 5_000_000_000
GENERATION = "generation_config.json"
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Every tensor of `shapes`, computed by `tensor` in fp32 and rounded once to `dtype`: one safetensors file, or
    shards of at most `shard_bytes` (a larger tensor has one for itself) and an index.

    Raises CheckpointError for a value that `dtype` cannot hold.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, members in zip(files, shards, strict=True):
        _write_file(folder / file, {name: shapes[name] for name in members}, tensor, dtype)
    if len(shards) > 1:
        place = {name: file for file, members in zip(files, shards, strict=True) for name in members}
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        (folder / INDEX).write_bytes(_json(index))


def rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`. Raises CheckpointError if that makes infinities or NaN of it."""
    result = tensor.to(dtype).contiguous()
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(result)):
        kind = _STORED[dtype]
        raise CheckpointError(
            f"{name}: holds values up to {float(tensor.abs().max()):.3g}, which {kind} cannot hold",
            hint="use --type bf16",
        )
    return result


def _write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], torch.Tensor], dtype: torch.dtype
) -> None:
    """One safetensors file: the header is known before the first tensor is."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(rounded(name, tensor(name), dtype).view(torch.uint8).numpy().data)


def write_configuration(
    folder: Path, source: ModelSource, tokenizer: Tokenizer | None, end_ids: Sequence[int], dtype: torch.dtype
) -> None:
    """config.json, generation_config.json and the tokenizer's files, as they were but for what the merge changes: no
    quantisation, the dtype, whether head and embedding are one tensor, and every end token."""
    spec = source.spec
    original = source.folder if isinstance(source, HfFolder) else None
    config = read_json(original / CONFIG) if original else config_from_spec(spec, source.name)
    config.pop("quantization_config", None)
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = spec.tie_word_embeddings
    ends: int | list[int] | None = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    special = {"bos_token_id": tokenizer.bos_id if tokenizer else None, "eos_token_id": ends}
    if original is None:
        config |= special
    (folder / CONFIG).write_bytes(_json(config))
    own = original / GENERATION if original else None
    generation = read_json(own) if own and own.is_file() else special
    (folder / GENERATION).write_bytes(_json({**generation, "eos_token_id": ends}))
    if tokenizer is not None:
        tokenizer.save(folder)


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
