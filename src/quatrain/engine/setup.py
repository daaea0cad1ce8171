"""From options to what a run really uses: device, compute dtype, memory budget, layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quatrain.config import InstructConfig
from quatrain.engine.layout import Layout, lay_out
from quatrain.errors import ConfigError
from quatrain.memory.process import available_bytes, resident_bytes
from quatrain.ops.select import select_backend

if TYPE_CHECKING:
    from quatrain.model.spec import ModelSpec

BUDGET_SHARE = 0.8
"""Of the memory that is available, what a run takes at most unless told otherwise."""


def resolve_device(config: InstructConfig) -> str:
    """ "cpu" or "cuda". Raises ConfigError for a device that this build or version cannot use."""
    if config.device == "cuda":
        state = "sees a CUDA device" if torch.cuda.is_available() else "sees no CUDA device"
        raise ConfigError(
            f"device cuda: this version has no CUDA kernels (torch {torch.__version__} {state})",
            hint="use --device cpu; `quatrain doctor` shows what this machine offers",
        )
    return "cpu"


def resolve_compute_dtype(config: InstructConfig) -> torch.dtype:
    """The dtype of activations and products: as asked, or bf16 where the CPU multiplies it, else fp32."""
    named = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    if config.compute_dtype != "auto":
        return named[config.compute_dtype]
    return torch.bfloat16 if cpu_multiplies_bf16() else torch.float32


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has bf16 matrix or dot products (AMX-BF16, AVX512-BF16); False where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    flags = next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "").split()
    return bool({"amx_bf16", "avx512_bf16"} & set(flags))


def memory_budget(config: InstructConfig) -> int:
    """Bytes that the whole process may take."""
    if config.memory_budget is not None:
        return config.memory_budget
    available = available_bytes()
    return int(BUDGET_SHARE * (available + resident_bytes())) if available else 1 << 62


def choose_layout(spec: ModelSpec, config: InstructConfig, stored_nf4_nested: bool | None = None) -> Layout:
    """The layout for a model on this machine. `stored_nf4_nested`: how a checkpoint that is already NF4 holds its
    statistics; None when the weights are quantised here. Raises PlanError when it does not fit."""
    if stored_nf4_nested is not None:
        nested: bool | None = stored_nf4_nested
    else:
        nested = config.double_quant if config.quantize == "nf4" else None
    dtype = resolve_compute_dtype(config)
    backend = select_backend(resolve_device(config), dtype, config.kernels, torch.get_num_threads())
    return lay_out(spec, config, dtype, backend, memory_budget(config), resident_bytes(), nested)
