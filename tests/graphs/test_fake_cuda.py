"""A whole step of full-size models on fake CUDA tensors (shapes, devices and addresses, no numbers): no host read, no
allocation, and the same launches on the same addresses at every step of a bucket."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quatrain.config import InstructConfig
from quatrain.data.row import Row
from quatrain.engine.device import HostDevice
from quatrain.engine.device_layout import DeviceCosts, DeviceRequest, lay_out_on_device
from quatrain.engine.inputs import Batch, pack_rows
from quatrain.engine.step import StepEngine
from quatrain.model.adapters import AdapterSet, norm_sizes
from quatrain.model.params import BlockParams, ModelParams
from quatrain.model.shapes import shape_spec
from quatrain.model.spec import LINEARS, ModelSpec
from quatrain.ops.attention import RowBounds
from quatrain.ops.dropout import Dropout
from quatrain.ops.linear_lora import Linear
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.select import Backend, Ops, select_backend, triton_backend
from quatrain.ops.triton_sizes import scratch_bytes
from quatrain.profile.spans import Profiler

GIB = 1 << 30
REFERENCE = select_backend("cpu", torch.float32, "reference")  # here: its tables are no fake tensors
CASES = {
    "qwen3-0.6b": {"cuda_graph": "off"},
    "qwen3-8b": {"budget": 7.6 * GIB, "checkpoint": "block", "lora_dropout": 0.1},  # offloads, embedding on the host
    "llama-3.1-8b": {
        "layers": 8,
        "input_sets": 2,
        "budget": 5 * GIB,
        "train_norms": True,
    },  # accumulation, some blocks kept
    "qwen3-4b": {"layers": 12, "head_on_host": True},  # a tied head
    "qwen2.5-1.5b": {"layers": 8, "compute_dtype": "fp16", "clip": "layer", "checkpoint": "none"},
}


@pytest.fixture(autouse=True)
def _no_poison(_poison_unwritten_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no numbers to poison, and a GPU's arena is not poisoned either."""
    monkeypatch.setattr("quatrain.memory.arena.poison_by_default", False)


class WithoutGuard(TorchFunctionMode):
    """A CPU build of torch looks for a CUDA device when a fake CUDA tensor is indexed or copied to: the same by ways
    that do not look."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return indexed(args[0], args[1])
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            start, stop, step = part.indices(x.shape[dim])
            assert step == 1
            x, dim = x.narrow(dim, start, max(0, stop - start)), dim + 1
        else:
            x = x.select(dim, part)
    return x


class Launches(TorchDispatchMode):
    """Notes every call on the device, and refuses what a captured step must not do."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.log = known, list[Any]()

    def note(self, name: str, *args: Any) -> None:
        self.log.append((name, *(self._place(arg) for arg in args)))

    def _place(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            storage = arg.untyped_storage()._cdata
            assert arg.device.type == "cpu" or storage in self.known, "a tensor that is not the run's"
            return (storage, arg.storage_offset(), tuple(arg.shape), arg.stride(), str(arg.dtype), arg.device.type)
        if isinstance(arg, RowBounds):
            return self._place(arg.start), self._place(arg.end)
        if isinstance(arg, Dropout):
            return arg.p, self._place(arg.keys)
        if isinstance(arg, Linear):
            lora = arg.lora
            return id(arg.weight), None if lora is None else [
                self._place(t) for t in (lora.A, lora.B, lora.dA, lora.dB)
            ]
        if isinstance(arg, list | tuple):
            return [self._place(item) for item in arg]
        return arg

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        views = schema.returns and schema.returns[0].alias_info is not None
        if not (schema.is_mutable or views or schema.name.startswith("prim::")):
            raise RuntimeError(f"{schema.name} allocates, or reads on the host")
        if schema.is_mutable:
            target, sources = kwargs.get("out", args[0]), [a for a in args if isinstance(a, torch.Tensor)]
            if target.device.type == "cpu" and any(a.device.type == "cuda" for a in sources):
                self.note("to host", target, *sources)  # an input of a block, on its way out; see the test
            self.note(schema.name, *args, *kwargs.values())
        return func(*args, **kwargs)


class FakeCuda(HostDevice):
    """Streams are not modelled: `tests/graphs/test_offload.py` tests their order."""


def launches_of(launches: Callable[[], Launches | None]) -> Ops:
    """Ops that compute nothing and note what they were called with."""

    def stand_in(name: str) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            now = launches()
            if now is not None:
                now.note(name, *args, *more.values())

        return call

    return Ops(**{f.name: stand_in(f.name) for f in fields(Ops)})


def stand_in(launches: Callable[[], Launches | None]) -> Backend:
    """A backend whose ops compute nothing."""
    return replace(
        REFERENCE, scratch_bytes=scratch_bytes,
        temporary_bytes=lambda sizes: 0, bind=lambda scratch: launches_of(launches),
        head_chunk=lambda hidden, vocab: 1024,
    )  # fmt: skip


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), WithoutGuard():
        yield


def fake_params(spec: ModelSpec, dtype: torch.dtype, embed_device: str, head_device: str) -> ModelParams:
    def empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(name: str) -> Linear:
        n, k = spec.linear_shape(name)
        blocks = n * k // 64
        codes, absmax = empty(n * k // 2, dtype=torch.uint8), empty(blocks, dtype=torch.uint8)
        weight = Nf4Tensor((n, k), codes, None, absmax, empty(-(-blocks // 256)), empty(), empty(256))
        return Linear(weight, empty(n, dtype=dtype) if name in spec.biased else None)

    blocks = [
        BlockParams({name: linear(name) for name in LINEARS}, **{n: empty(s) for n, s in norm_sizes(spec, 0).items()})
        for _ in range(spec.num_layers)
    ]
    embed = empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=embed_device)
    head = embed
    if not spec.tie_word_embeddings:
        head = empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=head_device)
    return ModelParams(spec, embed, blocks, empty(spec.hidden_size), head)


class World:
    """An engine on fake tensors, and the launches of its latest step."""

    def __init__(self, name: str, case: dict[str, Any], make_backend: Callable[..., Backend] | None = None) -> None:
        options = dict(case)
        budget, sets = int(options.pop("budget", 80 * GIB)), options.pop("input_sets", 1)
        spec, streamed = shape_spec(name), options.pop("head_on_host", False)
        layers = options.pop("layers", spec.num_layers)
        spec = replace(spec, num_layers=layers, windows=spec.windows[:layers])
        config = InstructConfig(**{"micro_batch_tokens": 4096, "max_seq_len": 2048, **options})
        dtype = torch.float16 if config.compute_dtype == "fp16" else torch.bfloat16
        self.now: Launches | None = None
        backend = make_backend(dtype, lambda: self.now) if make_backend else stand_in(lambda: self.now)
        self.layout = lay_out_on_device(
            DeviceRequest(spec, config, dtype, backend, budget, 0, True, DeviceCosts(), sets, streamed)
        )
        params = fake_params(
            spec, dtype, *("cpu" if here else "cuda" for here in (self.layout.embed_on_host, self.layout.head_tile))
        )
        self.adapters = AdapterSet(spec, config, dtype, "cuda")
        self.adapters.attach(params)
        self.engine = StepEngine(params, self.adapters, config, self.layout, backend, Profiler(), FakeCuda())
        self.engine._run = self._run  # type: ignore[method-assign]
        self.known = {t.untyped_storage()._cdata for t in self._tensors(params)}

    def _tensors(self, params: ModelParams) -> Iterator[torch.Tensor]:
        yield self.engine.arena._block
        yield from (getattr(self.engine.state, field.name) for field in fields(self.engine.state))
        yield from (self.adapters.master, self.adapters.grad, self.adapters.exp_avg, self.adapters.exp_avg_sq)
        yield from (self.adapters.compute, params.embed, params.head, params.final_norm)
        assert self.engine._frequencies is not None
        yield self.engine._frequencies[0]
        for block in params.blocks:
            yield from (t for t in vars(block).values() if isinstance(t, torch.Tensor))
            for linear in block.linears.values():
                weight = vars(linear.weight).values() if isinstance(linear.weight, Nf4Tensor) else [linear.weight]
                yield from (t for t in (*weight, linear.bias) if isinstance(t, torch.Tensor))

    def _run(self, kind: str, loaded: Any, work: Callable[[], None]) -> None:
        self.now = Launches(self.known)
        try:
            with self.now:
                work()
        finally:
            self.log, self.now = self.now.log, None

    def step(self, batches: list[Batch], lr: float) -> list[Any]:
        self.engine.state.lr.fill_(lr)
        self.engine.train_step(batches)
        return self.log


def batch(lengths: list[int], first: int) -> Batch:
    """Rows whose last quarter is supervised."""
    rows = []
    for length in lengths:
        ids = tuple((first + i) % 1000 for i in range(length))
        start = length - length // 4
        rows.append(Row(ids, (-100,) * start + ids[start:]))
    return pack_rows(rows)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_a_bucket_launches_the_same(name: str) -> None:
    """Other data, lengths and rates; steps 1, 2 and 3 of one bucket, then one of another."""
    with fake_cuda():
        world = World(name, CASES[name])
        sets = world.layout.input_sets
        logs = [
            world.step([batch(lengths, first + i) for i in range(sets)], lr)
            for lengths, first, lr in (([2000, 1900], 0, 1e-4), ([1300, 1300, 1250], 5, 7e-5), ([2048, 1980], 9, 3e-5))
        ]
        other = world.step([batch([700], 1)] * sets, 1e-5)
    for log in logs[1:]:
        assert first_difference(logs[0], log) is None
    assert first_difference(logs[0], other) is not None
    ops = [entry[0] for entry in logs[0]]
    layers = world.engine.params.spec.num_layers
    assert ops.count("attention_forward") == sets * (layers + world.layout.first_kept)
    assert ops.count("attention_backward") == sets * layers
    assert ops.count("head_loss") == sets and ops.count("adamw_step") >= 1
    # Only block inputs leave for the host, each once; the last three are still on the device when they are needed.
    assert ops.count("to host") == sets * max(0, world.layout.offloaded - 3)
    assert (world.layout.embed_on_host, world.layout.head_tile > 0) == (name[-2:] in ("8b", "4b"), name == "qwen3-4b")
    assert (world.layout.offloaded > 0) == (name == "qwen3-8b")
    assert (0 < world.layout.first_kept < layers) == (name == "llama-3.1-8b")


def first_difference(a: list[Any], b: list[Any]) -> Any:
    """The first launches that differ, of two steps; comparing whole lists would print them."""
    pairs = zip_longest(a, b)
    return next(((i, x, y) for i, (x, y) in enumerate(pairs) if x != y), None)


@pytest.mark.parametrize("name", CASES)
def test_tritons_launches_are_the_same_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real launch functions, down to each kernel with its grid and arguments; the kernels are not run."""
    interface = pytest.importorskip("triton.runtime.jit", reason="triton is not installed").KernelInterface
    for module in ("triton_backend", "attention.triton", "head_loss.triton"):
        importlib.import_module(f"quatrain.ops.{module}")  # here: their tables are no fake tensors
    nf4 = importlib.import_module("quatrain.ops.nf4.triton")
    now: list[Callable[[], Launches | None]] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        assert isinstance(grid, tuple) and all(isinstance(size, int) for size in grid), "want a static grid"

        def launch(*args: Any, **more: Any) -> None:
            launches = now[-1]()
            assert launches is not None
            launches.note(kernel.fn.__name__, grid, *args, *sorted(more.items()))

        return launch

    monkeypatch.setattr(interface, "__getitem__", launcher)
    monkeypatch.setattr("quatrain.ops.triton_configs.architecture", lambda device: "sm_90")

    def backend(dtype: torch.dtype, launches: Callable[[], Launches | None]) -> Backend:
        now.append(launches)
        return triton_backend(dtype, "sm_90")

    with fake_cuda():
        world = World(name, {**CASES[name], "layers": min(8, CASES[name].get("layers", 8))}, backend)
        sets = world.layout.input_sets
        # Made by the first step of a process, which is never captured.
        monkeypatch.setattr(nf4, "code_table", functools.cache(nf4.code_table.__wrapped__))
        world.known.add(nf4.code_table(world.engine.state.lr.device).untyped_storage()._cdata)
        logs = [
            world.step([batch(lengths, first + i) for i in range(sets)], lr)
            for lengths, first, lr in (([2000, 1900], 0, 1e-4), ([1300, 1300, 1250], 5, 7e-5), ([2048, 1980], 9, 3e-5))
        ]
    assert first_difference(logs[0], logs[1]) is None and first_difference(logs[0], logs[2]) is None
    kernels = [entry[0] for entry in logs[0] if not entry[0].startswith("aten::")]
    assert len(kernels) > 100 and len(set(kernels)) > 15, sorted(set(kernels))


PLANTED: dict[str, Callable[[Any], Any]] = {
    "item": lambda engine: engine.state.lr.item(),
    "tolist": lambda engine: engine.state.squares.tolist(),
    "bool": lambda engine: bool(engine.state.skip),
    "copy to the host": lambda engine: engine.state.lr.cpu(),
    "clone": lambda engine: engine.arena["final"].clone(),
    "new tensor": lambda engine: torch.zeros(3, device="cuda"),
    "expression": lambda engine: engine.state.lr * 2,
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_a_step_must_not_do_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda():
        world = World("qwen3-0.6b", {"layers": 2})
        begin = world.engine.optimizer.begin_step
        monkeypatch.setattr(world.engine.optimizer, "begin_step", lambda: (PLANTED[what](world.engine), begin()))
        with pytest.raises(RuntimeError, match="allocates, or reads on the host"):
            world.step([batch([100], 0)], 1e-4)


def test_a_number_from_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is passed by value makes two steps differ: a graph would keep the first one's."""
    with fake_cuda():
        world = World("qwen3-0.6b", {"layers": 2})
        rate = iter((1e-4, 2e-4))
        begin = world.engine.optimizer.begin_step
        monkeypatch.setattr(
            world.engine.optimizer, "begin_step", lambda: (world.engine.state.lr.fill_(next(rate)), begin())
        )
        first, second = (world.step([batch([100], i)], 1e-4) for i in range(2))
    _, before, after = first_difference(first, second)
    assert before[0] == "aten::fill_" and before[-1] != after[-1] and len(first) == len(second)
