"""A base whose embedding or head an adapter brings along, as PEFT saves them where tokens were added.

The engine trains no embedding rows, so it neither adds tokens nor goes on training such an adapter. It uses one as it
is: the adapter's tensors stand in the place of the base's, and the model has as many rows as they have.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quatrain.checkpoint.names import EMBED, HEAD
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.errors import CheckpointError
from quatrain.model.adapters import PREFIX

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
        self._base, self._saved = base, saved
        rows = self._rows()
        tied = base.spec.tie_word_embeddings and self._one_tensor()
        self._changed = [name for name in saved.brings if not (tied and name == HEAD)]
        self.spec = replace(base.spec, vocab_size=rows, tie_word_embeddings=tied)
        self.name, self.files, self.eos_token_ids = base.name, base.files, base.eos_token_ids
        self.is_nf4, self.stored_nf4_nested = base.is_nf4, base.stored_nf4_nested
        added = rows - base.spec.vocab_size
        what = " and ".join({EMBED: "embedding", HEAD: "head"}[name] for name in self._changed)
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
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        return found | {name: TensorInfo(shape, "F32", 4 * shape[0] * shape[1]) for name in self._changed}

    def tensor(self, name: str) -> torch.Tensor | Nf4Tensor:
        if name in self._changed:
            return self._whole(name)
        tied_there = name == HEAD and self._base.spec.tie_word_embeddings
        return self._base.tensor(EMBED if tied_there else name)

    def read_tokenizer(self) -> Tokenizer | None:
        from quatrain.data.tokenizer import Tokenizer

        return Tokenizer.from_folder(self._saved.folder) or self._base.tokenizer()

    def fingerprint(self) -> str:
        """That of the base, and of the tensors that are not its own: a cache must not mix them up."""
        digest = hashlib.sha256(self._base.fingerprint().encode())
        for name in self._changed:
            digest.update(name.encode() + self._whole(name).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _whole(self, name: str) -> torch.Tensor:
        """The embedding or the head as the adapter has it, fp32."""
        tensor = self._saved.embeddings.get(name)
        if tensor is None:
            other = self._base.tensor(EMBED if self._base.spec.tie_word_embeddings else name)
            assert isinstance(other, torch.Tensor)
            tensor = other.to(torch.float32)
        ids, values = self._saved.rows.get(name, ([], tensor[:0]))
        return tensor.index_copy(0, torch.tensor(ids, dtype=torch.int64), values)

    def _rows(self) -> int:
        """How many rows the model has. Raises CheckpointError for tensors and rows that do not fit."""
        width, before = self._base.spec.hidden_size, self._base.spec.vocab_size
        shapes = {name: tuple(tensor.shape) for name, tensor in self._saved.embeddings.items()}
        rows = {shape[0] for shape in shapes.values()} or {before}
        for_both = len(shapes) == 2 or (self._base.spec.tie_word_embeddings and EMBED in shapes)
        fits = len(rows) == 1 and all(shape == (*rows, width) for shape in shapes.values())
        fits = fits and (rows == {before} or for_both)
        single = {name: (max(ids), tuple(values.shape)) for name, (ids, values) in self._saved.rows.items()}
        if fits and all(last < min(rows) and shape[1] == width for last, shape in single.values()):
            return rows.pop()
        said = [f"{name} {list(shape)}" for name, shape in shapes.items()]
        said += [f"row {last} of {name}, {list(shape)}" for name, (last, shape) in single.items()]
        raise CheckpointError(
            f"adapter {self._saved.folder}: {', '.join(said)}; want embedding and head of equally many rows of {width}"
            f", or of the base's {before}",
            hint="give the base model that the adapter was trained on with --model",
        )

    def _one_tensor(self) -> bool:
        """Whether head and embedding still are one, where the base ties them."""
        if EMBED not in self._saved.brings:
            return False
        if HEAD in self._saved.brings:
            return torch.equal(self._whole(EMBED), self._whole(HEAD))
        # One for both where PEFT keeps them so, and where the other one has no rows for the added tokens.
        embed = self._saved.embeddings.get(EMBED)
        return embed is None or self._saved.tied or len(embed) != self._base.spec.vocab_size


def take_embeddings(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An embedding and a head, taken out of an adapter's `tensors`. Beside them PEFT saves a second copy under the
    wrapper's own name, and what was there before the training; for single rows, the tensor that they are rows of."""
    taken = {}
    for name in (EMBED, HEAD):
        module = PREFIX + name.removesuffix(".weight")
        tensors.pop(f"{module}.original_module.weight", None)
        spellings = [f"{module}.{part}weight" for part in ("", "modules_to_save.", "token_adapter.base_layer.")]
        found = [tensors.pop(spelling) for spelling in spellings if spelling in tensors]
        if found:
            taken[name] = found[0]
    return taken


def take_rows(folder: Path, named: Any, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Rows of the embedding and the head that were trained one by one, taken out of an adapter's `tensors`; `named` are
    their ids, as a list for all or by the module's name. Raises CheckpointError where ids and rows do not fit."""
    taken = {}
    for name in (EMBED, HEAD):
        module = name.removesuffix(".weight")
        delta = tensors.pop(f"{PREFIX}{module}.token_adapter.trainable_tokens_delta", None)
        if delta is None:
            continue
        ids = named.get(module.rpartition(".")[2], next(iter(named.values()))) if isinstance(named, dict) else named
        valid = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
        if not valid or len(ids) != len(delta):
            raise CheckpointError(
                f"adapter {folder}: trainable_token_indices: want {len(delta)} ids for the rows of {module}, got {ids}"
            )
        taken[name] = (ids, delta)
    if named and not taken:
        raise CheckpointError(f"adapter {folder}: trainable_token_indices is set, but no row is saved")
    return taken
