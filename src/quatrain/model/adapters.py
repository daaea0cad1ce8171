"""The trainable parameters: LoRA adapters (and RMSNorm weights with `train_norms`) as views into flat fp32 buffers.

All adapter tensors of a model lie in one flat master buffer, layer after layer, the norm weights behind them;
gradients and both moments mirror it, so that clipping and AdamW are single calls over segments. Names are PEFT's: the
keys of `adapter_model.safetensors`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from dataclasses import dataclass

import torch

from quatrain.config import InstructConfig
from quatrain.errors import ConfigError
from quatrain.model.params import ModelParams
from quatrain.model.spec import ATTENTION_LINEARS, LINEARS, ModelSpec
from quatrain.ops.linear_lora import Lora

PREFIX = "base_model.model."
_NORM_NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def module_name(layer: int, linear: str) -> str:
    """The full module name, as in Hugging Face models: `model.layers.0.self_attn.q_proj`."""
    part = "self_attn" if linear in ATTENTION_LINEARS else "mlp"
    return f"model.layers.{layer}.{part}.{linear}"


def match_targets(spec: ModelSpec, targets: str | list[str]) -> list[tuple[int, str]]:
    """(layer, linear) pairs that get an adapter, in model order.

    "all-linear" is every linear of every block, never the output head. A list holds exact last names; any other
    string is one regular expression that must match a module's full name. Raises ConfigError when a name, or the
    expression, matches nothing.
    """
    modules = [(layer, linear) for layer in range(spec.num_layers) for linear in LINEARS]
    if targets == "all-linear":
        return modules
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ConfigError(f"lora_targets: {targets!r} is not a regular expression: {error}") from None
        matched = [m for m in modules if pattern.fullmatch(module_name(*m))]
        if not matched:
            near = difflib.get_close_matches(targets, LINEARS, n=2)
            hint = f"name linears as a list, e.g. [{', '.join(near or LINEARS[:2])}]"
            raise ConfigError(
                f"lora_targets: {targets!r} matches no linear; full names look like {module_name(0, 'q_proj')!r}",
                hint=hint,
            )
        return matched
    for name in targets:
        if name not in LINEARS:
            near = difflib.get_close_matches(name, LINEARS, n=3, cutoff=0.4)
            raise ConfigError(
                f"lora_targets: {name!r} names no linear of this model", hint=f"try {', '.join(near or LINEARS)}"
            )
    return [m for m in modules if m[1] in targets]


@dataclass(frozen=True)
class Segment:
    """What one layer trains, as ranges of the flat buffers. Norm weights are not decayed: towards zero is not their
    rest."""

    lora: slice
    norms: slice

    @property
    def size(self) -> int:
        return int(self.lora.stop - self.lora.start + self.norms.stop - self.norms.start)


@dataclass(frozen=True)
class _Entry:
    segment: int
    start: int
    shape: tuple[int, ...]


class AdapterSet:
    """All trainable parameters of a run.

    `segments[l]` belongs to block l; the last one to the final norm. With `clip="layer"` the gradient buffer holds
    one segment only and every layer's views share it; else it mirrors the master buffer.
    """

    def __init__(
        self, spec: ModelSpec, config: InstructConfig, compute_dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.modules = match_targets(spec, config.lora_targets)
        self.master_dtype = torch.promote_types(compute_dtype, torch.float32)
        self._entries: dict[str, _Entry] = {}
        self.segments = self._lay_out(spec, config)
        total = sum(segment.size for segment in self.segments)
        self.shared_grad = config.clip == "layer"
        grad_size = max(segment.size for segment in self.segments) if self.shared_grad else total
        self.master = torch.zeros(total, dtype=self.master_dtype, device=device)
        self.grad = self.master.new_zeros(grad_size)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        lora_size = self.segments[-1].lora.stop
        same = compute_dtype == self.master_dtype
        self.compute = self.master[:lora_size] if same else torch.zeros(lora_size, dtype=compute_dtype, device=device)
        self.norm_grads: list[dict[str, torch.Tensor]] = [{} for _ in self.segments]

    def _lay_out(self, spec: ModelSpec, config: InstructConfig) -> list[Segment]:
        offset = 0

        def place(name: str, segment: int, *shape: int) -> None:
            nonlocal offset
            self._entries[name] = _Entry(segment, offset, shape)
            offset += math.prod(shape)

        lora_ranges, norm_ranges = [], []
        for layer in range(spec.num_layers + 1):
            start = offset
            for linear in (name for at, name in self.modules if at == layer):
                n, k = spec.linear_shape(linear)
                base = PREFIX + module_name(layer, linear)
                place(f"{base}.lora_A.weight", layer, config.lora_rank, k)
                place(f"{base}.lora_B.weight", layer, n, config.lora_rank)
            lora_ranges.append(slice(start, offset))
        for layer in range(spec.num_layers + 1):
            start = offset
            if config.train_norms:
                for name, size in norm_sizes(spec, layer).items():
                    place(norm_parameter(layer, name), layer, size)
            norm_ranges.append(slice(start, offset))
        return [Segment(lora, norms) for lora, norms in zip(lora_ranges, norm_ranges, strict=True)]

    def initialise(self, seed: int) -> None:
        """A Kaiming-uniform with a = sqrt(5), as PEFT's default, so uniform in +-1/sqrt(in_features); B zero. Each
        tensor has a generator of its own, keyed by the seed and its name."""
        for name, view in self.named().items():
            if name.endswith("lora_B.weight"):
                view.zero_()
            elif name.endswith("lora_A.weight"):
                digest = hashlib.sha256(f"init:{seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                bound = 1 / math.sqrt(view.shape[1])
                drawn = torch.rand(view.shape, generator=generator, dtype=torch.float32)
                view.copy_(drawn.mul_(2 * bound).sub_(bound))
        self.refresh()

    def attach(self, params: ModelParams) -> None:
        """Hooks the adapters into the model's linears; with `train_norms` the norm weights become views of the master
        buffer, starting from the model's own values."""
        compute, master, grads = self._views(self.compute), self.named(), self.named_grads()
        for index, (layer, linear) in enumerate(self.modules):
            base = PREFIX + module_name(layer, linear)
            a, b = f"{base}.lora_A.weight", f"{base}.lora_B.weight"
            scale = self.config.lora_scale
            params.blocks[layer].linears[linear].lora = Lora(compute[a], compute[b], grads[a], grads[b], scale, index)
        if not self.config.train_norms:
            return
        for layer in range(len(self.segments)):
            for name in norm_sizes(params.spec, layer):
                key = norm_parameter(layer, name)
                owner = params if layer == params.spec.num_layers else params.blocks[layer]
                master[key].copy_(getattr(owner, name))
                setattr(owner, name, master[key])
                self.norm_grads[layer][name] = grads[key]

    def named(self) -> dict[str, torch.Tensor]:
        """Master views by PEFT parameter name."""
        return self._views(self.master)

    def named_grads(self) -> dict[str, torch.Tensor]:
        """Gradient views by PEFT parameter name. With one shared segment they overlap from layer to layer."""
        if not self.shared_grad:
            return self._views(self.grad)
        views = {}
        for name, entry in self._entries.items():
            segment = self.segments[entry.segment]
            in_norms = entry.start >= segment.norms.start and segment.norms.stop > segment.norms.start
            lora_size = segment.lora.stop - segment.lora.start
            start = entry.start - segment.norms.start + lora_size if in_norms else entry.start - segment.lora.start
            views[name] = self.grad[start : start + math.prod(entry.shape)].view(entry.shape)
        return views

    def named_moments(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(exp_avg, exp_avg_sq) views by PEFT parameter name."""
        return self._views(self.exp_avg), self._views(self.exp_avg_sq)

    def segment_of(self, name: str) -> int:
        return self._entries[name].segment

    def segment_grad(self, index: int) -> list[tuple[slice, torch.Tensor]]:
        """(range in the master buffer, gradient) of segment `index`: adapters, then norms; empty ranges left out."""
        segment = self.segments[index]
        lora_size = segment.lora.stop - segment.lora.start
        parts = [(segment.lora, 0), (segment.norms, lora_size)]
        if not self.shared_grad:
            parts = [(segment.lora, segment.lora.start), (segment.norms, segment.norms.start)]
        return [(r, self.grad[at : at + r.stop - r.start]) for r, at in parts if r.stop > r.start]

    def refresh(self, part: slice | None = None) -> None:
        """Renews the compute copies from the masters, all of them or a range of the flat buffer."""
        if self.compute.dtype == self.master_dtype:
            return
        part = slice(0, self.compute.numel()) if part is None else part
        stop = min(part.stop, self.compute.numel())
        if part.start < stop:
            self.compute[part.start : stop].copy_(self.master[part.start : stop])

    def change_norms(self) -> torch.Tensor:
        """The Frobenius norm of what the adapters add to each layer's weights, scale * B A, fp64 [layers].

        No product of full size is made: |B A|^2 is the sum over (B^T B) * (A A^T)."""
        views = self.named()
        squares = torch.zeros(len(self.segments) - 1, dtype=torch.float64, device=self.master.device)
        for layer, linear in self.modules:
            base = PREFIX + module_name(layer, linear)
            a, b = (views[f"{base}.lora_{side}.weight"].double() for side in "AB")
            squares[layer] += ((b.T @ b) * (a @ a.T)).sum()
        return squares.clamp_(min=0).sqrt_().mul_(self.config.lora_scale)

    def num_parameters(self) -> int:
        return int(self.master.numel())

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: flat[e.start : e.start + math.prod(e.shape)].view(e.shape)
            for name, e in self._entries.items()
            if e.start + math.prod(e.shape) <= flat.numel()
        }


def norm_sizes(spec: ModelSpec, layer: int) -> dict[str, int]:
    """The RMSNorm weights of a layer by field name; layer `num_layers` is the final norm."""
    if layer == spec.num_layers:
        return {"final_norm": spec.hidden_size}
    sizes = {"input_norm": spec.hidden_size, "post_norm": spec.hidden_size}
    return sizes | ({"q_norm": spec.head_dim, "k_norm": spec.head_dim} if spec.qk_norm else {})


def norm_parameter(layer: int, field: str) -> str:
    """PEFT's name of a trained norm weight (as `modules_to_save` writes it)."""
    return PREFIX + (
        "model.norm.weight" if field == "final_norm" else f"model.layers.{layer}.{_NORM_NAMES[field]}.weight"
    )
