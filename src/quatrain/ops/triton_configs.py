"""Block sizes, warps and stages of every Triton kernel for every class of GPU. Nothing is tuned at run time, so a kernel
is compiled once and a captured graph is never surprised.

How an op's `triton.py` plugs in (it is imported where it is first needed, never at start-up):

1. Launch functions have the grammar of the op's reference (outputs, inputs, scalars, scratch), take tensors that already
   have memory, read nothing back to the host and pass `**config_for("<table key>", tensor)` to the kernel:
   block sizes (its constexprs), `num_warps`, `num_stages`, `enable_fp_fusion`. Scratch is cut from the one scratch tensor
   by `ops/triton_runtime.carve`, whose twin `carved_bytes` tells the planner.
2. Its kernels' rows stand in `TABLE` under one key each. A row maps "class/dtype", "class", "*/dtype" or "*" to a
   configuration; the first of these that is there is taken.
3. `cases(arch: str, dtype: str) -> list[Case]` says what `scripts/compile_kernels.py` compiles: every kernel in every
   variant that a default run uses (dtype "fp32", "bf16" or "fp16"; arch as in `CLASSES`), with `config(key, arch, dtype)`
   among the constexprs. The script finds every `ops/*/triton*.py` that has such a function.

`Case.types` names the arguments that are not constexprs, in order, separated by blanks: "*fp32" a pointer (16-byte
aligned, as the arena's slots are), "i32", "fp32" scalars, "i32:16" a multiple of 16 (Triton specialises on that at
run time, so compile what models have), "-" None.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quatrain.errors import KernelError

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
"""Block sizes by constexpr name, and Triton's launch options."""

CLASSES = {
    "sm_75": "turing",
    "sm_80": "ampere",
    "sm_86": "ada",
    "sm_89": "ada",
    "sm_90": "hopper",
    "sm_100": "hopper",
    "sm_120": "ada",
    "gfx942": "cdna",
}
"""Architecture -> class. `ada` is what has 99 KB of shared memory a block, consumer Blackwell included; `hopper` has 227,
`ampere` 163, `turing` and `cdna` 64. Turing has no bf16, and Triton no tensor cores for it: products go to cuBLAS."""

SHARED_KB = {"turing": 64, "ampere": 163, "ada": 99, "hopper": 227, "cdna": 64}

TABLE: dict[str, dict[str, Config]] = {
    "elementwise": {"*": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}},
    # Bit for bit the reference: no product may be contracted into the sum that follows it.
    "nf4_dequantize": {"*": {"BLOCKS": 64, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}},
}


@dataclass(frozen=True)
class Case:
    """One thing to compile: see the module's docstring."""

    kernel: Any
    types: str
    constexprs: Config
    variant: str = ""


def config(key: str, arch: str, dtype: str) -> Config:
    """The configuration of table row `key`. FP contraction is on unless the row says otherwise."""
    row, kind = TABLE[key], CLASSES.get(arch, "ampere")
    names = (f"{kind}/{dtype}", kind, f"*/{dtype}", "*")
    return {"enable_fp_fusion": True, **next(row[name] for name in names if name in row)}


def config_for(key: str, tensor: torch.Tensor) -> Config:
    """The configuration for the device and dtype of `tensor`."""
    return config(key, architecture(tensor.device), DTYPE_NAMES[str(tensor.dtype)])


DTYPE_NAMES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
}
"""Triton's names of torch's dtypes."""


@functools.cache
def architecture(device: torch.device) -> str:
    """The entry of `CLASSES` for a device: its own, or the newest one before it. CPU tensors (Triton's interpreter) take
    the rows of sm_80. Raises KernelError for a GPU older than sm_75."""
    import torch

    if device.type == "cpu":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    known = [int(name[3:]) for name in CLASSES if name.startswith("sm_")]
    fitting = [capability for capability in known if capability <= 10 * major + minor]
    if not fitting:
        raise KernelError(
            f"CUDA kernels: want compute capability 7.5 or newer, got {major}.{minor}", hint="use --device cpu"
        )
    return f"sm_{max(fitting)}"
