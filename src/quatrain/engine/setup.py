"""From options to what a run really uses: device, compute dtype, memory budget, layout."""

from __future__ import annotations

import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quatrain.config import InstructConfig
from quatrain.engine.device import CudaDevice, Device, HostDevice
from quatrain.engine.device_layout import (
    CARD_SHARE,
    DeviceCosts,
    DeviceRequest,
    lay_out_on_device,
    lay_out_on_smallest_card,
)
from quatrain.engine.layout import Layout, lay_out
from quatrain.errors import ConfigError, KernelError, PlanError
from quatrain.memory.ledger import Ledger, ledger_path
from quatrain.memory.process import available_bytes, resident_bytes
from quatrain.ops.select import Backend, select_backend, triton_backend

if TYPE_CHECKING:
    from quatrain.model.spec import ModelSpec

BUDGET_SHARE = 0.8
"""Of the memory that is available, what a run takes at most unless told otherwise."""


def resolve_device(config: InstructConfig) -> str:
    """ "cpu" or "cuda". Raises ConfigError for a device that cannot be used, and for options that need another one."""
    if config.device == "cuda" and (missing := cuda_missing()) is not None:
        raise ConfigError(
            f"device cuda: {missing}", hint="use --device cpu; `quatrain doctor` shows what this machine offers"
        )
    device = "cuda" if config.device == "cuda" else "cpu"
    if device == "cpu" and config.cuda_graph == "on":
        raise ConfigError("cuda_graph on: the run is on the CPU, which captures no graphs", hint="leave it at auto")
    return device


def not_on_cuda() -> str:
    """Why `device=auto` is the CPU. It stays there until the CUDA path has been run on a GPU."""
    return cuda_missing() or "the CUDA kernels are untested on hardware: --device cuda asks for them"


def cuda_missing() -> str | None:
    """Why no GPU can be used, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if find_spec("quatrain.ops.triton_backend") is None:
        return "this version has no CUDA kernels"
    return None if find_spec("triton") is not None else "the CUDA kernels need the package triton"


def engine_device(name: str) -> Device:
    """The device object of "cpu" or "cuda"."""
    return HostDevice() if name == "cpu" else CudaDevice()


def resolve_compute_dtype(config: InstructConfig, device: str = "cpu") -> torch.dtype:
    """The dtype of activations and products: as asked, or bf16 where the hardware multiplies it, else fp32 on a CPU and
    fp16 on a GPU. A plan for a GPU that is not there takes bf16."""
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    if config.compute_dtype != "auto":
        return named[config.compute_dtype]
    if device == "cuda":
        modern = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
        return torch.bfloat16 if modern else torch.float16
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


def choose_layout(
    spec: ModelSpec,
    config: InstructConfig,
    stored_nf4_nested: bool | None = None,
    micro_batches: int = 1,
    sample_tokens: int = 0,
) -> Layout:
    """The layout for a model on this machine. `stored_nf4_nested`: how a checkpoint that is already NF4 holds its
    statistics; None when the weights are quantised here. `micro_batches`: of the largest optimizer step.
    `sample_tokens`: of the longest row generated between steps, on the CPU. Raises PlanError when it does not fit."""
    nested = _nested(config, stored_nf4_nested)
    device = resolve_device(config)
    dtype = resolve_compute_dtype(config, device)
    backend = select_backend(device, dtype, config.kernels, torch.get_num_threads())
    if device == "cpu":
        return lay_out(spec, config, dtype, backend, memory_budget(config), resident_bytes(), nested, sample_tokens)
    costs, room = measured_costs(), torch.cuda.mem_get_info()[1]
    budget = config.memory_budget or int(room * CARD_SHARE) - device_ledger().reserved()
    layout = lay_out_on_device(
        DeviceRequest(spec, config, dtype, backend, budget, resident_bytes(), nested, costs, micro_batches)
    )
    if layout.plan.host_bytes > (available := memory_budget(config.model_copy(update={"memory_budget": None}))):
        raise PlanError(
            f"the run needs {layout.plan.host_bytes / 1e6:.0f} MB of the host's memory, which has "
            f"{available / 1e6:.0f} MB to give",
            hint="try a smaller --micro-batch-tokens, or a larger --memory-budget",
        )
    return layout


def plan_layout(
    spec: ModelSpec,
    config: InstructConfig,
    stored_nf4_nested: bool | None = None,
    micro_batches: int = 1,
    sample_tokens: int = 0,
) -> Layout:
    """As `choose_layout`, but `device=cuda` needs no GPU: the layout is then one within `memory_budget`, or on the
    smallest usual card that holds the run, and sizes that only a GPU can tell are typical ones."""
    if config.device != "cuda" or cuda_missing() is None:
        return choose_layout(spec, config, stored_nf4_nested, micro_batches, sample_tokens)
    dtype = resolve_compute_dtype(config, "cuda")
    request = DeviceRequest(
        spec, config, dtype, _planned_backend(dtype), 0, resident_bytes(), _nested(config, stored_nf4_nested),
        DeviceCosts(), micro_batches,
    )  # fmt: skip
    if config.memory_budget is not None:
        return lay_out_on_device(replace(request, budget=config.memory_budget))
    return lay_out_on_smallest_card(lambda budget: replace(request, budget=budget))


def measured_costs() -> DeviceCosts:
    """What this process, and whoever shares the device without the ledger, hold on it before the model."""
    square = torch.ones(64, 64, device="cuda")
    square @ square  # loads cuBLAS
    torch.cuda.synchronize()
    others = (ledger := device_ledger()).reserved_by_others()
    if ledger.reserved() == others:  # else captured steps of another run of this process may use one
        torch._C._cuda_clearCublasWorkspaces()  # of this stream, on which nothing else runs
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free - torch.cuda.memory_reserved() - others
    hopper = torch.cuda.get_device_capability()[0] >= 9
    return DeviceCosts(max(used, 0), DeviceCosts.cublas if hopper else DeviceCosts.cublas // 4, measured=True)


def reserve(layout: Layout, owner: object, what: str) -> None:
    """Writes what a run will take of a GPU into the GPU's ledger, for as long as `owner` lives. Raises PlanError when
    other processes hold too much."""
    if layout.device == "cuda":
        ledger = device_ledger()
        weakref.finalize(owner, ledger.release, ledger.reserve(layout.plan.total_bytes, what))


def device_ledger() -> Ledger:
    """The ledger of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Ledger(ledger_path(str(getattr(properties, "uuid", properties.name))), properties.total_memory)


def _nested(config: InstructConfig, stored: bool | None) -> bool | None:
    if stored is not None:
        return stored
    return config.double_quant if config.quantize == "nf4" else None


def _planned_backend(dtype: torch.dtype) -> Backend:
    """The CUDA backend of the GPU that is there, else of a recent one."""
    try:
        return select_backend("cuda", dtype)
    except KernelError:
        return triton_backend(dtype, "sm_90")
