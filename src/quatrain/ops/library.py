"""The native library, found, loaded and called through ctypes. Pointers are ints (`tensor.data_ptr()`): no torch here.

`FUNCTIONS` is the one table of exported symbols and mirrors native/include/quatrain.h; a test compares the two. A
machine without the library (no compiler when Quatrain was installed) is a normal one: `available()` says so and why.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import quatrain
from quatrain.errors import KernelError

ABI_VERSION = 1
F32, BF16 = 0, 1

STATUSES = {
    1: "an argument is outside the kernel's contract",
    2: "this build or this machine does not have it",
    3: "the scratch buffer is too small",
    4: "out of memory",
}
"""What a status code other than 0 means."""

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Instruction sets, weakest first; the index is the library's number for it."""


class QtWeight(Structure):
    """`qt_weight`: a frozen weight [n, k], NF4 or dense."""

    _fields_ = (
        ("n", c_int64),
        ("k", c_int64),
        ("dense", c_void_p),
        ("codes", c_void_p),
        ("absmax", c_void_p),
        ("absmax_codes", c_void_p),
        ("absmax2", c_void_p),
        ("code2", c_void_p),
        ("offset", c_float),
    )


class QtLinear(Structure):
    """`qt_linear`: one linear layer of a group that shares its input, with its adapter."""

    _fields_ = (
        ("weight", QtWeight),
        ("bias", c_void_p),
        ("lora_a", c_void_p),
        ("lora_b", c_void_p),
        ("grad_a", c_void_p),
        ("grad_b", c_void_p),
        ("u", c_void_p),
        ("out", c_void_p),
        ("rank", c_int64),
        ("scale", c_float),
        ("index", c_int32),
    )


class QtDropout(Structure):
    """`qt_dropout`: dropout on the adapters' input; no keys, no dropout."""

    _fields_ = (("keys", c_void_p), ("p", c_double))


class QtAttention(Structure):
    """`qt_attention`: the shape of an attention; window 0 is none."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    )


# Short names for the table, in the header's order of arguments.
_i32, _i64, _f32, _f64, _size, _ptr = c_int32, c_int64, c_float, c_double, c_size_t, c_void_p
_linears, _dropout, _weight, _attention = POINTER(QtLinear), POINTER(QtDropout), POINTER(QtWeight), POINTER(QtAttention)
_context = (_ptr, _i32)  # the context and the dtype
_scratch = (_ptr, _size)

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "qt_abi_version": (_i32, ()),
    "qt_isa_name": (c_char_p, (_i32,)),
    "qt_isa_supported": (_i32, (_i32,)),
    "qt_best_isa": (_i32, ()),
    "qt_context_create": (_i32, (POINTER(c_void_p), _i32, _i32)),
    "qt_context_destroy": (None, (_ptr,)),
    "qt_linear_forward_scratch_bytes": (_size, (*_context, _linears, _i64, _i64, _dropout)),
    "qt_linear_forward": (_i32, (*_context, _ptr, _linears, _i64, _ptr, _i64, _dropout, *_scratch)),
    "qt_lora_down": (_i32, (*_context, _ptr, _linears, _i64, _i64, _dropout, *_scratch)),
    "qt_linear_backward_scratch_bytes": (_size, (*_context, _linears, _i64, _i64)),
    "qt_linear_backward": (_i32, (*_context, _ptr, _ptr, _linears, _i64, _i64, _dropout, *_scratch)),
    "qt_linear_decode_scratch_bytes": (_size, (*_context, _linears, _i64, _i64)),
    "qt_linear_decode": (_i32, (*_context, _ptr, _linears, _i64, _ptr, _i64, *_scratch)),
    "qt_attention_forward_scratch_bytes": (_size, (*_context, _attention, _i64)),
    "qt_attention_forward": (_i32, (*_context, *[_ptr] * 6, _i64, _attention, *_scratch)),
    "qt_attention_backward_scratch_bytes": (_size, (*_context, _attention, _i64)),
    "qt_attention_backward": (_i32, (*_context, *[_ptr] * 10, _i64, _attention, *_scratch)),
    "qt_attention_cached_scratch_bytes": (_size, (*_context, _attention, _i64)),
    "qt_attention_cached": (_i32, (*_context, *[_ptr] * 7, _i64, _i64, _attention, *_scratch)),
    "qt_rms_norm_forward": (_i32, (*_context, *[_ptr] * 4, _f32, _i64, _i64)),
    "qt_rms_norm_backward": (_i32, (*_context, *[_ptr] * 7, _i64, _i64)),
    "qt_rope": (_i32, (*_context, *[_ptr] * 3, _f32, *[_i64] * 4)),
    "qt_swiglu_forward": (_i32, (*_context, *[_ptr] * 3, _i64)),
    "qt_swiglu_backward": (_i32, (*_context, *[_ptr] * 5, _i64)),
    "qt_embedding": (_i32, (*_context, *[_ptr] * 3, _i64, _i64)),
    "qt_head_loss_scratch_bytes": (_size, (*_context, *[_i64] * 3)),
    "qt_head_loss": (_i32, (*_context, *[_ptr] * 5, _i64, _ptr, *[_i64] * 4, *_scratch)),
    "qt_sum_squares_partials": (_i64, (_i64,)),
    "qt_sum_squares": (_i32, (_ptr, _ptr, _ptr, _i64, _ptr)),
    "qt_adamw": (_i32, (*[_ptr] * 10, *[_f64] * 4, _i64)),
    "qt_nf4_quantize": (_i32, (*_context, *[_ptr] * 4, _i64)),
    "qt_nf4_nested": (_i32, (*[_ptr] * 4, _f32, _ptr, _i64)),
    "qt_nf4_error": (_i32, (*_context, _ptr, _ptr, _weight, _ptr)),
    "qt_nf4_dequantize": (_i32, (*_context, _ptr, _weight)),
    "qt_peak": (_i32, (*_context, _i64, _ptr)),
}
"""Exported symbol -> (type of its result, types of its arguments)."""


def check(status: int, op: str) -> None:
    """Raises KernelError for any status but 0, with the op's name and the status' meaning."""
    if status != 0:
        raise KernelError(f"{op}: {STATUSES.get(status, 'unknown status')} (status {status})")


def find_library() -> Path | None:
    """The library in the installed package, None where there is none. An editable install has two package folders."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    candidates = (Path(folder, "_native", f"libquatrain_native{suffix}") for folder in quatrain.__path__)
    return next((path for path in candidates if path.is_file()), None)


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library with every symbol's types declared. KernelError where it is missing, broken or of another version."""
    path = find_library()
    if path is None:
        raise KernelError(
            "the native library is not installed: there was no C++ compiler that could build it",
            hint="install g++ 11 or newer or clang++ 14 or newer, then run pip install again (-v shows the build)",
        )
    return bind(path)


def bind(path: Path) -> ctypes.CDLL:
    """Loads one file and declares `FUNCTIONS` on it. KernelError if it cannot be loaded or is not ours."""
    again = "install Quatrain again: pip install --force-reinstall --no-deps, from the same sources as this package"
    try:
        library = ctypes.CDLL(str(path))
        library.qt_abi_version.restype, library.qt_abi_version.argtypes = FUNCTIONS["qt_abi_version"]
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path}: cannot be loaded as Quatrain's native library: {error}", hint=again) from error
    version = library.qt_abi_version()
    if version != ABI_VERSION:
        raise KernelError(f"{path}: want ABI version {ABI_VERSION}, got {version}", hint=again)
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise KernelError(f"{path}: has no function {name}", hint=again) from error
        function.restype, function.argtypes = result, arguments
    return library


def available() -> tuple[bool, str]:
    """Whether native kernels can be used here, and one sentence that says which or why not."""
    try:
        isa = best_isa()
    except KernelError as error:
        return False, str(error) + (f" ({error.hint})" if error.hint else "")
    return True, f"native kernels for {isa}"


def supported_isas() -> list[str]:
    """The instruction sets that this build holds and this machine can run, weakest first. Raises like `load`."""
    library = load()
    return [name for number, name in enumerate(ISAS) if library.qt_isa_supported(number)]


def best_isa() -> str:
    """The strongest of `supported_isas`. Raises like `load`."""
    return ISAS[load().qt_best_isa()]


class Context:
    """A thread pool and a choice of instruction set; take it from `context`, which keeps one of each kind.

    Calls take turns: the library does not allow two at once on one context.
    """

    def __init__(self, isa: str, threads: int) -> None:
        supported = supported_isas()
        if isa not in supported:
            known = "this machine or this build does not have it" if isa in ISAS else "there is no such instruction set"
            raise KernelError(f"native kernels for {isa!r}: {known}", hint=f"choose one of {', '.join(supported)}")
        if threads < 1:
            raise KernelError(f"native kernels: want at least 1 thread, got {threads}")
        self.isa, self.threads = isa, threads
        self._library = load()
        self._lock = threading.Lock()
        self._handle: c_void_p | None = None

    def call(self, name: str, *arguments: Any) -> None:
        """Runs a function that returns a status. Raises KernelError for any status but 0."""
        with self._lock:
            check(getattr(self._library, name)(self._open(), *arguments), name.removeprefix("qt_"))

    def call_all(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """`call` for each (name, arguments), without letting go of the library in between."""
        with self._lock:
            handle = self._open()
            for name, arguments in calls:
                if status := getattr(self._library, name)(handle, *arguments):
                    check(status, name.removeprefix("qt_"))

    def size(self, name: str, *arguments: Any) -> int:
        """Runs a function that returns a size, such as the _scratch_bytes twin of an op."""
        function = getattr(self._library, name)
        with self._lock:
            if FUNCTIONS[name][1][0] is c_void_p:
                return int(function(self._open(), *arguments))
            return int(function(*arguments))

    def close(self) -> None:
        """Ends the threads; the next call starts them again."""
        with self._lock:
            if self._handle is not None:
                self._library.qt_context_destroy(self._handle)
            self._handle = None

    def forget(self) -> None:
        """After a fork, in the child: the threads stayed in the parent, and the lock may have been held there."""
        self._lock = threading.Lock()
        self._handle = None

    def _open(self) -> c_void_p:
        if self._handle is None:
            handle = c_void_p()
            status = self._library.qt_context_create(ctypes.byref(handle), ISAS.index(self.isa), self.threads)
            check(status, f"a context for {self.isa} with {self.threads} threads")
            self._handle = handle
        return self._handle


class Recorder:
    """Passes calls on to a context and remembers them, to make them again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self.size = context.size

    def call(self, name: str, *arguments: Any) -> None:
        """`Context.call`, remembered with these very arguments: what pointers among them lead to must stay there."""
        self._context.call(name, *arguments)
        self._calls.append((name, arguments))

    def replay(self) -> None:
        """Every call so far, again. Raises like `Context.call`."""
        self._context.call_all(self._calls)


_contexts: dict[tuple[str, int], Context] = {}
_contexts_lock = threading.Lock()


def context(isa: str, threads: int) -> Context:
    """The context for an instruction set and a number of threads: made on first use, kept until exit.

    Raises KernelError for an unknown or unsupported instruction set, for less than one thread, and like `load`.
    """
    with _contexts_lock:
        if (isa, threads) not in _contexts:
            _contexts[isa, threads] = Context(isa, threads)
        return _contexts[isa, threads]


def _close_all() -> None:
    for one in _contexts.values():
        one.close()


def _forget_all() -> None:
    global _contexts_lock
    _contexts_lock = threading.Lock()
    for one in _contexts.values():
        one.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
