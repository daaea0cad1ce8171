"""One GGUF file: metadata and tensor table checked in full, tensors read and expanded to fp32 one at a time.

The header is parsed here, in one pass with every count held against the file's size; the block formats themselves are
the gguf library's. Layout: "GGUF", version, number of tensors and of keys, the keys (name, type, value), the tensor
table (name, dimensions with the fastest first, type, offset), padding to the alignment, the data.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quatrain.checkpoint.safetensors_file import INCOMPLETE, POINTER, pointer_error
from quatrain.errors import ModelError

if TYPE_CHECKING:
    import torch

# What the gguf library expands. NVFP4 is left out: its scale of the whole tensor is a tensor of its own.
SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class GgufTensor:
    """`shape` slowest dimension first, as torch has it; `offset` from the start of the file."""

    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GgufFile:
    """`metadata` (Python values) and `tensors` of a file. Raises ModelError that names the file and what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            reader = _Reader(path, file, self.size)
            num_tensors, num_keys = _start(reader)
            for _ in range(num_keys):
                key = reader.text()
                self.metadata[key] = reader.value(reader.number("I"))
            table = [_table_entry(reader) for _ in range(num_tensors)]
            self._place(table, reader.position)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in fp32, whatever its type: piece by piece, so that little more than the result is in memory."""
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType[tensor.type_name]
        out = np.empty(math.prod(tensor.shape), dtype=np.float32)
        rows = math.prod(tensor.shape[:-1])
        row_bytes, row_values = tensor.num_bytes // rows, tensor.shape[-1]
        step = max(1, _PIECE_BYTES // row_bytes)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for row in range(0, rows, step):
                count = min(step, rows - row)
                raw = np.frombuffer(file.read(count * row_bytes), dtype=np.uint8)
                if raw.size != count * row_bytes:
                    raise ModelError(f"{self.path}: {name}: the file became shorter while reading", hint=INCOMPLETE)
                values = dequantize(_typed(raw.reshape(count, row_bytes), tensor.type_name), kind)
                out[row * row_values : (row + count) * row_values] = values.reshape(-1)
        return torch.from_numpy(out).view(tensor.shape)

    def _place(self, table: list[tuple[str, tuple[int, ...], int, int]], header_end: int) -> None:
        """Fills `tensors`, and checks that each lies inside the file and none overlaps another."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment: want a power of two, got {alignment!r}")
        data_start = -(-header_end // alignment) * alignment
        end = data_start
        for name, shape, type_number, offset in sorted(table, key=lambda entry: entry[3]):
            if name in self.tensors:
                raise ModelError(f"{self.path}: {name} occurs twice")
            if type_number not in GGMLQuantizationType.__members__.values():
                raise ModelError(f"{self.path}: {name}: unknown type {type_number}")
            kind = GGMLQuantizationType(type_number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ModelError(f"{self.path}: {name}: {kind.name} rows come in blocks of {block}, got {shape[-1]}")
            num_bytes = math.prod(shape) // block * block_bytes
            begin = data_start + offset
            if begin < end:
                raise ModelError(f"{self.path}: {name} overlaps the tensor before it")
            end = begin + num_bytes
            self.tensors[name] = GgufTensor(shape, kind.name, begin, num_bytes)
        if end > self.size:
            raise ModelError(f"{self.path}: want {end} bytes as its header says, got {self.size}", hint=INCOMPLETE)


class _Reader:
    """Reads little-endian values, and refuses a length that the file cannot hold before allocating for it."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.position = path, file, size, 0

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise ModelError(
                f"{self.path}: the header wants {count} bytes at {self.position}, the file has {self.size}",
                hint=INCOMPLETE,
            )
        self.position += count
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def count(self, least_bytes: int) -> int:
        """A number of things that take at least `least_bytes` each."""
        count = int(self.number("Q"))
        if count * least_bytes > self.size - self.position:
            raise ModelError(
                f"{self.path}: the header announces {count} entries, more than {self.size} bytes can hold",
                hint=INCOMPLETE,
            )
        return count

    def text(self) -> str:
        raw = self.bytes(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: a text before byte {self.position} is not UTF-8: {raw[:40]!r}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: unknown kind of value {kind} at byte {self.position}")
        item = self.number("I")
        if item in _SCALARS:
            count = self.count(struct.calcsize("<" + _SCALARS[item]))
            layout = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(layout, self.bytes(struct.calcsize(layout))))
        if item != _STRING:
            raise ModelError(f"{self.path}: unknown kind of array {item} at byte {self.position}")
        return [self.text() for _ in range(self.count(8))]


def _start(reader: _Reader) -> tuple[int, int]:
    """(number of tensors, number of keys), after the magic and version are checked."""
    magic = reader.file.read(4)
    reader.position = len(magic)
    if magic != b"GGUF":
        if magic and POINTER.startswith(magic):
            raise pointer_error(reader.path, reader.size)
        raise ModelError(f"{reader.path}: not a GGUF file ({reader.size} bytes, starts with {magic!r})")
    version = reader.number("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        got = "a big-endian file" if swapped else f"version {version}"
        raise ModelError(f"{reader.path}: {got} is not supported; supported: GGUF versions 2 and 3, little-endian")
    num_tensors = reader.count(24)
    return num_tensors, reader.count(13)


def _table_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type number, offset in the data)."""
    name = reader.text()
    num_dims = reader.number("I")
    if not 1 <= num_dims <= _MOST_DIMS:
        raise ModelError(f"{reader.path}: {name}: want 1 to {_MOST_DIMS} dimensions, got {num_dims}")
    dims = [reader.number("Q") for _ in range(num_dims)]
    if 0 in dims:
        raise ModelError(f"{reader.path}: {name}: a dimension is 0: {dims}")
    return name, tuple(reversed(dims)), reader.number("I"), reader.number("Q")


def _typed(raw: Any, type_name: str) -> Any:
    """Rows of bytes as the gguf library wants them: floats as floats, blocks as bytes."""
    import numpy as np

    assert sys.byteorder == "little"
    floats = {"F32": np.float32, "F16": np.float16}
    return raw.view(floats[type_name]) if type_name in floats else raw
