"""NF4 kernels: bit for bit the reference."""

from __future__ import annotations

import pytest
import torch
from ops.memory import GuardedMemory

from quatrain.errors import KernelError
from quatrain.ops.nf4.reference import dequantize as reference_dequantize
from quatrain.ops.nf4.reference import quantize
from quatrain.ops.nf4.triton import dequantize

SHAPES = [(1, 1), (1, 64), (3, 5), (7, 64), (65, 66), (130, 192)]


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_is_bit_equal(
    memory: GuardedMemory, dtype: torch.dtype, random: torch.Generator, shape: tuple[int, int], double_quant: bool
) -> None:
    weight = quantize(torch.randn(shape, generator=random), double_quant=double_quant)
    out, want = memory.output(*shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    dequantize(out, weight)
    reference_dequantize(want, weight)
    assert torch.equal(out, want)


def test_dequantize_checks_its_output() -> None:
    weight = quantize(torch.ones(4, 6), double_quant=False)
    for out in (torch.empty(6, 4), torch.empty(6, 4).T):
        with pytest.raises(KernelError, match="want contiguous"):
            dequantize(out, weight)
