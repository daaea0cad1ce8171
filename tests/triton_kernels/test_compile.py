"""Triton's compiler, in processes without the interpreter: a part of what `make kernels` builds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    """scripts/compile_kernels.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which importing the script takes away
        spec = importlib.util.spec_from_file_location("compile_kernels", root / "scripts" / "compile_kernels.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclass looks itself up
        spec.loader.exec_module(module)
    return module


def test_the_subset_compiles_and_every_kernel_is_in_it(root: Path, script: ModuleType, tmp_path: Path) -> None:
    done = run(root, "scripts/compile_kernels.py", "--subset", "--out", str(tmp_path / "kernels.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "kernels.json").read_text())
    assert all(entry["registers"] > 0 and entry["spills"] == 0 and entry["seconds"] > 0 for entry in entries)
    assert {entry["target"] for entry in entries} == {arch for arch, _ in script.SUBSET}
    there = {name for module in script.modules() for name in vars(importlib.import_module(module)) if "_kernel" in name}
    assert {entry["kernel"] for entry in entries} == there


def test_faults_are_reported(script: ModuleType) -> None:
    good = {"target": "sm_75", "dtype": "fp16", "kernel": "k", "variant": "", "shared": 65536, "spills": 0}
    good |= {"registers": 255}
    assert script.complaint(good) is None
    assert script.complaint(good | {"spills": 8}) == "sm_75 fp16 k: spills 8, 255 registers"
    assert script.complaint(good | {"shared": 65537}) == "sm_75 fp16 k: 65537 bytes of shared memory, a block has 65536"
    assert script.complaint(good | {"error": "at 8:28:\nno such thing"}) == "sm_75 fp16 k: no such thing"


def test_what_does_not_fit_spills_and_what_is_wrong_fails(root: Path) -> None:
    """A block of tokens that no architecture has registers for, and a block size that is no power of two."""
    planted = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "import compile_kernels as script\n"
        "from quatrain.ops import triton_configs as configs\n"
        "from quatrain.ops.linear_lora import triton as linear\n"
        "case = next(c for c in linear.cases('sm_75', 'fp16') if c.variant == 'dense lora')\n"
        "bad = [case.constexprs | {'BLOCK_T': size, 'BLOCK_N': 64, 'num_warps': 1} for size in (64, 48)]\n"
        "linear.cases = lambda arch, dtype: [configs.Case(case.kernel, case.types, c) for c in bad]\n"
        "entries = [script.build(script.Job(linear.__name__, 'sm_75', 'fp16', i)) for i in range(2)]\n"
        "print(*map(script.complaint, entries), sep='\\n')\n"
    )
    done = run(root, "-c", planted)
    spilled, failed = done.stdout.splitlines()[-2:]
    assert "linear_forward_kernel: spills" in spilled, done.stdout + done.stderr
    assert "linear_forward_kernel: " in failed and "power of 2" in failed, done.stdout


def test_dequantising_rounds_every_product_and_sum(root: Path) -> None:
    """Bit for bit bitsandbytes' values need a product and a sum where the compiler would make one FMA of them."""
    compiled = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "import triton, compile_kernels as script\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from quatrain.ops.nf4.triton import cases\n"
        "case = cases('sm_90', 'bf16')[0]\n"
        "for fusion in (case.constexprs['enable_fp_fusion'], True):\n"
        "    source = ASTSource(case.kernel, *script.describe(case))\n"
        "    made = triton.compile(source, target=GPUTarget('cuda', 90, 32), options={'enable_fp_fusion': fusion})\n"
        "    print(made.asm['ptx'].count('fma.rn.f32'))\n"
    )
    done = run(root, "-c", compiled)
    apart, fused = map(int, done.stdout.split())
    assert apart == 0 and fused > 0, done.stdout + done.stderr
