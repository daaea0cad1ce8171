"""The native sources build without a warning under GCC, Clang and for arm64, and the C++ tests pass under sanitizers.

Each build is a CMake run in a temporary folder at -O1. What a machine lacks is skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quatrain.ops import library

ARM_ROOT = Path("/usr/aarch64-linux-gnu")
AARCH64 = b"\xb7\x00"  # e_machine of an ELF file
ARM = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]


def tool(name: str, why: str) -> str:
    """A program beside this Python (cmake and ninja come as wheels) or on the path; skips without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: {why}")
    return found


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def clang(folder: Path, target: str | None = None) -> str:
    """Clang itself for this machine, or the one of the PyPI package ziglang, which knows other targets too; skips where
    neither is there. Its own sanitizer, which is on by default, stays off."""
    if target is None and (found := shutil.which("clang++")):
        return found
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no clang++ for this target: pip install ziglang")
    script = folder / "clang++"
    words = [sys.executable, "-m", "ziglang", "c++", *(["-target", target] if target else [])]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} -fno-sanitize=all "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def build(root: Path, folder: Path, compiler: str, *options: str, target: str = "all") -> Path:
    """Configures and builds native/ with its tests in `folder`; warnings are errors there by default."""
    cmake, ninja = tool("cmake", "make setup installs it"), tool("ninja", "make setup installs it")
    configure = [cmake, "-G", "Ninja", "-S", str(root / "native"), "-B", str(folder), "-DQUATRAIN_TESTS=ON"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_BUILD_TYPE=None"]
    run([*configure, "-DCMAKE_CXX_FLAGS=-O1", *options], CXXFLAGS="")
    run([cmake, "--build", str(folder), "--target", target, "--parallel", "2"])
    return folder


def default_compiler() -> str:
    """What the install would take: $CXX, or the system's C++ compiler."""
    return tool(os.environ.get("CXX", "c++"), "the kernels need a C++ compiler")


def assert_all_passed(output: str, at_least: int) -> None:
    summary = re.search(r"(\d+) tests, 0 failed checks", output)
    assert summary and int(summary[1]) >= at_least, output[-3000:]


def test_the_tests_pass_under_the_address_and_undefined_sanitizers(root: Path, tmp_path: Path) -> None:
    """The weakest and the strongest instruction set are instrumented; the others run beside them on guarded buffers.
    AMX is emulated where only its tiles are missing."""
    isas = set(library.supported_isas()) if library.available()[0] else set()
    strongest = library.best_isa() if isas else "avx2"
    emulated = "avx512_bf16" in isas and "amx_bf16" not in isas
    options = ["-DQUATRAIN_SANITIZE=address,undefined", f"-DQUATRAIN_SANITIZE_ISAS=portable;{strongest}"]
    options += ["-DQUATRAIN_EMULATED_AMX=ON"] if emulated else []
    output = run([str(build(root, tmp_path, default_compiler(), *options) / "native_tests")])
    assert_all_passed(output, at_least=24)
    for isa in isas | ({"amx_bf16"} if emulated else set()):
        assert re.search(rf"^{isa}\.f32_blocks ok$", output, flags=re.MULTILINE), f"{isa} was not tested"


def test_the_pool_passes_under_the_thread_sanitizer(root: Path, tmp_path: Path) -> None:
    folder = build(root, tmp_path, default_compiler(), "-DQUATRAIN_SANITIZE=thread", target="pool_tests")
    assert_all_passed(run([str(folder / "pool_tests")]), at_least=5)


def test_clang_builds_without_a_warning_and_the_tests_pass(root: Path, tmp_path: Path) -> None:
    folder = build(root, tmp_path / "build", clang(tmp_path))
    assert_all_passed(run([str(folder / "native_tests")]), at_least=24)
    assert_symbols_keep_to_their_instruction_set(folder)


def assert_symbols_keep_to_their_instruction_set(folder: Path) -> None:
    """The linker keeps one of several definitions of a weak symbol. Were it that of a strong instruction set, a weak
    CPU would meet instructions that it does not have: every weak symbol has its set's name in its own."""
    objects = sorted(folder.glob("CMakeFiles/kernels_*.dir/src/isa.cpp.o"))
    assert objects, "no objects found: the check would prove nothing"
    for path in objects:
        isa = path.parents[1].name.removeprefix("kernels_").removesuffix(".dir")
        symbols = run([tool("nm", "binutils"), "--defined-only", str(path)]).splitlines()
        weak = [line for line in symbols if line.split()[1] in "WVu"]
        assert [line for line in weak if f"{len(isa)}{isa}" not in line] == [], path


def test_arm64_builds_without_a_warning_under_clang(root: Path, tmp_path: Path) -> None:
    """The library and its tests, linked. Running them needs the machine, or the emulator of the next test."""
    build(root, tmp_path / "build", clang(tmp_path, "aarch64-linux-gnu"), *ARM)
    assert (tmp_path / "build" / "libquatrain_native.so").read_bytes()[18:20] == AARCH64


def test_arm64_builds_without_a_warning_and_the_tests_pass(root: Path, tmp_path: Path) -> None:
    compiler = tool("aarch64-linux-gnu-g++", "apt-get install g++-aarch64-linux-gnu")
    folder = build(root, tmp_path, compiler, *ARM)
    emulator = tool("qemu-aarch64", "apt-get install qemu-user")
    output = run([emulator, "-L", str(ARM_ROOT), str(folder / "native_tests")])
    assert_all_passed(output, at_least=24)


def test_a_failing_check_fails_the_run(root: Path, tmp_path: Path) -> None:
    """The runner itself: a false check, a write past the front of a buffer, no test of that name."""
    (tmp_path / "bad.cpp").write_text(
        '#include "check.h"\n'
        'QT_TEST("bad", check) { EXPECT(1 == 2, "one is %d", 2); }\n'
        'QT_TEST("bad", guard) { qt_test::Guarded<char> b(3); b.data()[-1] = 0; }\n'
        'QT_TEST("bad", none) {}\n',
        encoding="utf-8",
    )
    tests = root / "native" / "tests"
    program = tmp_path / "bad"
    sources = [str(tests / "main.cpp"), str(tmp_path / "bad.cpp")]
    run([default_compiler(), "-std=c++17", f"-I{tests}", *sources, "-o", str(program)])
    codes = {name: subprocess.run([str(program), name], capture_output=True).returncode for name in CODES}
    assert codes == CODES


CODES = {"bad.check": 1, "bad.guard": 1, "bad.none": 0, "no such test": 1}
