"""NF4 kernels: bit for bit the reference."""

from __future__ import annotations

import pytest
import torch
from ops.memory import GuardedMemory

from quatrain.errors import KernelError
from quatrain.ops.nf4.reference import CODE, MIDPOINTS, quantize
from quatrain.ops.nf4.reference import dequantize as reference_dequantize
from quatrain.ops.nf4.reference import relative_error as reference_error
from quatrain.ops.nf4.triton import dequantize, relative_error
from quatrain.ops.nf4.triton import quantize as triton_quantize

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


def assert_same(weight: torch.Tensor, double_quant: bool) -> None:
    got, want = (one(weight, double_quant=double_quant) for one in (triton_quantize, quantize))
    assert got.shape == want.shape
    for field in ("codes", "absmax", "absmax_codes", "absmax2", "offset", "code2"):
        a, b = getattr(got, field), getattr(want, field)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), field


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_is_bit_equal(
    dtype: torch.dtype, random: torch.Generator, shape: tuple[int, int], double_quant: bool
) -> None:
    assert_same(torch.randn(shape, generator=random).to(dtype), double_quant)


def test_quantize_divides_in_the_last_block(random: torch.Generator) -> None:
    """Pairs (absmax, x) whose code is another one when x is multiplied by 1 / absmax."""
    scale, m = 0.5 + torch.rand(200_000, generator=random), torch.tensor(MIDPOINTS[9])
    x = scale * m
    apart = (x / scale > m) != (x * (1 / scale) > m)
    assert int(apart.sum()) > 20
    for i in apart.nonzero()[:4, 0]:
        assert_same(torch.stack([scale[i], x[i]])[None], double_quant=False)


def test_quantize_on_the_edges(random: torch.Generator) -> None:
    """Codes, midpoints and their neighbours; blocks of zeros and of values so small that they count as zero; a value
    that is not finite."""
    exact = torch.cat([CODE, torch.tensor(MIDPOINTS), torch.nextafter(torch.tensor(MIDPOINTS), torch.tensor(2.0))])
    edges = torch.cat([exact, torch.ones(64 - exact.numel())]).repeat(3, 1) * torch.tensor([1.0, 0.37, 3e-39])[:, None]
    for weight in (edges, torch.zeros(2, 64), torch.full((1, 5), 1e-42), torch.full((1, 70), -3e-45), -edges[:, :50]):
        assert_same(weight, double_quant=False)
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = torch.randn(3, 50, generator=random)
        weight[1, 7] = bad
        with pytest.raises(KernelError, match="want finite values"):
            triton_quantize(weight, double_quant=True)


def test_relative_error(random: torch.Generator) -> None:
    weight = torch.randn(9, 70, generator=random)
    w = quantize(weight, double_quant=True)
    assert relative_error(w, weight) == pytest.approx(reference_error(w, weight), rel=1e-6)
    assert relative_error(w, torch.zeros(9, 70)) == float("inf")
