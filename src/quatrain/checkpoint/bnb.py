"""bitsandbytes 4-bit weights in safetensors files -> Nf4Tensor, the codes taken as they are.

Such a weight is several tensors: `W` (uint8, two codes a byte), `W.absmax` (fp32, or uint8 codes when nested),
`W.quant_map` (the 16 values), when nested also `W.nested_absmax` and `W.nested_quant_map`; and
`W.quant_state.bitsandbytes__nf4`, JSON in bytes with shape, block sizes and the nested offset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.source import TensorInfo
from quatrain.errors import ModelError

if TYPE_CHECKING:
    import torch

    from quatrain.ops.nf4 import Nf4Tensor

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def quantized_names(names: Iterable[str]) -> set[str]:
    """The weights among `names` that are stored in 4 bits. Raises ModelError for another 4-bit type than NF4."""
    found = set()
    for name in names:
        weight, separator, kind = name.partition(_STATE)
        if separator and kind != "nf4":
            raise ModelError(f"{weight}: bitsandbytes {kind} weights are not supported; supported: nf4")
        if separator:
            found.add(weight)
    return found


def logical_infos(
    infos: Mapping[str, TensorInfo], state_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, TensorInfo]:
    """`infos` with the parts of each 4-bit weight folded into one entry of its logical shape and type NF4."""
    quantized = quantized_names(infos)
    parts = {weight + part for weight in quantized for part in (*_PARTS, _STATE + "nf4")}
    folded = {}
    for name, info in infos.items():
        if name in quantized:
            num_bytes = info.num_bytes + sum(
                infos[p].num_bytes for p in parts if p.startswith(name + ".") and p in infos
            )
            folded[name] = TensorInfo(tuple(state_of(name)["shape"]), "NF4", num_bytes)
        elif name not in parts:
            folded[name] = info
    return folded


def parse_state(name: str, raw: torch.Tensor) -> dict[str, Any]:
    """The JSON of a weight's quant_state, with the block sizes checked."""
    try:
        state = json.loads(bytes(raw.tolist()))
        shape, block, nested_block = state["shape"], state["blocksize"], state.get("nested_blocksize", 256)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{name}: its quant_state cannot be read: {error}") from error
    if state.get("quant_type") != "nf4" or block != 64 or nested_block != 256:
        raise ModelError(
            f"{name}: {state.get('quant_type')} with blocks of {block} (nested {nested_block}) is not supported; "
            "supported: nf4 with blocks of 64 (nested 256)"
        )
    if not isinstance(shape, list) or len(shape) != 2 or any(type(size) is not int or size < 1 for size in shape):
        raise ModelError(f"{name}: its quant_state has the shape {shape!r}, want two sizes")
    return dict(state)


def read_nf4(name: str, read: Callable[[str], torch.Tensor], has: Callable[[str], bool]) -> Nf4Tensor:
    """The weight `name` from its parts. `read` reads a tensor of the files by name.

    Raises ModelError if a part is missing, has the wrong size or type, or if the 16 values are not NF4's.
    """
    import torch

    from quatrain.ops.nf4 import BLOCK, NESTED_BLOCK, Nf4Tensor
    from quatrain.ops.nf4.reference import CODE, nested_code_book

    def part(suffix: str, dtype: torch.dtype, size: int) -> torch.Tensor:
        if not has(name + suffix):
            raise ModelError(f"{name}{suffix} is missing: the 4-bit weight is incomplete")
        tensor = read(name + suffix)
        if not suffix:  # bnb_4bit_quant_storage can give the bytes another type
            tensor = tensor.view(torch.uint8)
        tensor = tensor.reshape(-1)
        if tensor.dtype != dtype or tensor.numel() != size:
            raise ModelError(f"{name}{suffix}: want {dtype} [{size}], got {tensor.dtype} [{tensor.numel()}]")
        return tensor

    state = parse_state(name, read(name + _STATE + "nf4"))
    rows, columns = state["shape"]
    values = rows * columns
    blocks = math.ceil(values / BLOCK)
    codes = part("", torch.uint8, math.ceil(values / 2))
    if not torch.equal(part(".quant_map", torch.float32, 16), CODE):
        raise ModelError(f"{name}.quant_map: these are not NF4's 16 values")
    if "nested_offset" not in state:
        return Nf4Tensor((rows, columns), codes, absmax=_finite(name, part(".absmax", torch.float32, blocks)))
    book = part(".nested_quant_map", torch.float32, 256)
    return Nf4Tensor(
        (rows, columns),
        codes,
        absmax_codes=part(".absmax", torch.uint8, blocks),
        absmax2=_finite(name, part(".nested_absmax", torch.float32, math.ceil(blocks / NESTED_BLOCK))),
        offset=_finite(name, torch.tensor(float(state["nested_offset"]), dtype=torch.float32)),
        code2=nested_code_book() if torch.equal(book, nested_code_book()) else _finite(name, book),
    )


def _finite(name: str, statistics: torch.Tensor) -> torch.Tensor:
    if not bool(statistics.isfinite().all()):
        raise ModelError(f"{name}: its block statistics hold NaN or infinity")
    return statistics
