"""A model as it lies on disk, whatever the format: what it is, what it holds, and its tensors one at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quatrain.data.tokenizer import Tokenizer
    from quatrain.model.spec import ModelSpec
    from quatrain.ops.nf4 import Nf4Tensor

_HASH_PIECE = 1 << 22


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says about one tensor: its logical shape, its type in the file, and its bytes there."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class ModelSource(ABC):
    """Base of all formats. Opening one reads headers and configuration only, never a weight.

    `name` is what the user asked for; `spec` is what the model is; `notes` are things to tell the user (defaults that
    were taken); `is_nf4` says that the linears are already NF4 and `stored_nf4_nested` whether all of them
    have nested statistics (None: not NF4); `files` are all files the weights and spec come from.
    """

    name: str
    spec: ModelSpec
    notes: tuple[str, ...] = ()
    is_nf4: bool = False
    stored_nf4_nested: bool | None = None
    files: tuple[Path, ...]
    eos_token_ids: tuple[int, ...] = ()

    @abstractmethod
    def inventory(self) -> dict[str, TensorInfo]:
        """Every tensor of the model by its Hugging Face name, from the headers."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor | Nf4Tensor:
        """One tensor of `inventory`, read now; the source keeps no reference to it."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | Nf4Tensor]]:
        """(name, tensor) for each of `inventory`, in its order, read when asked for."""
        for name in self.inventory():
            yield name, self.tensor(name)

    @abstractmethod
    def read_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if there is none."""

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return self.read_tokenizer()

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if there is none; built once."""
        return self._tokenizer

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.num_bytes for info in self.inventory().values())

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.files, key=lambda path: path.name):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(_HASH_PIECE):
                    digest.update(piece)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 over the names, sizes and bytes of `files`; computed once. The folder's own place does not matter."""
        return self._fingerprint
