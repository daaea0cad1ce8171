"""NF4 quantisation beside bitsandbytes: one tensor, the same bits, G weights/s.

Bit-equality is asserted before anything is timed; the sides take turns, and each line is a median. Quatrain's lines are
the kernel for codes and block scales; all of the quantisation; and that with the check that a load of a model makes of
every tensor (the relative error of the result).

    python bench/quantize.py                       # 4096 x 4096 in bf16, 2 threads, 5 rounds
    python bench/quantize.py --rows 1536 --columns 576 --dtype fp32
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from quatrain.ops import library, native
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4 import native as nf4_native

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4096), ("columns", 4096), ("threads", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args()
    from bitsandbytes import functional

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(options.rows, options.columns, generator=generator).mul_(0.02).to(DTYPES[options.dtype])
    context = library.context(library.best_isa(), options.threads)
    theirs = partial(functional.quantize_4bit, weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    ours = alone(options.threads, partial(nf4_native.quantize, context, weight, double_quant=True))
    assert_equal(ours(), alone(options.threads, theirs)())
    check = partial(nf4_native.relative_error, context, ours(), weight)
    sides: dict[str, Callable[[], Any]] = {"bitsandbytes": theirs, "quatrain": ours}
    sides["quatrain and check"] = lambda: (ours(), alone(options.threads, check)())
    if weight.dtype in native.DTYPES:
        codes, absmax = torch.empty_like(ours().codes), torch.empty(-(-weight.numel() // 64))
        sides["quatrain, codes and scales only"] = partial(native.quantize, context, codes, absmax, weight)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, {library.best_isa()}")
    print(f"torch {torch.__version__}, bitsandbytes {version('bitsandbytes')}, double quantisation, equal bits")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    for name, taken in seconds.items():
        print(f"{weight.numel() / statistics.median(taken) / 1e9:8.3f} G weights/s  {name}")


def alone(threads: int, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with one torch thread, as a load of a model has it."""

    def inner() -> Any:
        torch.set_num_threads(1)
        try:
            return run()
        finally:
            torch.set_num_threads(threads)

    return inner


def assert_equal(ours: Nf4Tensor, theirs: tuple[torch.Tensor, Any]) -> None:
    """The mean of the block scales depends on torch's threads: both sides were computed with one."""
    packed, state = theirs
    pairs = ((ours.codes, packed.view(-1)), (ours.absmax_codes, state.absmax), (ours.absmax2, state.state2.absmax))
    assert all(torch.equal(a, b) for a, b in (*pairs, (ours.offset, state.offset))), "the bits differ"


if __name__ == "__main__":
    main()
