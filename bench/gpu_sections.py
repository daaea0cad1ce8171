"""The sections of `scripts/gpu_check.py` that check (in gpu_speed.py: those that measure). Each is
a generator of rows, a row for each thing that it has looked at.

With the device "cpu" the same code runs on Triton's interpreter, on tiny shapes, laid out as on a GPU; what only a GPU
can show gives a row that is neither right nor wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quatrain.bench.cases import Case, Kernels, World, cases
from quatrain.bench.kernels import relative_errors, run_both
from quatrain.bench.shapes import RandomWeights
from quatrain.config import GenerateConfig, InstructConfig
from quatrain.data.row import IGNORE
from quatrain.data.row import Row as TokenRow
from quatrain.engine.device_layout import DeviceCosts, DeviceRequest, lay_out_on_device
from quatrain.engine.setup import choose_layout, resolve_compute_dtype
from quatrain.model.decoder import Decoder
from quatrain.model.shapes import shape_spec
from quatrain.model.spec import ModelSpec, RopeSpec
from quatrain.ops.attention import RowBounds
from quatrain.ops.nf4.reference import dequantize
from quatrain.ops.select import Backend, Ops, select_backend, triton_backend
from quatrain.train.pipeline import InstructPipeline

Row = dict[str, Any]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNEL_BOUNDS = {
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
    torch.float32: 1e-4,
}
"""Of the error's norm relative to the result's, with the reasons of `quatrain.bench.kernels.BOUNDS`."""
GRADIENT_BOUNDS = {"fp32": 1e-4, "bf16": 0.066, "fp16": 0.02}
"""Of each tensor's gradient, against fp32 on the CPU, four blocks deep. fp32: about 70 reductions in a row of at most
3,072 terms, eps sqrt(3072) sqrt(70) is 6e-5. bf16: 70 stored results with a rounding of eps / 2 each walk to 0.033
(0.034 on a CPU); twice that covers the worst tensor. fp16 has three bits more, but fewer of them in small values."""
ROUTES = {"dense": (0, float("inf")), "blas": (0, 0.0), "fused": (1 << 30, float("inf"))}
"""Ways to multiply by a weight, as entries of `triton_configs.PRODUCTS` that leave no choice."""
LINEARS = ("q+k+v", "o", "gate+up", "down")

MICRO_BATCH, STEPS = 256, 20

TINY = ModelSpec(
    family="qwen3", vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(theta=10_000.0, rotary_dim=16), max_position_embeddings=512,
    tie_word_embeddings=True, windows=(None, 9), qk_norm=True,
)  # fmt: skip


@dataclass(frozen=True)
class Where:
    """What to check on. `deadline`: of the clock `time.monotonic`."""

    device: str
    quick: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """Four blocks of known shapes, one with a window, and a vocabulary that no tile divides."""
        if not self.cuda:
            return {"tiny": TINY}
        names = ("qwen3-0.6b",) if self.quick else ("qwen3-0.6b", "smollm2-135m")
        cut = {"num_layers": 4, "vocab_size": 5003, "windows": (None, 40, None, None)}
        return {name: replace(shape_spec(name), **cut) for name in names}

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The interpreter knows no bf16 arithmetic, and GPUs before compute capability 8.0 have none."""
        bf16 = self.cuda and torch.cuda.get_device_capability() >= (8, 0)
        return ("bf16", "fp16", "fp32") if bf16 else ("fp16", "fp32")

    def backend(self, dtype: torch.dtype) -> Backend:
        return select_backend("cuda", dtype) if self.cuda else triton_backend(dtype, "sm_80")

    def open(self, spec: ModelSpec, input_sets: int = 1, **options: Any) -> InstructPipeline:
        """A model of random weights on the device, its adapters random as well."""
        config = settings(device=self.device, **options)
        source = RandomWeights("cut", spec)
        if self.cuda:
            layout = choose_layout(spec, config, None, input_sets)
        else:  # as on a GPU, but here
            dtype = resolve_compute_dtype(config)
            request = DeviceRequest(
                spec, config, dtype, self.backend(dtype), 1 << 40, 0, True, DeviceCosts(), input_sets
            )
            layout = replace(lay_out_on_device(request), device="cpu")
        return with_adapters(InstructPipeline(source, config, layout))


def settings(**options: Any) -> InstructConfig:
    own = {"lora_rank": 8, "max_seq_len": MICRO_BATCH, "micro_batch_tokens": MICRO_BATCH, "cache": False}
    return InstructConfig(**{**own, **options})


def with_adapters(pipeline: InstructPipeline) -> InstructPipeline:
    """Every trained value random, so that no gradient is zero; equal on every device."""
    generator = torch.Generator().manual_seed(1)
    for name, master in sorted(pipeline.adapters.named().items()):
        drawn = torch.randn(master.shape, generator=generator) * 0.05
        master.copy_(drawn if "lora" in name else 1 + drawn)
    pipeline.adapters.refresh()
    return pipeline


def token_rows(spec: ModelSpec, lengths: list[int], seed: int) -> list[TokenRow]:
    """Random rows, the second half of each supervised."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for n in lengths:
        ids = torch.randint(spec.vocab_size, (n,), generator=generator).tolist()
        rows.append(TokenRow(tuple(ids), (*[IGNORE] * (n // 2), *ids[n // 2 :])))
    return rows


def looked_at(check: str, look: Callable[[], Row], **about: Any) -> Row:
    """What `look` finds; an exception is a wrong row with its message."""
    try:
        found = look()
    except Exception as error:  # noqa: BLE001 - whatever is raised is what was found
        message = (str(error).strip().splitlines() or [""])[0]
        found = {"ok": False, "message": f"{type(error).__name__}: {message}"}
    return {"check": check, **about, **found}


# Facts.


def environment(where: Where) -> Iterator[Row]:
    names = ("quatrain", "torch", "triton", "transformers", "peft", "bitsandbytes", "unsloth")
    yield {"check": "versions", "ok": True, **{name: installed(name) for name in names}}
    if not where.cuda:
        yield {"check": "GPU", "ok": None, "message": "none: a rehearsal in Triton's interpreter"}
        return
    yield looked_at("a C compiler and Python.h, with which Triton builds what launches its kernels", launchers)
    yield looked_at("GPU", gpu)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def launchers() -> Row:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "absent")
    header = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return {"ok": compiler != "absent" and header, "compiler": compiler, "header": "there" if header else "absent"}


def gpu() -> Row:
    properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return {
        "ok": True, "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "total_bytes": total, "free_bytes": free,
        "driver": driver, "cuda": torch.version.cuda,
    }  # fmt: skip


# Every kernel against the reference.


def kernels(where: Where, dtype: str) -> Iterator[Row]:
    if dtype not in where.dtypes:
        why = "this GPU has no bf16 arithmetic" if where.cuda else "the interpreter has no bf16 arithmetic"
        yield {"check": f"all kernels in {dtype}", "ok": None, "message": why}
        return
    from quatrain.ops import triton_configs

    kind = DTYPES[dtype]
    ours, theirs = carried(where.backend(kind), where.device), select_backend("cpu", kind, "reference")
    for shape, spec in where.specs.items():
        for route, way in ROUTES.items():
            triton_configs.PRODUCTS = {"*": way}
            tokens = 2 * (48 if not where.cuda or where.quick else 165)
            world = World(spec, tokens, tokens // 2, 8, kind, theirs.quantize)
            bound = Kernels.bind(ours, world), Kernels.bind(theirs, world)
            for case in cases(world, dequantize):
                linear = case.name.split()[0] in LINEARS
                if linear or route == "dense":
                    name = f"{case.name}, {route}" if linear else case.name
                    yield looked_at(name, partial(compared, case, *bound, ours, kind), dtype=dtype, shape=shape)


def compared(case: Case, ours: Kernels, theirs: Kernels, backend: Backend, dtype: torch.dtype) -> Row:
    errors, bound = relative_errors(*run_both(case, ours, theirs, backend)), KERNEL_BOUNDS[dtype]
    return {"ok": all(error <= bound for error in errors), "error": max(errors), "bound": bound, "outputs": errors}


def carried(backend: Backend, device: str) -> Backend:
    """`backend` for tensors that stay on the CPU: each call copies its tensors to `device` and back."""
    from quatrain.ops.nf4 import triton as nf4

    def bind(scratch: torch.Tensor) -> Ops:
        ops = backend.bind(scratch.to(device))
        return Ops(**{field.name: partial(carry, getattr(ops, field.name), device) for field in fields(Ops)})

    def quantize(weight: torch.Tensor, *, double_quant: bool) -> Any:
        return moved(nf4.quantize(weight.to(device), double_quant=double_quant), "cpu", {})

    return replace(backend, bind=bind, quantize=quantize, dequantize=partial(carry, backend.dequantize, device))


def carry(op: Callable[..., None], device: str, *args: Any, **more: Any) -> None:
    """Rows of a stream, which the caller has as a tuple, become the bounds that the GPU's attention takes."""
    args = tuple(RowBounds.of(a, args[0].shape[0]) if isinstance(a, tuple) and a[0] == 0 else a for a in args)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    op(*[moved(a, device, seen) for a in args], **{name: moved(a, device, seen) for name, a in more.items()})
    for here, there in seen.values():
        here.copy_(there)


def moved(value: Any, device: str, seen: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A copy on `device` of a tensor, or of whatever holds tensors; `seen` has both sides by identity."""
    if isinstance(value, torch.Tensor):
        return seen.setdefault(id(value), (value, value.to(device, copy=True)))[1]
    if isinstance(value, list):
        return [moved(part, device, seen) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device, seen) for f in fields(value)})
    return value


# Whole steps.


def gradients(where: Where) -> Iterator[Row]:
    for shape, spec in where.specs.items():
        rows = token_rows(spec, [70, 1 + 1, 97] if where.cuda else [13, 2, 30], seed=0)
        options = {"train_norms": True, "lora_dropout": 0.1}
        exact = InstructPipeline(
            RandomWeights("cut", spec), config := settings(compute_dtype="fp32", kernels="reference", **options),
            choose_layout(spec, config),
        )  # fmt: skip
        wanted = with_adapters(exact).loss_and_gradients(rows)
        for dtype in where.dtypes:
            if where.cuda or dtype == "fp32":
                look = partial(against, where, spec, rows, wanted, dtype, options)
                yield looked_at("loss and gradients against the CPU in fp32", look, shape=shape, dtype=dtype)


def against(where: Where, spec: ModelSpec, rows: Any, wanted: Any, dtype: str, options: dict[str, Any]) -> Row:
    loss, grads = where.open(spec, compute_dtype=dtype, **options).loss_and_gradients(rows)
    apart = relative_errors([grad.cpu() for grad in grads.values()], [wanted[1][name] for name in grads])
    errors = dict(zip(grads, apart, strict=True))
    worst, bound = max(errors, key=lambda name: errors[name]), GRADIENT_BOUNDS[dtype]
    right = all(error <= bound for error in errors.values()) and abs(loss - wanted[0]) <= bound * wanted[0]
    return {
        "ok": right, "error": errors[worst], "bound": bound, "worst": worst, "loss": loss, "cpu_loss": wanted[0]
    }  # fmt: skip


def graphs(where: Where) -> Iterator[Row]:
    for shape, spec in where.specs.items():
        for dtype in where.dtypes if where.cuda else ("fp32",):
            look = partial(captured_is_uncaptured, where, spec, dtype)
            yield looked_at(f"{STEPS} steps captured and not: equal bits", look, shape=shape, dtype=dtype)


def captured_is_uncaptured(where: Where, spec: ModelSpec, dtype: str) -> Row:
    found, report = [], {}
    for mode in ("on" if where.cuda else "auto", "off"):
        pipeline = where.open(spec, 2, compute_dtype=dtype, lora_dropout=0.1, cuda_graph=mode)
        results = []
        for step, micro_batches in enumerate(changing_steps(where, spec)):
            pipeline.set_learning_rate(1e-3 / (1 + step))
            results.append(pipeline.train_micro_batches(micro_batches))
        found.append((results, {name: value.cpu() for name, value in pipeline.adapters.named().items()}))
        report = report or pipeline.graph_report()
    (results, values), (plain_results, plain_values) = found
    apart = sum(a != b for a, b in zip(results, plain_results, strict=True))
    tensors = sum(not torch.equal(values[name], plain_values[name]) for name in values)
    replays = {"replays": report["replays"], "shapes": len(report["captured"]), "message": report["reason"] or ""}
    right = apart == tensors == 0 and (report["replays"] > 0 or not where.cuda)
    return {"ok": right, "steps_apart": apart, "tensors_apart": tensors, "last_loss": results[-1].loss, **replays}


def changing_steps(where: Where, spec: ModelSpec) -> Iterator[list[list[TokenRow]]]:
    """One and two micro-batches in turn, of rows of changing lengths."""
    scale = 1 if where.cuda else 8
    for step in range(STEPS if where.cuda else 4):
        lengths = [(96 + 7 * step) // scale, 2 + step % 5, (40 + 3 * step % 17) // scale]
        yield [token_rows(spec, lengths[at:], seed=10 * step + at) for at in range(1 + step // 2 % 2)]


def decoding(where: Where) -> Iterator[Row]:
    for shape, spec in where.specs.items():
        for dtype in where.dtypes if where.cuda else ("fp32",):
            look = partial(generated, where, spec, dtype)
            check = "greedy tokens the CPU would take; captured and not: equal, no host synchronisation"
            yield looked_at(check, look, shape=shape, dtype=dtype)


def generated(where: Where, spec: ModelSpec, dtype: str) -> Row:
    """`error`: how far a chosen token's logit is below the best one, on the CPU in fp32 after the same tokens, of the
    distance between the best and the worst logit."""
    count, tokens, report = 48 if where.cuda else 3, [], {}
    prompts = [list(row.input_ids) for row in token_rows(spec, [40, 7, 100] if where.cuda else [9, 3], seed=1)]
    for mode in ("on" if where.cuda else "auto", "off"):
        pipeline = where.open(spec, compute_dtype=dtype, cuda_graph=mode)
        both = [GenerateConfig(max_new_tokens=count, temperature=t, top_k=50, top_p=0.9) for t in (0.0, 0.8)]
        pipeline.generate_ids(prompts, both[0])  # compiles and captures
        tokens.append(with_errors_on_sync(where, lambda p=pipeline, b=both: [p.generate_ids(prompts, c) for c in b]))
        report = report or pipeline.graph_report()
    exact_config = settings(compute_dtype="fp32", kernels="reference")
    exact = with_adapters(
        InstructPipeline(RandomWeights("cut", spec), exact_config, choose_layout(spec, exact_config))
    )  # fmt: skip
    gaps = []
    decoder = Decoder(exact.engine.params, exact.layout.backend)
    for prompt, ids in zip(prompts, tokens[0][0], strict=True):
        logits = decoder.start([prompt], len(prompt) + count)
        for token in ids:
            best, worst = float(logits.max()), float(logits.min())
            gaps.append((best - float(logits[0, token])) / (best - worst))
            logits = decoder.step([token])
    bound, same = GRADIENT_BOUNDS[dtype], tokens[0] == tokens[1]
    right = same and max(gaps) <= bound and (report["replays"] > 0 or not where.cuda)
    return {"ok": right, "error": max(gaps), "bound": bound, "equal": same, "replays": report["replays"]}


def with_errors_on_sync(where: Where, look: Callable[[], Any]) -> Any:
    if not where.cuda:
        return look()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return look()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sync(where: Where) -> Iterator[Row]:
    if not where.cuda:
        yield {"check": "no host synchronisation inside a step", "ok": None, "message": "needs a GPU"}
        return
    for mode in ("off", "on"):
        look = partial(without_sync, where, mode)
        yield looked_at("no host synchronisation inside a step", look, cuda_graph=mode)


def without_sync(where: Where, mode: str) -> Row:
    spec = next(iter(where.specs.values()))
    pipeline = where.open(spec, cuda_graph=mode)
    steps = [[token_rows(spec, [100, 30 + step], seed=step)] for step in range(6)]
    for step in steps[:3]:  # compiles, captures, replays
        pipeline.train_micro_batches(step)
    started = with_errors_on_sync(where, lambda: [pipeline.start_step(step) for step in steps[3:]])
    return {"ok": True, "last_loss": started[-1].result().loss}
