"""The roofline table: its gate lets right kernels pass and wrong ones not, and its rows are whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from quatrain.bench import peers
from quatrain.bench.kernels import gate, measure_kernels, table
from quatrain.errors import KernelError
from quatrain.model.shapes import shape_spec
from quatrain.model.spec import ModelSpec, RopeSpec
from quatrain.ops import library
from quatrain.ops.select import Backend, Ops, select_backend
from quatrain.profile.limits import Limits

TINY = replace(
    shape_spec("qwen2.5-0.5b"), vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rope=RopeSpec(theta=10_000.0, rotary_dim=16), windows=(None, None),
)  # fmt: skip
NOT_A_KERNEL = {"rope_tables", "dropout_keys", "clip_scale", "rope_backward", "sample_tokens"}
"""A few numbers each; rope's backward is the forward's kernel; the sampler is a kernel on a GPU only."""


def broken(backend: Backend, name: str) -> Backend:
    """`backend` with one op that runs and then disturbs its first output by a tenth."""

    def bind(scratch: torch.Tensor) -> Ops:
        ops = backend.bind(scratch)
        right: Callable[..., None] = getattr(ops, name)

        def wrong(*args: object, **more: object) -> None:
            right(*args, **more)
            first = args[0][0] if isinstance(args[0], list) else args[0]
            assert isinstance(first, torch.Tensor)
            first.mul_(1.1)

        return replace(ops, **{name: wrong})

    return replace(backend, bind=bind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_gate_lets_right_kernels_pass(kernels: str, dtype: torch.dtype) -> None:
    gate(TINY, 4, dtype, select_backend("cpu", dtype, kernels, 2))


@pytest.mark.parametrize("name", sorted({field.name for field in fields(Ops)} - NOT_A_KERNEL))
def test_the_gate_stops_a_wrong_kernel(name: str) -> None:
    reference = select_backend("cpu", torch.bfloat16, "reference")
    with pytest.raises(KernelError, match="reference: output 0 differs from the reference by"):
        gate(TINY, 4, torch.bfloat16, broken(reference, name))


def test_the_gate_stops_a_peer_with_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "swiglu", lambda gate, up: torch.nn.functional.gelu(gate) * up)
    with pytest.raises(KernelError, match="swiglu forward, torch"):
        gate(TINY, 4, torch.float32, select_backend("cpu", torch.float32, "reference"))


def test_rows_have_work_and_times() -> None:
    backend = select_backend("cpu", torch.float32, "reference")
    timed = [*measure_kernels(TINY, tokens=64, row=32, rank=4, dtype=torch.float32, backend=backend, repeats=1)]
    rows = {row["kernel"]: row for row in table(timed, Limits(1e12, 1e11))}
    assert {f"{group} {way}" for group in ("q+k+v", "o", "gate+up", "down") for way in ("forward", "backward")} < {
        *rows
    }
    spans = {one.span.op: one.span for one in timed}
    down = 64 * 64 * 96  # tokens, hidden size, intermediate size
    assert spans["down forward"].flops == 2 * down + 2 * 64 * 4 * (64 + 96)
    assert spans["nf4 dequantise"].bytes == 4 * 64 * 96 + (64 * 96 // 2 + 96 + 4 + 4)
    for name, row in rows.items():
        assert row["ms"] > 0 and row["gbytes"] > 0 and row["percent_of_peak"] > 0, name
        assert (row["torch_ms"] is None) == name.startswith("nf4"), name
        assert row["limit"] in ("product", "memory")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("smollm2-135m", 134_515_008), ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304)],
)
def test_shapes_are_the_published_ones(name: str, parameters: int) -> None:
    from quatrain.bench.shapes import RandomWeights

    source = RandomWeights(name)
    assert sum(info.num_bytes for info in source.inventory().values()) == 2 * parameters


def test_random_weights_are_a_model(spec: ModelSpec = TINY) -> None:
    from quatrain.bench.shapes import RandomWeights
    from quatrain.checkpoint.load import load_params

    source = RandomWeights("tiny", spec)
    params = load_params(source, quantize="none", double_quant=True, compute_dtype=torch.float32)
    gate_proj = params.blocks[1].linears["gate_proj"].weight
    assert isinstance(gate_proj, torch.Tensor)
    assert gate_proj.std() == pytest.approx(0.02, rel=0.1) and not torch.equal(gate_proj[0], gate_proj[1])
    assert bool((params.final_norm == 1).all())


def test_native_dequantises_as_the_reference_does() -> None:
    there, reason = library.available()
    if not there:
        pytest.skip(reason)
    native = select_backend("cpu", torch.float32, "auto", 2)
    reference = select_backend("cpu", torch.float32, "reference")
    weight = native.quantize(torch.randn(7, 130), double_quant=True)
    outs = torch.full((2, 7, 130), torch.nan)
    native.dequantize(outs[0], weight)
    reference.dequantize(outs[1], weight)
    assert torch.equal(outs[0], outs[1])
