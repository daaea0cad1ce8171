"""The native quantiser against the reference, bit for bit, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quatrain.errors import KernelError
from quatrain.ops import library
from quatrain.ops.nf4 import Nf4Tensor, native, reference

available, why_not = library.available()
pytestmark = pytest.mark.skipif(not available, reason=why_not)

SHAPES = [(1, 1), (1, 2), (3, 5), (1, 63), (1, 64), (1, 65), (5, 13), (129, 257), (33, 1000), (520, 513), (64, 4096)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=library.supported_isas() if available else [])
def context(request: pytest.FixtureRequest) -> library.Context:
    return library.context(request.param, 2)


def gaussian(shape: tuple[int, int], dtype: torch.dtype, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul_(scale).to(dtype)


def assert_same(context: library.Context, weight: torch.Tensor) -> None:
    for double_quant in (False, True):
        got = native.quantize(context, weight, double_quant=double_quant)
        want = reference.quantize(weight, double_quant=double_quant)
        assert got.shape == want.shape
        for part in ("codes", "absmax", "absmax_codes", "absmax2", "offset", "code2"):
            assert bits(got, part) == bits(want, part), part


def bits(w: Nf4Tensor, part: str) -> bytes | None:
    tensor = getattr(w, part)
    return None if tensor is None else tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits(context, shape, dtype):
    assert_same(context, gaussian(shape, dtype))


def test_an_fp16_weight_of_several_pieces(context):
    """600 nested groups and a partial block: a piece holds 16 groups."""
    assert_same(context, gaussian((3, 2_500_013), torch.float16))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relative_error(context, dtype, double_quant):
    """The sums of squares run in another order: in fp64, so the two agree far beyond what a check needs."""
    for shape in ((1, 1), (5, 13), (33, 1000), (3, 200_003)):
        weight = gaussian(shape, dtype)
        stored = reference.quantize(weight, double_quant=double_quant)
        want = reference.relative_error(stored, weight)
        assert native.relative_error(context, stored, weight) == pytest.approx(want, rel=1e-9)
        for fault in (weight * 2, -weight, weight * 1e-4):
            want = reference.relative_error(stored, fault)
            assert native.relative_error(context, stored, fault) == pytest.approx(want, rel=1e-9)
    zeros = torch.zeros(3, 70, dtype=dtype)
    assert native.relative_error(context, reference.quantize(zeros, double_quant=False), zeros) == 0.0
    assert native.relative_error(context, stored, torch.zeros(shape, dtype=dtype)) == float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_a_16_bit_source_can_hold(context, dtype):
    """All finite 16-bit patterns, in an order that mixes magnitudes within a block; as fp32 too."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    every = every.view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    finite = every[every.isfinite()]
    # bf16 reaches magnitudes whose mean over the blocks overflows: these are the next test's.
    finite = finite[finite.abs().float() < 1e30]
    shuffled = finite[torch.randperm(finite.numel(), generator=torch.Generator().manual_seed(3))]
    assert_same(context, finite.to(dtype).view(1, -1))
    assert_same(context, shuffled.to(dtype).view(1, -1))


def test_blocks_of_zeros_tiny_values_and_midpoints(context):
    assert_same(context, torch.zeros(7, 40))
    weight = gaussian((4, 128), torch.float32)
    weight[0, :64] = 0.0
    weight[1, :64] = 1e-40  # below the smallest scale
    weight[2, 64:] = -0.0
    code = reference.CODE
    weight[3, :15], weight[3, 15] = (code[:-1] + code[1:]) / 2, 1.0
    assert_same(context, weight)
    assert_same(context, weight.view(1, -1)[:, :70].contiguous() * 1e-38)  # a partial block that is stored as tiny


def test_any_strides(context, tmp_path):
    """H2: transposed, rows left out, and a tensor mapped from a file, at an odd place of it."""
    weight = gaussian((130, 65), torch.float32)
    assert_same(context, gaussian((65, 130), torch.bfloat16).t())
    assert_same(context, weight[::2])
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "w": weight}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert_same(context, file.get_slice("w")[3:120])
        assert_same(context, file.get_slice("w")[:, 2:60])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (2, 99), (2, 63)])
def test_what_is_not_finite_is_refused(context, bad, place):
    weight = gaussian((3, 100), torch.float32)
    weight[place] = bad
    with pytest.raises(KernelError, match="want finite values, got NaN or infinity"):
        native.quantize(context, weight, double_quant=True)


def test_what_the_reference_refuses_is_refused_alike(context):
    for bad in (torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 2, dtype=torch.float64), torch.full((1, 640), 3e38)):
        with pytest.raises(KernelError) as want:
            reference.quantize(bad, double_quant=True)
        with pytest.raises(KernelError) as got:
            native.quantize(context, bad, double_quant=True)
        assert str(got.value) == str(want.value)


def test_the_number_of_threads_does_not_matter(context):
    weight = gaussian((520, 513), torch.float32)
    alone = native.quantize(library.context(context.isa, 1), weight, double_quant=True)
    three = native.quantize(library.context(context.isa, 3), weight, double_quant=True)
    assert torch.equal(alone.codes, three.codes) and torch.equal(alone.absmax_codes, three.absmax_codes)
    errors = [native.relative_error(library.context(context.isa, threads), alone, weight) for threads in (1, 2, 3)]
    assert errors[0] == errors[1] == errors[2]
