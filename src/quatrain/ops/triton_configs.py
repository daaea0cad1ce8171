"""Block sizes, warps and stages of every Triton kernel for every class of GPU. Nothing is tuned at run time, so that a
kernel is compiled once and a captured graph is never surprised.

How an op's `triton.py` plugs in (it is imported where it is first needed, never at start-up):

1. Launch functions have the grammar of the op's reference (outputs, inputs, scalars, scratch), take tensors that
   already have memory, read nothing back to the host and pass `**config_for("<table key>", tensor)` to the kernel:
   block sizes (its constexprs), `num_warps`, `num_stages`, `enable_fp_fusion`. Scratch is cut from the one scratch
   tensor by `ops/triton_runtime.carve`; `ops/triton_sizes` tells the planner how much.
2. Its kernels' rows stand in `TABLE` under one key each. A row maps "class/dtype", "*/dtype", "class" or "*" to a
   configuration; the first of these that is there is taken.
3. `cases(arch: str, dtype: str) -> list[Case]` says what `scripts/compile_kernels.py` compiles: every kernel in every
   variant that a default run uses (dtype "fp32", "bf16" or "fp16"; arch as in `CLASSES`), with
   `config(key, arch, dtype)` among the constexprs. The script finds every `ops/**/triton*.py` that has this function.

`Case.types` names the arguments that are not constexprs, in order, separated by blanks: "*fp32" a pointer (16-byte
aligned, as the arena's slots are), "i32", "fp32" scalars, "i32:16" a multiple of 16 (Triton specialises on that at
run time, so compile what models have), "1" and "-" the constants 1 (specialised as well) and None.
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
"""Architecture -> class. `ada` is what has 99 KB of shared memory a block, consumer Blackwell included. Turing has no
bf16, and Triton does not use its tensor cores: products go to cuBLAS."""

SHARED_KB = {"turing": 64, "ampere": 163, "ada": 99, "hopper": 227, "cdna": 64}

TABLE: dict[str, dict[str, Config]] = {
    "elementwise": {"*": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}},
    "rms_norm": {"*": {"num_stages": 1}},
    "rope": {"*": {"ROWS": 32, "num_warps": 4, "num_stages": 1}},
    "sum_squares": {"*": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}},
    # Bit for bit the reference: no product may be contracted into the sum that follows it.
    "nf4_dequantize": {"*": {"BLOCKS": 64, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}},
    "nf4_quantize": {"*": {"BLOCKS": 32, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}},
}


def _gemm(a: int, b: int, c: int, warps: int, stages: int) -> Config:
    """Blocks of tokens, out_features and in_features."""
    return {"BLOCK_T": a, "BLOCK_N": b, "BLOCK_K": c, "num_warps": warps, "num_stages": stages}


# The epilogue alone ("blas"), products over a weight in memory ("dense") and products over NF4 ("fused", whose block of
# in_features is a block of codes).
_EPILOGUE = {"*": _gemm(64, 64, 64, 4, 1), "turing": _gemm(32, 32, 32, 8, 1), "*/fp32": _gemm(32, 32, 32, 4, 1)}
_DENSE = {
    "*": _gemm(128, 128, 64, 8, 3),
    "cdna": _gemm(128, 128, 64, 8, 2),
    "turing": _gemm(32, 32, 32, 8, 1),
    "*/fp32": _gemm(64, 64, 16, 8, 2),
}
_FUSED = {"*": _gemm(64, 64, 64, 4, 2), "turing": _gemm(32, 32, 64, 8, 1), "*/fp32": _gemm(32, 32, 64, 8, 1)}
TABLE |= {
    "linear_forward/blas": _EPILOGUE,
    "linear_backward/blas": _EPILOGUE,
    "linear_forward/dense": _DENSE,
    "linear_backward/dense": _DENSE,
    "linear_forward/fused": _FUSED,
    "linear_backward/fused": _FUSED,
    "lora_down": {
        "*": {"BLOCK_T": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
        "turing": {"BLOCK_T": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1},
    },
    "lora_grad": {
        "*": {"BLOCK_T": 64, "BLOCK_C": 64, "num_warps": 4, "num_stages": 2},
        "*/fp32": {"BLOCK_T": 32, "BLOCK_C": 64, "num_warps": 4, "num_stages": 2},
        "turing": {"BLOCK_T": 32, "BLOCK_C": 32, "num_warps": 4, "num_stages": 1},
    },
    "add_partials": {"*": {"BLOCK": 256, "num_warps": 2, "num_stages": 1}},
}


def _attention(m: int, n: int, warps: int, stages: int, *, widen: bool = False) -> Config:
    """Blocks of queries and keys; `widen` for products without tensor cores."""
    return {"BLOCK_M": m, "BLOCK_N": n, "WIDEN": widen, "num_warps": warps, "num_stages": stages}


def _cached(n: int, warps: int, stages: int) -> Config:
    """Slots of the cache at a time."""
    return {"BLOCK_N": n, "WIDEN": False, "num_warps": warps, "num_stages": stages}


def _tiles(usual: Config, cdna: Config, plain: Config, **others: Config) -> dict[str, Config]:
    """A row; `plain` is for products without tensor cores: on Turing, and of fp32, which is exact. `others` are more
    classes, or class_dtype."""
    plain["WIDEN"] = True
    return {"*": usual, "cdna": cdna, "turing": plain, "*/fp32": plain} | {
        name.replace("_", "/"): other for name, other in others.items()
    }


# By the width of the head; what the compiler makes of them without spilling. Not measured yet.
TABLE |= {
    **{f"attention_statistics/{d}": {"*": {"BLOCK_M": 64, "num_warps": 4, "num_stages": 1}} for d in (64, 128, 256)},
    "attention_forward/64": _tiles(_attention(128, 64, 8, 3), _attention(128, 64, 8, 1), _attention(32, 16, 4, 1)),
    "attention_dq/64": _tiles(_attention(128, 64, 8, 2), _attention(64, 64, 4, 1), _attention(16, 32, 4, 1)),
    "attention_dkdv/64": _tiles(_attention(32, 64, 4, 3), _attention(32, 64, 4, 1), _attention(16, 32, 8, 1)),
    "attention_forward/128": _tiles(_attention(128, 64, 8, 2), _attention(128, 64, 8, 1), _attention(32, 32, 8, 1)),
    "attention_dq/128": _tiles(
        _attention(64, 64, 8, 2), _attention(64, 32, 4, 1), _attention(16, 32, 8, 1), hopper=_attention(128, 64, 8, 2)
    ),
    "attention_dkdv/128": _tiles(
        _attention(32, 64, 8, 2), _attention(32, 64, 8, 1), _attention(16, 16, 8, 1), hopper=_attention(64, 64, 8, 2),
        turing_fp32=_attention(16, 16, 4, 1), turing_fp16=_attention(16, 16, 4, 1, widen=True),
    ),
    "attention_forward/256": _tiles(_attention(64, 32, 8, 2), _attention(64, 32, 8, 1), _attention(16, 16, 4, 1)),
    "attention_dq/256": _tiles(_attention(32, 32, 8, 2), _attention(32, 32, 4, 1), _attention(16, 16, 4, 1)),
    "attention_dkdv/256": _tiles(
        _attention(32, 32, 8, 2), _attention(32, 32, 4, 1), _attention(16, 8, 4, 1), cdna_fp32=_attention(16, 16, 4, 1)
    ),
    "attention_cached/64": _tiles(_cached(64, 4, 2), _cached(64, 4, 1), _cached(32, 4, 1)),
    "attention_cached/128": _tiles(_cached(64, 4, 2), _cached(64, 4, 1), _cached(16, 4, 1)),
    "attention_cached/256": _tiles(_cached(32, 4, 2), _cached(32, 4, 1), _cached(16, 4, 1)),
    "attention_cached_add": {"*": {"num_warps": 1, "num_stages": 1}},
    "cache_put": {"*": {"num_warps": 4, "num_stages": 1}},
    "head_rows": {"*": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}},
    "cross_entropy": {"*": {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}},
    "sample": {
        "*": {"BLOCK": 4096, "num_warps": 8, "num_stages": 1},
        "*/fp32": {"BLOCK": 2048, "num_warps": 8, "num_stages": 1},
        "turing": {"BLOCK": 2048, "num_warps": 8, "num_stages": 1},
    },
}  # fmt: skip

PRODUCTS: dict[str, tuple[int, float]] = {
    "*": (64, 2**35),
    "hopper": (64, 2**34),
    "ampere": (128, 2**35),
    "ada": (128, 2**35),
    "turing": (16, 0),
    "*/fp32": (0, 0),
}
"""class/dtype, */dtype, class or * -> (tokens up to which a product reads NF4 itself, multiply-adds from which cuBLAS
does it). A starting point from published measurements of others, to be measured again on each class."""


@dataclass(frozen=True)
class Case:
    """One thing to compile: see the module's docstring."""

    kernel: Any
    types: str
    constexprs: Config
    variant: str = ""


def config(key: str, arch: str, dtype: str) -> Config:
    """The configuration of table row `key`. FP contraction is on unless the row says otherwise."""
    return {"enable_fp_fusion": True, **_best(TABLE[key], arch, dtype)}


def _best(row: dict[str, Any], arch: str, dtype: str) -> Any:
    kind = CLASSES[arch]
    names = (f"{kind}/{dtype}", f"*/{dtype}", kind, "*")
    return next(row[name] for name in names if name in row)


def product_path(x: torch.Tensor, n: int, *, fused: bool) -> str:
    """How x [T, K] is multiplied by a weight [n, K]: "fused", "dense" or "blas" (see `ops/linear_lora/triton.py`).
    `fused`: whether that is possible."""
    fused_tokens, blas_work = _best(PRODUCTS, architecture(x.device), DTYPE_NAMES[str(x.dtype)])
    if x.shape[0] <= fused_tokens:  # a block of our own product would be mostly empty
        return "fused" if fused else "blas"
    return "blas" if x.shape[0] * x.shape[1] * n >= blas_work else "dense"


def config_for(key: str, tensor: torch.Tensor) -> Config:
    """The configuration for the device and dtype of `tensor`."""
    return config(key, architecture(tensor.device), DTYPE_NAMES[str(tensor.dtype)])


DTYPE_NAMES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
    "torch.int64": "int64",
}
"""Triton's names of torch's dtypes."""


@functools.cache
def architecture(device: torch.device) -> str:
    """The entry of `CLASSES` for a device: its own, or the newest one before it. CPU tensors (Triton's interpreter)
    take the rows of sm_80. Raises KernelError for a GPU older than sm_75."""
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
