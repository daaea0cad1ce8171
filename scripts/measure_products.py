"""Measures the three ways to multiply by an NF4 weight on this GPU and prints the row for `PRODUCTS` in
src/quatrain/ops/triton_configs.py that loses least. A few minutes, no network.

    python scripts/measure_products.py                 Qwen3's shapes, 16 to 8,192 tokens, every dtype of the GPU
    python scripts/measure_products.py --dtype bf16 --shape qwen3-8b
    python scripts/measure_products.py --device cpu    a rehearsal in Triton's interpreter: its times mean nothing

A time is that of forward and backward of a linear layer with an adapter of rank 16. What a row loses is the mean, over
all sizes, of the time of the way that it takes over that of the fastest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WAYS = {"dense": (0, float("inf")), "blas": (0, 0.0), "fused": (1 << 30, float("inf"))}
"""As entries of `PRODUCTS` that leave no choice."""
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
RANK = 16
COLD_BYTES = 256 << 20
"""Weights in turn take at least this much, so that no cache holds the next one."""


@dataclass(frozen=True)
class Timed:
    """Seconds by way of a product of x [tokens, k] with a weight [n, k]."""

    tokens: int
    n: int
    k: int
    seconds: dict[str, float]

    def taken(self, row: tuple[int, float]) -> float:
        """The time of the way that a row of `PRODUCTS` takes (see `triton_configs.product_path`)."""
        if self.tokens <= row[0]:
            return self.seconds["fused"]
        return self.seconds["blas" if self.tokens * self.n * self.k >= row[1] else "dense"]


def loss(row: tuple[int, float], times: list[Timed]) -> float:
    """What a row loses: 1 is nothing."""
    return sum(timed.taken(row) / min(timed.seconds.values()) for timed in times) / len(times)


def best_row(times: list[Timed]) -> tuple[int, float]:
    """The row that loses least; of equal ones the one with the least of our own products."""
    works = [0.0, *(2.0**power for power in range(24, 44)), float("inf")]
    rows = product((0, *sorted({timed.tokens for timed in times})), works)
    return min(rows, key=lambda row: (loss(row, times), row))


def written(row: tuple[int, float]) -> str:
    """The row as the table has it."""
    work = {0.0: "0", float("inf"): 'float("inf")'}.get(row[1]) or f"2**{int(row[1]).bit_length() - 1}"
    return f"({row[0]}, {work})"


def measure(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Timed]:
    from quatrain.model.shapes import shape_spec
    from quatrain.model.spec import LINEARS

    shapes = {shape_spec(name).linear_shape(linear) for name in options.shape for linear in LINEARS}
    if options.device == "cpu":
        shapes = {(64, 128), (192, 64)}
    for (n, k), tokens in product(sorted(shapes), TOKENS if options.device == "cuda" else (16, 48)):
        yield Timed(tokens, n, k, {way: seconds(way, tokens, n, k, dtype, options.device) for way in WAYS})


def seconds(way: str, tokens: int, n: int, k: int, dtype: torch.dtype, device: str) -> float:
    """Of a forward and a backward, over weights in turn."""
    import torch

    from quatrain.ops import triton_configs
    from quatrain.ops.linear_lora import Linear, Lora
    from quatrain.ops.nf4.triton import quantize
    from quatrain.ops.triton_backend import triton_ops

    def random(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(0.02).to(of)

    weight = quantize(random(n, k, of=torch.float32), double_quant=True)
    copies = 1 if device == "cpu" else max(2, min(64, COLD_BYTES // (n * k // 2)))
    da, db = random(RANK, k, of=torch.float32), random(n, RANK, of=torch.float32)
    lora = Lora(random(RANK, k), random(n, RANK), da, db, 2.0, 0)
    linears = [Linear(copied(weight), None, lora) for _ in range(copies)]
    x, dx = random(tokens, k), random(tokens, k)
    out, dout, u = random(tokens, n), random(tokens, n), random(tokens, RANK)
    ops = triton_ops(torch.empty((n * k + (k + n) * RANK * 64 + tokens * 256) * 4, dtype=torch.uint8, device=device))

    def run() -> None:
        for linear in linears:
            ops.linear_lora_forward([out], [u], x, [linear], None)
            ops.linear_lora_backward(dx, [dout], x, [u], [linear], None)

    before, triton_configs.PRODUCTS = triton_configs.PRODUCTS, {"*": WAYS[way]}
    try:
        run()  # compiles
        return clock(run, device) / copies
    finally:
        triton_configs.PRODUCTS = before


def copied(weight: Any) -> Any:
    """The same NF4 weight at another place."""
    from dataclasses import replace

    return replace(weight, codes=weight.codes.clone(), absmax_codes=weight.absmax_codes.clone())


def clock(run: Callable[[], None], device: str) -> float:
    """The median of a few runs; on a GPU of a captured one, which has no launches to wait for."""
    import torch

    from quatrain.engine.device import CudaDevice

    if device == "cpu":
        return once(run)
    cuda = CudaDevice()
    with cuda.running():
        run()  # on the stream that is captured
        launch = cuda.capture(run).launch

        def launched() -> None:
            launch()
            torch.cuda.synchronize()

        return sorted(once(launched) for _ in range(5))[2]


def once(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), action="append", help="default: all")
    parser.add_argument("--shape", action="append", help="a known shape, repeatable; default: Qwen3's four")
    options = parser.parse_args()
    options.shape = options.shape or list(SHAPES)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from quatrain.engine.setup import cuda_missing
    from quatrain.ops.triton_configs import CLASSES, PRODUCTS, _best, architecture

    if options.device == "cuda" and (missing := cuda_missing()) is not None:
        print(f"measure_products: no GPU to measure: {missing}; `--device cpu` rehearses it")
        return 1
    arch = architecture(torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu"))
    every = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    there = [name for name in every if name != "bf16" or (options.device == "cuda" and arch != "sm_75")]
    for name in options.dtype or there:
        times = []
        print(f"{arch} {name}\n{'tokens':>7}{'n':>7}{'k':>7}" + "".join(f"{way + ' us':>12}" for way in WAYS))
        for timed in measure(options, every[name]):
            times.append(timed)
            cells = "".join(f"{1e6 * timed.seconds[way]:>12,.1f}" for way in WAYS)
            print(f"{timed.tokens:>7}{timed.n:>7}{timed.k:>7}{cells}", flush=True)
        row, now = best_row(times), _best(PRODUCTS, arch, name)
        print(f"the table's row {written(now)} loses {loss(now, times):.3f}; this one loses {loss(row, times):.3f}:")
        print(f'    "{CLASSES[arch]}/{name}": {written(row)},')
    return 0


if __name__ == "__main__":
    sys.exit(main())
