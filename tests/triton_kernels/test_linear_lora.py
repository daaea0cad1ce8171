"""Linear layers: the oracles of tests/ops on each of the three ways that the kernels take."""

from __future__ import annotations

import pytest
import torch
from ops import test_linear_lora as oracle
from ops.memory import GuardedMemory

from quatrain.errors import KernelError
from quatrain.ops import triton_configs
from quatrain.ops.dropout import Dropout
from quatrain.ops.linear_lora.triton import linear_lora_backward, linear_lora_forward
from quatrain.ops.select import Ops
from quatrain.ops.triton_sizes import carved_bytes, lora_partials

PATHS = {"dense": (0, 1e30), "blas": (0, 0), "fused": (1 << 30, 0)}

CASES = [
    # (case of the oracle, NF4, dropout)
    ("one-of-each-size", False, 0.3),
    ("qkv-with-bias", True, 0.0),
    ("odd", True, 0.3),
    ("some-without-adapter", False, 0.0),
    ("longer-than-a-chunk", False, 0.3),
    ("whole-tiles", True, 0.3),
    ("beside-whole-tiles", True, 0.0),
    ("widest-adapter", True, 0.3),
]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way all products go: "fused" where weight and shape allow it, else as "blas"."""
    monkeypatch.setattr(triton_configs, "PRODUCTS", {"*": PATHS[request.param]})
    return request.param


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a test's shapes have several of each, some of them cut off."""
    for key, row in triton_configs.TABLE.items():
        blocks = {"BLOCK_T": 16, "BLOCK_N": 16, "BLOCK_K": 64 if "fused" in key else 32}
        small = {name: blocks.get(name, value) for name, value in row["*"].items()}
        monkeypatch.setitem(triton_configs.TABLE, key, {"*": small})


def way(path: str, case: tuple[str, bool, float]) -> object:
    """A parameter of the test below, or None where the way does not exist."""
    name, nf4, _ = case
    if path == "fused" and not (nf4 and oracle.CASES[name][1] % 64 == 0):
        return None
    return pytest.param(path, *case, id=f"{path}-{name}")


@pytest.mark.parametrize(
    ("path", "case", "nf4", "p"),
    [ways for path in PATHS for case in CASES if (ways := way(path, case))],
    indirect=["path"],
)
def test_forward_and_every_gradient(
    path: str, memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, case: str, nf4: bool,
    p: float,
) -> None:  # fmt: skip
    oracle.test_forward_and_every_gradient(memory, ops, dtype, random, oracle.CASES[case], nf4, p)


def test_several_blocks_of_everything(
    path: str, small_blocks: None, memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator
) -> None:
    """More rows of blocks than one group of programs, whole and cut off."""
    case = (140, 128, [(33, 20, True)])
    oracle.test_forward_and_every_gradient(memory, ops, dtype, random, case, True, 0.3)


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["plain", "dropout"])
def test_residual_and_down_projection_alone(
    path: str, memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator, p: float
) -> None:
    oracle.test_residual_and_down_projection_alone(memory, ops, dtype, random, p)


def test_no_dropout_is_bit_equal_to_p_zero(
    memory: GuardedMemory, ops: Ops, dtype: torch.dtype, random: torch.Generator
) -> None:
    oracle.test_no_dropout_is_bit_equal_to_p_zero(memory, ops, dtype, random)


@pytest.mark.parametrize("quantised", ["nested", "plain"])
def test_without_room_for_a_weight_nf4_is_read_in_place(
    memory: GuardedMemory, random: torch.Generator, monkeypatch: pytest.MonkeyPatch, quantised: str
) -> None:
    """The same numbers as the NF4 product that the table can ask for; and scratch of exactly the stated size is
    enough, one byte less is refused."""
    tokens, k, n, rank = 9, 64, 33, 4
    linear, _ = oracle.make_linear(memory, random, n, k, rank, 1, torch.float32, nf4=quantised == "nested", bias=True)
    if quantised == "plain":
        linear.weight = oracle.quantize(torch.randn(n, k, generator=random), double_quant=False)
    x, dout = torch.randn(tokens, k, generator=random), torch.randn(tokens, n, generator=random)
    dropout = Dropout(0.3, oracle.make_keys(tokens))
    small = carved_bytes(((tokens, rank), torch.float32), lora_partials(tokens, k + n, rank))
    results = []
    for table, size in ((PATHS["fused"], small), (PATHS["dense"], small), (PATHS["dense"], small + 4 * n * k)):
        monkeypatch.setattr(triton_configs, "PRODUCTS", {"*": table})
        scratch = memory.output(size, dtype=torch.uint8)
        out, u, dx = memory.output(tokens, n), memory.output(tokens, rank), memory.output(tokens, k)
        linear_lora_forward([out], [u], x, [linear], dropout, scratch)
        linear_lora_backward(dx, [dout], x, [u], [linear], dropout, scratch)
        results.append(torch.cat([out.flatten(), dx.flatten()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]) and torch.allclose(results[0], results[2], atol=1e-5)
    with pytest.raises(KernelError, match="scratch has 1791 bytes, want 1792"):
        linear_lora_backward(dx, [dout], x, [u], [linear], dropout, scratch[: small - 1])
