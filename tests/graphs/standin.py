"""A device that captures on the CPU: during a capture nothing runs, and a replay makes the recorded calls again, on the
same tensors. What a GPU would refuse or silently get wrong during a capture raises here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from oracles import families, hf
from oracles.engine import adapter_values, give_adapters, make_config
from torch.utils._python_dispatch import TorchDispatchMode

from quatrain.checkpoint.open import open_source
from quatrain.config import InstructConfig
from quatrain.data.row import Row
from quatrain.engine.device import HostDevice, Replay
from quatrain.engine.device_layout import DeviceCosts, DeviceRequest, lay_out_on_device
from quatrain.engine.setup import resolve_compute_dtype
from quatrain.engine.step import StepEngine
from quatrain.ops.attention import RowBounds
from quatrain.ops.head_loss import HeadTiles
from quatrain.ops.select import Backend, Ops, reference_ops, select_backend
from quatrain.train.pipeline import InstructPipeline

GRAPH_BYTES = 1000
"""What a captured step takes on this device."""


@dataclass
class Tape(HostDevice):
    """`fail_at`: the recorded call at which a capture breaks. `calls` of every capture, by name."""

    fail_at: int | None = None
    capturing: bool = False
    captures: list[list[str]] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)
    launches: int = 0
    _calls: list[Callable[[], None]] = field(default_factory=list)

    def capture(self, work: Callable[[], None]) -> Replay:
        assert not self.capturing, "a capture was left open"
        self.capturing, self._calls = True, []
        self.captures.append([])
        try:
            with _Loose(self):
                work()
        finally:
            self.capturing = False
        calls = self._calls

        def launch() -> None:
            self.launches += 1
            for call in calls:
                call()

        return Replay(launch, GRAPH_BYTES)

    def record(self, name: str, call: Callable[[], None]) -> None:
        self.captures[-1].append(name)
        if self.fail_at is not None and len(self.captures[-1]) == self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._calls.append(call)

    def recording(self, ops: Ops) -> Ops:
        """`ops` that are recorded instead of run during a capture, each as one kernel."""

        def wrapped(name: str, op: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any, **more: Any) -> None:
                if self.capturing:
                    self.record(name, lambda: op(*args, **more))
                else:
                    self.eager.append(name)
                    op(*args, **more)

            return call

        return replace(ops, **{f.name: wrapped(f.name, getattr(ops, f.name)) for f in fields(ops)})


class _Loose(TorchDispatchMode):
    """Torch's own calls during a capture: writes into existing tensors are recorded, views are made, and nothing else
    is allowed: no new tensor, no read by the host."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        if schema.is_mutable:
            self.tape.record(schema.name, lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        if schema.returns and schema.returns[0].alias_info is not None:
            return func(*args, **kwargs)
        raise RuntimeError(f"{schema.name} during a capture: it would allocate, or make the host wait")


def row_bounded(ops: Ops) -> Ops:
    """The reference ops with the rows of a stream on the device and inert tails, as CUDA's take them."""

    def bounds(rows: RowBounds) -> list[int]:
        spans = sorted({(a, b) for a, b in zip(rows.start.tolist(), rows.end.tolist(), strict=True) if a < b})
        return [0, *(end for _, end in spans)]

    def attention_forward(out: Any, lse: Any, q: Any, k: Any, v: Any, rows: RowBounds, *more: Any) -> None:
        cu_seqlens = bounds(rows)
        out[cu_seqlens[-1] :], lse[cu_seqlens[-1] :] = 0, 0
        ops.attention_forward(out, lse, q, k, v, cu_seqlens, *more)

    def attention_backward(*args: Any) -> None:
        (dq, dk, dv, *rest), rows, more = args[:9], args[9], args[10:]
        cu_seqlens = bounds(rows)
        ops.attention_backward(dq, dk, dv, *rest, cu_seqlens, *more)
        for tensor in (dq, dk, dv):
            tensor[cu_seqlens[-1] :] = 0

    def head_loss(losses: Any, dhidden: Any, hidden: Any, rows: Any, targets: Any, head: Any, logits: Any) -> None:
        if isinstance(head, HeadTiles):
            head = torch.cat([tile.clone() for _, tile in head.tiles()])
        n = int((targets >= 0).sum())
        assert bool((targets[n:] == -1).all())
        losses[n:] = 0
        ops.head_loss(losses[:n], dhidden, hidden, rows[:n], targets[:n], head, logits)

    def cached_attention(out: Any, q: Any, k: Any, v: Any, keys: Any, values: Any, lengths: Any, *more: Any) -> None:
        live = lengths > 0
        found, own = out[live], [cache[live] for cache in (keys, values)]
        ops.cached_attention_forward(found, q[live], k[live], v[live], *own, lengths[live], *more)
        out.zero_()
        out[live], keys[live], values[live] = found, *own

    return replace(
        ops, attention_forward=attention_forward, attention_backward=attention_backward, head_loss=head_loss,
        cached_attention_forward=cached_attention,
    )  # fmt: skip


def backend_of(tape: Tape) -> Backend:
    reference = select_backend("cpu", torch.float32, "reference")
    return replace(reference, bind=lambda scratch: tape.recording(row_bounded(reference_ops(scratch))))


def open_on_tape(
    variant: families.Variant,
    folder: Path,
    tape: Tape,
    *,
    backend: Backend | None = None,
    input_sets: int = 1,
    budget: int = 1 << 40,
    head_on_host: bool = False,
    **options: Any,
) -> InstructPipeline:
    """A pipeline whose engine is laid out as on a GPU, on the tape; its adapters set to random values (B not zero)."""
    config = make_config(**{"cuda_graph": "auto", **options})
    families.save(variant, folder)
    source = open_source(str(folder))
    dtype = resolve_compute_dtype(config)
    request = DeviceRequest(
        source.spec, config, dtype, backend or backend_of(tape), budget, 0, config.double_quant,
        DeviceCosts(graphs=4 * GRAPH_BYTES), input_sets, head_on_host,
    )  # fmt: skip
    layout = replace(lay_out_on_device(request), device="cpu")
    pipeline = InstructPipeline(source, config, layout)
    pipeline.engine = StepEngine(
        pipeline.engine.params, pipeline.adapters, config, layout, layout.backend, pipeline.profiler, tape
    )
    give_adapters(pipeline, adapter_values(variant, InstructConfig(**{**config.model_dump(), "cuda_graph": "auto"})))
    pipeline.set_learning_rate(config.learning_rate)
    return pipeline


def rows_of(lengths: list[int], seed: int) -> list[Row]:
    return hf.make_rows(lengths, families.VOCAB, seed=seed)
