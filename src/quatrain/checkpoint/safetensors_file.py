"""One safetensors file, its header checked in full before a single byte is allocated for it."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.source import TensorInfo
from quatrain.errors import ModelError

if TYPE_CHECKING:
    import torch

# bits per element, of the types the format defines
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64}
_LONGEST_HEADER = 100_000_000  # the format's own limit
POINTER = b"version https://git-lfs"
INCOMPLETE = "this looks like an incomplete download; fetch the file again"


class SafetensorsFile:
    """`tensors` maps each name to its TensorInfo, in the order of the data; `metadata` is the header's own. `read`
    reads one tensor, `map` gives all of them without reading any.

    Raises ModelError with the file, what is wrong, and sizes wanted and found.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = _size(path)
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) == 8 and POINTER.startswith(start):
                raise pointer_error(path, size)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
                want = f"its header alone needs {length + 8} bytes" if len(start) == 8 else "at least 8 bytes"
                raise ModelError(f"{path}: not a complete safetensors file: want {want}, got {size}", hint=INCOMPLETE)
            header = _parse(path, file.read(length))
        self._data_start = 8 + length
        self._offsets: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        metadata = header.pop("__metadata__", None)
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self._index(header, size - self._data_start)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the type it has in the file. Raises ModelError if that type is none we compute with."""
        import torch

        info, dtypes = self.tensors[name], torch_dtypes()
        if info.dtype not in dtypes or info.dtype == "F64":
            raise ModelError(f"{self.path}: {name} has type {info.dtype}; supported: F32, F16, BF16")
        buffer = bytearray(info.num_bytes)
        with self.path.open("rb") as file:
            file.seek(self._data_start + self._offsets[name])
            got = file.readinto(buffer)
        if got != info.num_bytes:
            raise ModelError(f"{self.path}: {name}: want {info.num_bytes} bytes, got {got}", hint=INCOMPLETE)
        return torch.frombuffer(buffer, dtype=dtypes[info.dtype]).view(info.shape)

    def map(self) -> tuple[dict[str, torch.Tensor], memoryview]:
        """Every tensor in place, and the bytes of all of them. The file is read where it is touched; a write to a
        tensor stays in this process.

        The file must not become shorter meanwhile (replacing or deleting it is fine). Raises ModelError for a type that
        torch lacks here, OSError when the system cannot map it."""
        import torch

        dtypes = torch_dtypes()
        unknown = next((name for name, info in self.tensors.items() if info.dtype not in dtypes), None)
        if unknown is not None:
            raise ModelError(f"{self.path}: {unknown} has type {self.tensors[unknown].dtype}")
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        want = self._data_start + sum(info.num_bytes for info in self.tensors.values())
        if len(mapped) != want:
            raise ModelError(f"{self.path}: want {want} bytes, got {len(mapped)}", hint=INCOMPLETE)
        tensors = {
            name: torch.frombuffer(
                mapped,
                dtype=dtypes[info.dtype],
                count=math.prod(info.shape),
                offset=self._data_start + self._offsets[name],
            ).view(info.shape)
            for name, info in self.tensors.items()
        }
        return tensors, memoryview(mapped)[self._data_start :]

    def _index(self, header: dict[str, Any], available: int) -> None:
        """Fills `tensors` and checks that they tile the data without gap, overlap or rest."""
        entries = sorted((_entry(self.path, name, entry) for name, entry in header.items()), key=lambda e: e[1:])
        end = 0
        for name, begin, stop, info in entries:
            if begin != end:
                raise ModelError(f"{self.path}: {name}: data starts at byte {begin}, want {end}: the file is damaged")
            end = stop
            self.tensors[name], self._offsets[name] = info, begin
        if end != available:
            want, got = self._data_start + end, self._data_start + available
            hint = INCOMPLETE if want > got else None
            raise ModelError(f"{self.path}: want {want} bytes as its header says, got {got}", hint=hint)
        if not self.tensors:
            raise ModelError(f"{self.path}: holds no tensors")


def torch_dtypes() -> dict[str, torch.dtype]:
    """The format's names of the types we compute with."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "U8": torch.uint8,
    }


def pointer_error(path: Path, size: int) -> ModelError:
    return ModelError(
        f"{path}: looks like a Git LFS pointer ({size} bytes of text), not the weights",
        hint="run `git lfs pull` in that folder, or download the file again",
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[str, int, int, TensorInfo]:
    """(name, begin, end, info) of one header entry."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{path}: {name}: the header entry is malformed: {entry!r}") from error
    sizes = [begin, end, *shape] if isinstance(shape, list) else [None]
    if dtype not in _BITS or any(type(size) is not int or size < 0 for size in sizes):
        raise ModelError(f"{path}: {name}: the header entry is malformed: {entry!r}")
    want = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != want:
        raise ModelError(f"{path}: {name}: {dtype} {shape} needs {want} bytes, the header gives it {end - begin}")
    return name, begin, end, TensorInfo(tuple(shape), dtype, want)
