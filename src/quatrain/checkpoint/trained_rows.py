"""A base whose embedding or head an adapter brings along, as PEFT saves them where tokens were added.

The engine trains no embedding rows, so it neither adds tokens nor goes on training such an adapter. It uses one as it
is: the adapter's tensors stand in the place of the base's, and the model has as many rows as they have.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from quatrain.checkpoint.names import EMBED, HEAD
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.errors import CheckpointError

if TYPE_CHECKING:
    from quatrain.checkpoint.peft import SavedAdapter
    from quatrain.data.tokenizer import Tokenizer
    from quatrain.ops.nf4 import Nf4Tensor


class TrainedRows(ModelSource):
    """`base` with the embedding and the head of `saved`. Head and embedding are one tensor where the adapter holds one
    that is meant for both (or two that are equal) and the base ties them.

    Raises CheckpointError for tensors that fit neither the base nor one another.
    """

    def __init__(self, base: ModelSource, saved: SavedAdapter) -> None:
        self._base, self._folder = base, saved.folder
        self._own = dict(saved.embeddings)
        rows = self._rows()
        tied = base.spec.tie_word_embeddings and self._one_tensor(saved.tied)
        if tied:
            self._own.pop(HEAD, None)
        self.spec = replace(base.spec, vocab_size=rows, tie_word_embeddings=tied)
        self.name, self.files, self.eos_token_ids = base.name, base.files, base.eos_token_ids
        self.is_nf4, self.stored_nf4_nested = base.is_nf4, base.stored_nf4_nested
        added = rows - base.spec.vocab_size
        what = " and ".join({EMBED: "embedding", HEAD: "head"}[name] for name in self._own)
        self.notes = (
            *base.notes,
            f"the adapter brings its own {what}" + (f", with {added} more rows" if added else ""),
        )

    def inventory(self) -> dict[str, TensorInfo]:
        found = self._base.inventory()
        if self.spec.tie_word_embeddings:
            found.pop(HEAD, None)
        elif HEAD not in found:
            found[HEAD] = found[EMBED]
        own = {name: TensorInfo(tuple(tensor.shape), "F32", tensor.nbytes) for name, tensor in self._own.items()}
        return found | own

    def tensor(self, name: str) -> torch.Tensor | Nf4Tensor:
        if name in self._own:
            return self._own[name]
        tied_there = name == HEAD and self._base.spec.tie_word_embeddings
        return self._base.tensor(EMBED if tied_there else name)

    def read_tokenizer(self) -> Tokenizer | None:
        from quatrain.data.tokenizer import Tokenizer

        return Tokenizer.from_folder(self._folder) or self._base.tokenizer()

    def fingerprint(self) -> str:
        """That of the base, and of the tensors that are not its own: a cache must not mix them up."""
        digest = hashlib.sha256(self._base.fingerprint().encode())
        for name, tensor in sorted(self._own.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _rows(self) -> int:
        width, before = self._base.spec.hidden_size, self._base.spec.vocab_size
        shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        rows = {shape[0] for shape in shapes.values()}
        if len(rows) == 1 and all(shape == (*rows, width) for shape in shapes.values()):
            count = rows.pop()
            for_both = len(shapes) == 2 or (self._base.spec.tie_word_embeddings and EMBED in shapes)
            if count == before or for_both:
                return count
        said = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise CheckpointError(
            f"adapter {self._folder}: {said}; want embedding and head of equally many rows of {width}, or of the "
            f"base's {before}",
            hint="give the base model that the adapter was trained on with --model",
        )

    def _one_tensor(self, said_tied: bool) -> bool:
        embed, head = self._own.get(EMBED), self._own.get(HEAD)
        if embed is None or head is None:
            # One tensor for two where PEFT was told so, and where the other one has no rows for the added tokens.
            return embed is not None and (said_tied or len(embed) != self._base.spec.vocab_size)
        return torch.equal(embed, head)
