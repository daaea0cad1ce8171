"""A GGUF file as a ModelSource: Hugging Face names, row order and fp32 values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.gguf_file import SUPPORTED_TYPES, GgufFile
from quatrain.checkpoint.names import EMBED, FINAL_NORM, HEAD, block_prefix, linear_name
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.errors import ModelError
from quatrain.model.from_gguf import LINEAR_NAMES, spec_from_gguf

if TYPE_CHECKING:
    import torch

    from quatrain.data.tokenizer import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_IN_BLOCK = {gguf: linear_name(name) for name, gguf in LINEAR_NAMES.items()}
_IN_BLOCK |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_IN_BLOCK |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GLOBAL_OF = {hf: gguf for gguf, hf in _GLOBAL.items()}
_IN_BLOCK_OF = {hf: gguf for gguf, hf in _IN_BLOCK.items()}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class GgufSource(ModelSource):
    """Raises ModelError for a damaged file, an unsupported architecture, or a block format we cannot expand."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self._file = GgufFile(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        if metadata.get("general.type") == "adapter":
            raise ModelError(
                f"{path}: an adapter alone, not a model: llama.cpp puts it on its base",
                hint="give the adapter folder that it was exported from, or export with --format gguf",
            )
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{path}: one of {metadata['split.count']} parts of a model",
                hint="join the parts with llama-gguf-split --merge",
            )
        bad = [f"{name} is {tensor.type_name}" for name, tensor in tensors.items() if not _readable(tensor.type_name)]
        if bad:
            raise ModelError(f"{path}: {', '.join(bad[:4])}: not supported; supported: {', '.join(SUPPORTED_TYPES)}")
        factors = tuple(self._file.read(ROPE_FACTORS).tolist()) if ROPE_FACTORS in tensors else None
        notes: list[str] = []
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.spec = spec_from_gguf(metadata, shapes, factors, str(path), notes)
        self.notes = tuple(notes)
        self.files = (path,)
        self._gguf_names = {hf_name(name): name for name in tensors if name != ROPE_FACTORS}
        # llama.cpp rotates neighbouring dimensions for this architecture, so its converter reorders q and k.
        self._reordered = metadata["general.architecture"] == "llama"
        ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        self.eos_token_ids = tuple(dict.fromkeys(token for token in ids if type(token) is int))

    def inventory(self) -> dict[str, TensorInfo]:
        # Block formats count as what they expand to.
        found = {name: self._file.tensors[gguf] for name, gguf in self._gguf_names.items()}
        return {name: TensorInfo(tensor.shape, "F32", tensor.num_bytes) for name, tensor in found.items()}

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._file.read(self._gguf_names[name])
        if self._reordered and ".self_attn.q_proj." in name:
            return halves_first(tensor, self.spec.num_heads)
        if self._reordered and ".self_attn.k_proj." in name:
            return halves_first(tensor, self.spec.num_kv_heads)
        return tensor

    @property
    def tokenizer_metadata(self) -> dict[str, Any]:
        """The keys of the file that are about its tokenizer, as they are."""
        return {key: value for key, value in self._file.metadata.items() if key.startswith("tokenizer.")}

    def read_tokenizer(self) -> Tokenizer | None:
        from quatrain.checkpoint.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._file.metadata, str(self.path))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that has none stays, to be reported as unexpected."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _IN_BLOCK:
        return _GLOBAL.get(name, name)
    return f"{block_prefix(int(match[1]))}{_IN_BLOCK[match[2]]}.{match[3]}"


def gguf_name(name: str) -> str:
    """The inverse of `hf_name`, for the tensors of the supported families."""
    stem, _, kind = name.rpartition(".")
    if name in _GLOBAL_OF:
        return _GLOBAL_OF[name]
    _, _, layer, place = stem.split(".", 3)
    return f"blk.{layer}.{_IN_BLOCK_OF[place]}.{kind}"


def halves_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from the order 0, d/2, 1, d/2 + 1, ... (pairs are neighbours) back to 0, 1, ... d - 1."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def neighbours_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `halves_first`: rows of each head in the order 0, d/2, 1, d/2 + 1, ..."""
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _readable(type_name: str) -> bool:
    return type_name in SUPPORTED_TYPES
