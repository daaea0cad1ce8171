"""Which Triton kernels a run gets, how much scratch they are planned with, and what imports Triton."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from ops import test_linear_lora as oracle
from ops.memory import GuardedMemory

from quatrain.errors import KernelError
from quatrain.ops import triton_configs
from quatrain.ops.dropout import Dropout
from quatrain.ops.linear_lora import Linear
from quatrain.ops.select import Sizes, select_backend, triton_backend

SIZES: dict[str, Any] = {
    "tokens": 70, "longest_row": 70, "hidden": 32, "intermediate": 256, "vocab": 50, "heads": 4, "kv_heads": 2,
    "head_dim": 16, "groups": ((32, (64, 32)), (64, (32,)), (32, (256,)), (256, (32,))), "rank": 5, "quantised": True,
    "dropout": True, "head_chunk": 16, "dtype": torch.float32, "wide": torch.float32,
}  # fmt: skip


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match=r"device cuda: torch .* sees no GPU"):
        select_backend("cuda", torch.float32)
    with pytest.raises(KernelError, match="'portable' are for the CPU"):
        select_backend("cuda", torch.float32, "portable")
    with pytest.raises(KernelError, match="want cpu or cuda"):
        select_backend("tpu", torch.float32)


def test_a_gpu_gets_the_kernels_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    named = {}
    for capability in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        triton_configs.architecture.cache_clear()
        named[capability] = select_backend("cuda", torch.float16).name.removeprefix("triton sm_")
    assert list(named.values()) == ["75", "80", "86", "89", "90", "100", "120"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    triton_configs.architecture.cache_clear()
    with pytest.raises(KernelError, match=r"want compute capability 7.5 or newer, got 7.0"):
        select_backend("cuda", torch.float16)
    triton_configs.architecture.cache_clear()


@pytest.mark.parametrize(("arch", "dtype"), [("sm_75", torch.bfloat16), ("sm_90", torch.float64)], ids=str)
def test_a_dtype_without_kernels_is_refused(arch: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelError, match=rf"Triton kernels for {arch}: want .*float16.*, got {dtype}"):
        triton_backend(dtype, arch)


@pytest.mark.parametrize("changes", [{}, {"quantised": False, "tokens": 300, "rank": 40}], ids=str)
def test_scratch_of_the_planned_size_is_enough(
    memory: GuardedMemory, random: torch.Generator, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Every op with temporaries, at its largest; a query wider than the hidden size among them (Qwen3)."""
    monkeypatch.setattr(triton_configs, "PRODUCTS", {"*": (0, 0)})
    sizes = Sizes(**{**SIZES, **changes})
    backend = triton_backend(torch.float32, "sm_80")
    ops = backend.bind(memory.output(backend.scratch_bytes(sizes), dtype=torch.uint8))
    t, dropout = sizes.tokens, Dropout(0.2, oracle.make_keys(sizes.tokens))
    for k, outs in sizes.groups:
        linears = [
            oracle.make_linear(memory, random, n, k, sizes.rank, 0, sizes.dtype, nf4=sizes.quantised, bias=False)[0]
            for n in outs
        ]
        x, douts = torch.randn(t, k), [torch.randn(t, n) for n in outs]
        us = [memory.output(t, sizes.rank) for _ in outs]
        ops.linear_lora_forward([memory.output(t, n) for n in outs], us, x, linears, dropout)
        ops.linear_lora_backward(memory.output(t, k), douts, x, us, linears, dropout)
    x, rstd, weight = torch.randn(t, sizes.hidden), torch.ones(t), torch.ones(sizes.hidden)
    ops.rms_norm_backward(memory.output(t, sizes.hidden), torch.zeros(sizes.hidden), x, x, rstd, weight, None)
    ops.sum_squares(memory.output(dtype=torch.float64), torch.randn(2_000_000))


def test_an_op_refuses_a_tensor_with_gaps(memory: GuardedMemory) -> None:
    ops = triton_backend(torch.float32, "sm_80").bind(memory.output(1 << 12, dtype=torch.uint8))
    x, table = torch.ones(4, 8), torch.ones(4, 16)[:, ::2]
    for call in (
        lambda: ops.linear_lora_forward([x], [None], table, [Linear(torch.ones(8, 8))], None),
        lambda: ops.swiglu_forward(x, x, table),
        lambda: ops.embedding_forward(x, torch.zeros(4, dtype=torch.int64), table),
    ):
        with pytest.raises(KernelError, match=r"want contiguous tensors, got \(4, 8\) with \(16, 2\)"):
            call()


def test_a_plan_needs_no_triton_and_neither_does_the_cpu() -> None:
    """Both in a process where importing it fails."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from quatrain.ops.select import Sizes, reference_ops, select_backend, triton_backend\n"
        f"sizes = Sizes(**{SIZES!r})\n"
        "print(triton_backend(torch.bfloat16, 'sm_90').scratch_bytes(sizes))\n"
        "select_backend('cpu', torch.float32).bind(torch.empty(0, dtype=torch.uint8))\n"
        "import quatrain.cli.main, quatrain.train.pipeline\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4 * 32 * 256  # the largest weight
