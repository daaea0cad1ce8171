"""A model's tensors -> ModelParams, one at a time: peak memory is the loaded model and one tensor.

The linears of the blocks become NF4 (or keep the codes of a 4-bit checkpoint, or stay plain); embedding, head and
biases take the compute dtype, norm weights fp32. Every tensor is accounted for by name, shape and type before
any is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from quatrain.checkpoint import names
from quatrain.checkpoint.cache import BaseCache, Made
from quatrain.checkpoint.source import ModelSource, TensorInfo
from quatrain.errors import KernelError, ModelError
from quatrain.memory.process import large_frees_returned
from quatrain.model.params import BlockParams, ModelParams
from quatrain.model.spec import LINEARS
from quatrain.ops.linear_lora import Linear
from quatrain.ops.nf4 import Nf4Tensor, reference
from quatrain.ops.nf4.reference import dequantize

if TYPE_CHECKING:
    from quatrain.model.spec import ModelSpec

READABLE = ("F32", "F16", "BF16", "NF4")
# NF4 at block 64 is off by about 0.09 for real weights. It cannot be off by more than 0.34 for any: in a block whose
# other 63 values sit half-way between two codes next to zero, the error is sqrt(63 * 0.0455^2 / (1 + 63 * 0.0455^2)).
LARGEST_ERROR = 0.35
_MOST_SHOWN = 8


def load_params(
    source: ModelSource,
    *,
    quantize: Literal["nf4", "none"],
    double_quant: bool,
    compute_dtype: torch.dtype,
    quantizer: Callable[..., Nf4Tensor] = reference.quantize,
    error_of: Callable[[Nf4Tensor, torch.Tensor], float] = reference.relative_error,
    cache: BaseCache | None = None,
) -> ModelParams:
    """All frozen weights of `source`. `quantize="none"` keeps the linears in the compute dtype (4-bit ones expand).

    `quantizer` and `error_of` are the backend's (all give the same bits). What is quantised here is kept in `cache` and
    found there by the next load; a checkpoint that is already NF4, or stays plain, has nothing to gain from that.

    Raises ModelError if a tensor is missing, unexpected, of another shape or an unsupported type (all of them in one
    message, before any weight is read), holds NaN or infinity, or does not survive quantisation.
    """
    check_inventory(source)
    linear: Callable[[str, torch.Tensor | Nf4Tensor], torch.Tensor | Nf4Tensor]
    if quantize == "none":
        linear = partial(_expanded, dtype=compute_dtype)
    else:
        linear = partial(_quantized, double_quant=double_quant, quantizer=quantizer, error_of=error_of)
    if cache is None or quantize == "none" or source.is_nf4:
        loaded = _convert(source, compute_dtype, linear)
    else:
        made = Made(source.name, source.fingerprint(), double_quant, str(compute_dtype).removeprefix("torch."))
        found = cache.read(made, names.expected_shapes(source.spec))
        loaded = found or _convert(source, compute_dtype, linear)
        if found is None:
            cache.write(made, loaded)
    if source.spec.tie_word_embeddings:
        loaded[names.HEAD] = loaded[names.EMBED]
    return _assemble(source.spec, loaded)


def _convert(
    source: ModelSource,
    compute_dtype: torch.dtype,
    linear: Callable[[str, torch.Tensor | Nf4Tensor], torch.Tensor | Nf4Tensor],
) -> dict[str, torch.Tensor | Nf4Tensor]:
    """Every tensor as the model holds it, by name; a head that is tied to the embedding is left out. `linear` makes the
    weight of a block's linear from what errors call it and what the source holds."""
    loaded: dict[str, torch.Tensor | Nf4Tensor] = {}
    with one_thread(), large_frees_returned():
        for name, tensor in source.tensors():
            if names.ignorable(name):
                continue
            where = f"{source.name}: {name}"
            if names.is_linear_weight(name):
                loaded[name] = linear(where, tensor)
            else:
                dtype = norm_dtype(compute_dtype) if _is_norm(name) else compute_dtype
                loaded[name] = _plain(where, tensor, dtype)
            del tensor  # before the next one is read
    if source.spec.tie_word_embeddings:
        _drop_tied_head(loaded, source.name)
    return loaded


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch works alone: the mean of the block scales is the same bits whatever the number of threads, and torch's
    threads do not spin on the cores that a native quantiser wants."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def norm_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Norm weights are fp32, and fp64 when everything is."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


def check_inventory(source: ModelSource) -> None:
    """Compares the tensors in the files with those of the spec. Raises one ModelError that lists every difference."""
    found = {name: info for name, info in source.inventory().items() if not names.ignorable(name)}
    wanted = names.expected_shapes(source.spec)
    optional = {names.HEAD} if source.spec.tie_word_embeddings else set()
    problems = [f"{name} is missing" for name in wanted if name not in found and name not in optional]
    for name, info in found.items():
        problems += _problems_of(name, info, wanted.get(name))
    if problems:
        more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        types = any(info.dtype not in READABLE for info in found.values())
        raise ModelError(
            f"{source.name}: the tensors do not fit its configuration: {'; '.join(problems[:_MOST_SHOWN])}{more}",
            hint="take the model in BF16, F16 or F32, or convert it with the library that made it"
            if types
            else "the weights and the configuration must come from the same model",
        )


def _problems_of(name: str, info: TensorInfo, wanted: tuple[int, ...] | None) -> list[str]:
    if wanted is None:
        return [f"{name} {list(info.shape)} is unexpected"]
    problems = []
    if info.shape != wanted:
        problems.append(f"{name}: want shape {list(wanted)}, got {list(info.shape)}")
    if info.dtype not in READABLE:
        problems.append(f"{name}: type {info.dtype} is not supported; supported: {', '.join(READABLE)}")
    if info.dtype == "NF4" and not names.is_linear_weight(name):
        problems.append(f"{name}: only the linears of a block can be NF4")
    return problems


def _expanded(where: str, weight: torch.Tensor | Nf4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A linear's weight in `dtype`, whatever it is stored as."""
    if not isinstance(weight, Nf4Tensor):
        return _plain(where, weight, dtype)
    values = torch.empty(weight.shape, dtype=dtype)
    dequantize(values, weight)
    return values


def _quantized(
    where: str,
    weight: torch.Tensor | Nf4Tensor,
    double_quant: bool,
    quantizer: Callable[..., Nf4Tensor],
    error_of: Callable[[Nf4Tensor, torch.Tensor], float],
) -> Nf4Tensor:
    """A linear's weight in NF4. One that is stored so stays as it is: a second time would only add error."""
    if isinstance(weight, Nf4Tensor):
        return weight
    try:
        quantized = quantizer(weight, double_quant=double_quant)
    except KernelError as error:
        raise ModelError(f"{where}: {error}", hint=error.hint) from None
    error_size = error_of(quantized, weight)
    if not error_size <= LARGEST_ERROR:  # NaN does not pass
        raise ModelError(
            f"{where}: quantisation went wrong: relative error {error_size:.3f}, want at most {LARGEST_ERROR}",
            hint="this should not happen; please report it with the model's name",
        )
    return quantized


def _plain(where: str, tensor: torch.Tensor | Nf4Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    tensor = tensor.to(dtype).contiguous()
    # Both ends of the range: NaN wins either, and there is no mask of the tensor's size to pay for.
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
        raise ModelError(f"{where}: holds NaN or infinity", hint=reference.NOT_FINITE_HINT)
    return tensor


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _drop_tied_head(loaded: dict[str, torch.Tensor | Nf4Tensor], where: str) -> None:
    """One tensor serves as embedding and head when they are tied; a file may hold the head too, if it is the same."""
    embed, head = loaded[names.EMBED], loaded.pop(names.HEAD, None)
    assert isinstance(embed, torch.Tensor)
    if isinstance(head, torch.Tensor) and not torch.equal(head, embed):
        difference = float((head.float() - embed.float()).abs().max())
        raise ModelError(
            f"{where}: tie_word_embeddings is true, but {names.HEAD} and {names.EMBED} differ by {difference:.3g}",
            hint="set tie_word_embeddings to false in config.json if the head is meant to be its own",
        )


def _assemble(spec: ModelSpec, loaded: dict[str, torch.Tensor | Nf4Tensor]) -> ModelParams:
    def plain(name: str) -> torch.Tensor:
        tensor = loaded[name]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def linear(place: str, name: str) -> Linear:
        return Linear(loaded[f"{place}.weight"], plain(f"{place}.bias") if name in spec.biased else None)

    blocks = []
    for layer in range(spec.num_layers):
        prefix = names.block_prefix(layer)
        blocks.append(
            BlockParams(
                linears={name: linear(prefix + names.linear_name(name), name) for name in LINEARS},
                input_norm=plain(prefix + "input_layernorm.weight"),
                post_norm=plain(prefix + "post_attention_layernorm.weight"),
                q_norm=plain(prefix + "self_attn.q_norm.weight") if spec.qk_norm else None,
                k_norm=plain(prefix + "self_attn.k_norm.weight") if spec.qk_norm else None,
            )
        )
    return ModelParams(spec, plain(names.EMBED), blocks, plain(names.FINAL_NORM), plain(names.HEAD))
