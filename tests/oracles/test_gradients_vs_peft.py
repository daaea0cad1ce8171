"""A whole step against transformers + PEFT + bitsandbytes: the loss and every adapter's gradient, model by model.

The rows have different lengths. The engine packs them into one stream; the oracle runs them one by one, no padding,
and divides the summed loss by the number of supervised tokens. Run with `-s` to see the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
from oracles import families, hf
from oracles.engine import every_kernels, make_config, open_oracle, open_pipeline

from quatrain.ops import library

LENGTHS = [2, 9, 14, 17]
"""Ascending: transformers' dynamic rope keeps the frequencies of a longer row for a shorter one that is still long."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "lora_rank": 3},
    "subset": {"lora_targets": ["v_proj", "down_proj"]},
    "some-layers": {"lora_targets": r".*layers\.(0|2)\..*(q_proj|o_proj|gate_proj)"},
    "single-statistics": {"double_quant": False},
    "recomputed": {"checkpoint": "block"},
    "kept": {"checkpoint": "none"},
    "clip-by-layer": {"clip": "layer"},
}


@dataclass(frozen=True)
class Line:
    """A line of the table: one model's loss on both sides, and the worst gradient."""

    model: str
    ours: float
    theirs: float
    error: float
    worst: str
    tensors: int

    def __str__(self) -> str:
        worst = self.worst.removeprefix("base_model.model.model.")
        return f"{self.model:44} {self.ours:.9f} {self.theirs:.9f} {self.error:9.1e} {self.tensors:4} {worst}"


def compare(model: str, ours: Any, theirs: Any, bound: float) -> None:
    """Both are (loss, {name: gradient})."""
    (loss, gradients), (want_loss, want_gradients) = ours, theirs
    assert gradients.keys() == want_gradients.keys()
    assert all(float(want.norm()) > 0 for want in want_gradients.values())
    errors = {name: hf.norm_error(gradients[name], want) for name, want in want_gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    print("\n" + str(Line(model, loss, want_loss, errors[worst], worst, len(errors))), end="")
    assert loss == pytest.approx(want_loss, rel=bound)
    assert errors[worst] <= bound, (worst, errors[worst])


@pytest.mark.parametrize("quantize", ["nf4", "none"])
@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_every_family_in_fp32_and_fp64(tmp_path: Path, variant: families.Variant, quantize: str) -> None:
    """J7, J8, J10: biases, QK-norm and windows of every family, in the loss and in every gradient."""
    rows = hf.make_rows(LENGTHS, families.VOCAB)
    # Dynamic scaling: transformers computes theta in fp32, we in fp64, and the fp32 frequencies differ by an ulp.
    fp64_bound = tol.elementwise(torch.float32, 4) if "dynamic" in variant.name else tol.ENGINE_FP64
    for dtype, bound in (("fp32", tol.ENGINE_FP32), ("fp64", fp64_bound)):
        config = make_config(quantize=quantize, compute_dtype=dtype, train_norms=True)
        theirs = hf.loss_and_gradients(open_oracle(variant, config), rows)
        ours = open_pipeline(variant, tmp_path / dtype, config).loss_and_gradients(rows)
        compare(f"{variant} {quantize} {dtype}", ours, theirs, bound)


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_every_instruction_set(tmp_path: Path, variant: families.Variant) -> None:
    """The native kernels of each and the reference ops, in fp32 with the bound of the table; norms too, with a row that
    is longer than a tile."""
    rows = hf.make_rows([*LENGTHS, 40], families.VOCAB)
    theirs = hf.loss_and_gradients(open_oracle(variant, make_config(train_norms=True)), rows)
    kernels = every_kernels()
    for name in kernels:
        config = make_config(train_norms=True, kernels=name)
        ours = open_pipeline(variant, tmp_path / name, config)
        assert ours.layout.backend.name == (name if name == "reference" else f"native {name}")
        compare(f"{variant} {name}", ours.loss_and_gradients(rows), theirs, tol.ENGINE_FP32)
    if len(kernels) == 1:
        pytest.skip(f"reference ops only: {library.available()[1]}")


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_every_kind_of_adapter(tmp_path: Path, variant: families.Variant, options: dict[str, Any]) -> None:
    rows = hf.make_rows(LENGTHS, families.VOCAB)
    config = make_config(**options)
    theirs = hf.loss_and_gradients(open_oracle(variant, config), rows)
    ours = open_pipeline(variant, tmp_path, config).loss_and_gradients(rows)
    compare(f"{variant} {options}", ours, theirs, tol.ENGINE_FP32)


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_plain_transformers_and_peft_say_the_same(tmp_path: Path, variant: families.Variant) -> None:
    """The oracle as anybody would run it, in fp32: both sides round, so the bound is twice as wide."""
    rows = hf.make_rows(LENGTHS, families.VOCAB)
    config = make_config()
    theirs = hf.loss_and_gradients(open_oracle(variant, config, fp64=False), rows)
    ours = open_pipeline(variant, tmp_path, config).loss_and_gradients(rows)
    compare(f"{variant} plain fp32", ours, theirs, 2 * tol.ENGINE_FP32)


@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_bf16_stays_within_its_roundings(tmp_path: Path, variant: families.Variant) -> None:
    """Gradients are fp32 sums of bf16 products; the loss stays within one ulp of bf16. For every implementation."""
    rows = hf.make_rows(LENGTHS, families.VOCAB)
    theirs = hf.loss_and_gradients(open_oracle(variant, make_config(train_norms=True)), rows)
    for name in every_kernels():
        config = make_config(compute_dtype="bf16", train_norms=True, kernels=name)
        ours = open_pipeline(variant, tmp_path / name, config).loss_and_gradients(rows)
        assert ours[0] == pytest.approx(theirs[0], rel=torch.finfo(torch.bfloat16).eps)
        assert all(gradient.dtype == torch.float32 for gradient in ours[1].values())
        compare(f"{variant} {name} bf16", ours, theirs, tol.ENGINE_BF16)


@pytest.mark.parametrize("train_norms", [False, True], ids=["adapters", "norms-too"])
@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_a_gradient_given_by_the_caller(tmp_path: Path, variant: families.Variant, train_norms: bool) -> None:
    """autograd's own gradient at the final norm's output gives autograd's adapter gradients, whatever the loss."""
    rows = hf.make_rows(LENGTHS, families.VOCAB)
    config = make_config(train_norms=train_norms)
    oracle = open_oracle(variant, config)
    random = torch.Generator().manual_seed(5)
    seen: list[torch.Tensor] = []
    oracle.get_base_model().model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    oracle.zero_grad()
    d_hidden = []
    for row in rows:
        seen.clear()
        oracle(input_ids=torch.tensor([row.input_ids]), use_cache=False)
        weights = torch.randn(seen[0].shape, generator=random, dtype=torch.float64)
        loss = (weights * seen[0].sin()).sum()  # any loss on the hidden states
        (gradient,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
        loss.backward()
        d_hidden.append(gradient[0])
    want = {name: p.grad for name, p in hf.trainable(oracle).items()}

    pipeline = open_pipeline(variant, tmp_path, config)
    got = pipeline.hidden_gradients(rows, torch.cat(d_hidden))
    compare(f"{variant} hidden_gradients", (0.0, got), (0.0, want), tol.ENGINE_FP32)
