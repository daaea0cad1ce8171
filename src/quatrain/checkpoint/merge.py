"""A base model and its adapter as one: W + scale * B A, tensor by tensor, in fp32.

The adapter was trained against what the engine computes with: when that is NF4, the dequantised weights. Merging into
those gives the logits of training; merging into the source's own weights gives a model that was never trained, close to
it but for the error of the quantisation, which the adapter has learned to live with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quatrain.checkpoint import names
from quatrain.checkpoint.load import check_inventory, one_thread
from quatrain.checkpoint.peft import check_base
from quatrain.checkpoint.trained_rows import TrainedRows
from quatrain.errors import CheckpointError
from quatrain.model.adapters import PREFIX
from quatrain.model.params import BlockParams
from quatrain.model.probe import probe_logits
from quatrain.model.spec import LINEARS, ModelSpec
from quatrain.ops.linear_lora import Linear, Lora
from quatrain.ops.nf4 import Nf4Tensor, reference

if TYPE_CHECKING:
    from quatrain.checkpoint.peft import SavedAdapter
    from quatrain.checkpoint.source import ModelSource


@dataclass(frozen=True)
class Nf4Base:
    """Merge into what NF4 makes of the source's weights. `quantizer` is a backend's; all give the same bits."""

    double_quant: bool = True
    quantizer: Callable[..., Nf4Tensor] = reference.quantize


class Merge:
    """`base`, `lora` and `merged` by tensor name, each read when asked for and kept nowhere.

    `nf4` None merges into the source's own weights (those of a 4-bit checkpoint are NF4 as they are). Raises
    CheckpointError when the adapter does not fit the model (one error for all tensors) or belongs to another base, and
    ModelError when the source's own tensors do not fit its configuration. `notices` are for the user.
    """

    def __init__(self, source: ModelSource, adapter: SavedAdapter, nf4: Nf4Base | None) -> None:
        check_inventory(source)
        self.source, self.adapter, self.nf4, self.spec = source, adapter, nf4, source.spec
        self.shapes = names.expected_shapes(self.spec)
        if self.spec.tie_word_embeddings:
            self.shapes.pop(names.HEAD)
        self._check_adapter()
        self.notices = check_base(adapter, source.fingerprint())

    def onto(self, nf4: Nf4Base | None) -> Merge:
        """The same adapter on the other base."""
        other = copy.copy(self)
        other.nf4 = nf4
        return other

    def base(self, name: str) -> torch.Tensor:
        """The frozen tensor `name` in fp32."""
        tensor = self.source.tensor(name)
        if isinstance(tensor, torch.Tensor) and not (self.nf4 and names.is_linear_weight(name)):
            return tensor.to(torch.float32)
        with one_thread():
            if isinstance(tensor, torch.Tensor):
                assert self.nf4 is not None
                tensor = self.nf4.quantizer(tensor, double_quant=self.nf4.double_quant)
            values = torch.empty(tensor.shape, dtype=torch.float32)
            reference.dequantize(values, tensor)
        return values

    def lora(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A [r, K], B [N, r]) of the adapter on the linear weight `name`, or None."""
        module = PREFIX + name.removesuffix(".weight")
        a, b = (self.adapter.tensors.get(f"{module}.lora_{part}.weight") for part in "AB")
        return None if a is None or b is None else (a, b)

    def merged(self, name: str) -> torch.Tensor:
        """The tensor of the merged model in fp32; the caller rounds it once."""
        trained = self.adapter.tensors.get(PREFIX + name)
        if trained is not None:  # a norm weight
            return trained
        base, pair = self.base(name), self.lora(name)
        return base if pair is None else base.addmm_(pair[1], pair[0], alpha=self.adapter.scale)

    def adapter_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 logits [T, V] of base and adapter side by side, as in training."""
        ranks = {
            name: self.adapter.rank
            for name in LINEARS
            if any(f".{name}.lora_A." in key for key in self.adapter.tensors)
        }
        return tensor_logits(self.spec, ids, self._not_merged, self._attached, ranks)

    def base_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """fp32 logits [T, V] of the base alone."""
        return tensor_logits(self.spec, ids, self.base)

    def _not_merged(self, name: str) -> torch.Tensor:
        trained = self.adapter.tensors.get(PREFIX + name)
        return self.base(name) if trained is None else trained

    def _attached(self, name: str) -> Lora | None:
        pair, none = self.lora(name), torch.empty(0)
        return None if pair is None else Lora(pair[0], pair[1], none, none, self.adapter.scale, 0)

    def _check_adapter(self) -> None:
        if self.adapter.brings and not isinstance(self.source, TrainedRows):
            raise CheckpointError(f"{self.adapter.folder} brings its own embedding or head: open it as TrainedRows")
        problems, rank = [], self.adapter.rank
        wanted = {PREFIX + name: shape for name, shape in self.shapes.items() if name.endswith("norm.weight")}
        for name in filter(names.is_linear_weight, self.shapes):
            module, (rows, columns) = PREFIX + name.removesuffix(".weight"), self.shapes[name]
            pair = {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}
            wanted |= pair
            found = [key for key in pair if key in self.adapter.tensors]
            if len(found) == 1:
                problems.append(f"{found[0]} has no counterpart")
        for name, tensor in self.adapter.tensors.items():
            if name not in wanted:
                problems.append(f"unexpected {name}")
            elif tuple(tensor.shape) != wanted[name]:
                problems.append(f"{name} is {list(tensor.shape)}, want {list(wanted[name])}")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"adapter {self.adapter.folder} does not fit {self.source.name}: {'; '.join(problems[:8])}{more}",
                hint="give the base model that the adapter was trained on with --model",
            )


def source_logits(source: ModelSource, ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits [T, V] of a model as it lies on disk."""

    def read(name: str) -> torch.Tensor:
        tensor = source.tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(torch.float32)

    return tensor_logits(source.spec, ids, read)


def tensor_logits(
    spec: ModelSpec,
    ids: Sequence[int],
    read: Callable[[str], torch.Tensor],
    lora: Callable[[str], Lora | None] = lambda name: None,
    ranks: dict[str, int] | None = None,
) -> torch.Tensor:
    """fp32 logits [T, V] of the row `ids`; `read` gives fp32 tensors by Hugging Face name, one at a time."""
    head = names.EMBED if spec.tie_word_embeddings else names.HEAD
    top = {"embed": names.EMBED, "final_norm": names.FINAL_NORM, "head": head}

    def block(layer: int) -> BlockParams:
        at = names.block_prefix(layer)

        def linear(name: str) -> Linear:
            place = at + names.linear_name(name)
            bias = read(f"{place}.bias") if name in spec.biased else None
            return Linear(read(f"{place}.weight"), bias, lora(f"{place}.weight"))

        return BlockParams(
            linears={name: linear(name) for name in LINEARS},
            input_norm=read(at + "input_layernorm.weight"),
            post_norm=read(at + "post_attention_layernorm.weight"),
            q_norm=read(at + "self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=read(at + "self_attn.k_norm.weight") if spec.qk_norm else None,
        )

    return probe_logits(spec, ids, lambda name: read(top[name]), block, ranks or {})
