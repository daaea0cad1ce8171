"""The ctypes table against the C header, and what happens without the library or with a wrong one."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quatrain.errors import KernelError
from quatrain.ops import library

HEADER = "native/include/quatrain.h"
STRUCTURES = {
    "qt_weight": library.QtWeight,
    "qt_linear": library.QtLinear,
    "qt_dropout": library.QtDropout,
    "qt_attention": library.QtAttention,
}
SCALARS = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@pytest.fixture(scope="module")
def header(root: Path) -> str:
    """The header without its comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", (root / HEADER).read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)


@pytest.fixture
def native() -> ctypes.CDLL:
    ok, reason = library.available()
    if not ok:
        pytest.skip(reason)
    return library.load()


def ctype_of(declared: str) -> Any:
    """The ctypes type for a C type such as `const float *`: data pointers are plain addresses."""
    base = declared.replace("const", "").replace("*", "").split()[0]
    stars = declared.count("*")
    if stars == 0:
        return STRUCTURES[base] if base in STRUCTURES else SCALARS[base]
    if base == "char":
        return ctypes.c_char_p
    if stars == 2:
        return ctypes.POINTER(ctypes.c_void_p)
    return ctypes.POINTER(STRUCTURES[base]) if base in STRUCTURES else ctypes.c_void_p


def split(declaration: str) -> tuple[str, str]:
    """(type, name) of `const qt_linear *linears`."""
    kind, name = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", declaration, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    return kind, name


def declared_functions(header: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    found = {}
    for result_and_name, arguments in re.findall(r"QT_API([^;()]*)\(([^)]*)\)\s*;", header):
        result, name = split(result_and_name)
        types = () if arguments.strip() == "void" else tuple(ctype_of(split(one)[0]) for one in arguments.split(","))
        found[name] = (ctype_of(result), types)
    return found


def test_every_function_of_the_header_is_in_the_table_with_the_same_types(header: str) -> None:
    declared = declared_functions(header)
    assert len(declared) == header.count("QT_API") >= 11, "a declaration of the header was not understood"
    assert set(library.FUNCTIONS) == set(declared)
    for name, signature in declared.items():
        assert library.FUNCTIONS[name] == signature, name


def test_every_structure_of_the_header_has_the_same_fields(header: str) -> None:
    structures = re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", header, flags=re.DOTALL)
    found = {name: body for body, name in structures}
    assert set(found) == set(STRUCTURES)
    for name, body in found.items():
        fields = []
        for line in filter(str.strip, body.split(";")):
            kind, first = split(line.split(",")[0])
            fields += [(one.strip(), ctype_of(kind)) for one in [first, *line.split(",")[1:]]]
        assert list(STRUCTURES[name]._fields_) == fields, name


def test_numbers_of_the_header_are_the_tables(root: Path, header: str) -> None:
    numbers = {name: int(value) for name, value in re.findall(r"\b(QT_[A-Z0-9_]+) = (\d+)", header)}
    assert {name.lower(): numbers[f"QT_{name.upper()}"] for name in library.ISAS} == {
        name: number for number, name in enumerate(library.ISAS)
    }
    assert numbers["QT_NUM_ISAS"] == len(library.ISAS)
    assert (numbers["QT_F32"], numbers["QT_BF16"]) == (library.F32, library.BF16)
    statuses = re.search(r"enum \{ (QT_OK[^}]*)\}", header)
    assert statuses and statuses[1].count("=") == len(library.STATUSES) + 1
    version = re.search(r"#define QT_ABI_VERSION (\d+)", (root / HEADER).read_text(encoding="utf-8"))
    assert version and int(version[1]) == library.ABI_VERSION


def test_a_changed_header_is_noticed(header: str) -> None:
    changed = header.replace("int32_t threads);", "int64_t threads);")
    assert changed != header
    assert declared_functions(changed) != library.FUNCTIONS


def test_the_library_names_its_instruction_sets_as_the_table(native: ctypes.CDLL) -> None:
    assert [native.qt_isa_name(number).decode() for number in range(len(library.ISAS))] == list(library.ISAS)
    supported = library.supported_isas()
    assert supported[0] == "portable" and library.best_isa() == supported[-1]
    assert library.available() == (True, f"native kernels for {supported[-1]}")


def test_without_the_library_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quatrain.__path__", ["/nowhere"])
    library.load.cache_clear()
    try:
        ok, reason = library.available()
        assert not ok
        assert "not installed" in reason and "pip install" in reason
        with pytest.raises(KernelError, match="not installed"):
            library.Context("portable", 1)
    finally:
        library.load.cache_clear()


def build(folder: Path, source: str) -> Path:
    """A shared library of a few lines of C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "fake.c").write_text(source, encoding="utf-8")
    out = folder / "libfake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(out), str(folder / "fake.c")], check=True)
    return out


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, "int qt_abi_version(void) { return 99; }")
    with pytest.raises(KernelError, match=rf"libfake.so: want ABI version {library.ABI_VERSION}, got 99") as caught:
        library.bind(path)
    assert caught.value.hint and "again" in caught.value.hint


def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, f"int qt_abi_version(void) {{ return {library.ABI_VERSION}; }}")
    with pytest.raises(KernelError, match="has no function qt_isa_name"):
        library.bind(path)


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(content)
    with pytest.raises(KernelError, match=r"broken.so: cannot be loaded"):
        library.bind(path)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="cannot be loaded as Quatrain's native library"):
        library.bind(build(tmp_path, "int other(void) { return 1; }"))


def test_contexts_are_kept_and_bad_ones_refused(native: ctypes.CDLL) -> None:
    first = library.context("portable", 2)
    assert library.context("portable", 2) is first
    assert library.context("portable", 1) is not first
    with pytest.raises(KernelError, match="no such instruction set") as caught:
        library.context("z80", 1)
    assert caught.value.hint and "portable" in caught.value.hint
    with pytest.raises(KernelError, match="at least 1 thread, got 0"):
        library.context("portable", 0)
    with pytest.raises(KernelError, match=r"portable with 5000 threads: .*outside the kernel's contract"):
        library.context("portable", 5000).call("qt_linear_forward")


def linear(values: Any, out: Any) -> Any:
    weight = library.QtWeight(n=2, k=2, dense=ctypes.addressof(values))
    return (library.QtLinear * 1)(library.QtLinear(weight=weight, out=ctypes.addressof(out)))


def multiply(context: library.Context) -> list[float]:
    """x W^T for a W and an x of four numbers."""
    x, w, out = ((ctypes.c_float * 4)(*row) for row in ([1, 2, 3, 4], [1, 0, 1, 1], [0] * 4))
    group, none = linear(w, out), ctypes.byref(library.QtDropout())
    size = context.size("qt_linear_forward_scratch_bytes", library.F32, group, 1, 2, none)
    scratch = (ctypes.c_char * (size + 64))()
    start = -(-ctypes.addressof(scratch) // 64) * 64
    context.call("qt_linear_forward", library.F32, ctypes.addressof(x), group, 1, None, 2, none, start, size)
    return list(out)


def test_a_call_through_the_table(native: ctypes.CDLL) -> None:
    for isa in library.supported_isas():
        assert multiply(library.context(isa, 2)) == [1, 3, 3, 7]
    context = library.context("portable", 1)
    assert context.size("qt_sum_squares_partials", 1) >= 1
    with pytest.raises(KernelError, match=r"linear_forward: an argument is outside the kernel's contract \(status 1\)"):
        context.call("qt_linear_forward", library.F32, None, None, 1, None, 2, None, None, 0)
    context.close()
    assert multiply(context) == [1, 3, 3, 7], "a closed context opens again"


def test_python_threads_take_turns(native: ctypes.CDLL) -> None:
    context, wrong = library.context("portable", 2), []
    workers = [
        threading.Thread(target=lambda: wrong.extend(1 for _ in range(200) if multiply(context) != [1, 3, 3, 7]))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


FORKED = """
import os, sys
sys.path.insert(0, {tests!r})
from quatrain.ops import library
import importlib.util
spec = importlib.util.spec_from_file_location("helpers", {here!r})
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
context = library.context("portable", 3)
assert helpers.multiply(context) == [1, 3, 3, 7]
child = os.fork()
if child == 0:
    os._exit(0 if helpers.multiply(context) == [1, 3, 3, 7] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_threads_of_its_own(native: ctypes.CDLL, root: Path) -> None:
    """Also: the module imports no torch, and the process ends cleanly."""
    script = FORKED.format(tests=str(root / "tests"), here=__file__)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_check_names_the_op_and_the_meaning() -> None:
    library.check(0, "rope")
    with pytest.raises(KernelError, match=r"rope: the scratch buffer is too small \(status 3\)"):
        library.check(3, "rope")
    with pytest.raises(KernelError, match=r"rope: unknown status \(status 77\)"):
        library.check(77, "rope")
