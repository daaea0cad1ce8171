"""Class H11 of docs/cases.md: files that pretend to be weights, refused before anything is allocated for them."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from quatrain.checkpoint.safetensors_file import SafetensorsFile
from quatrain.errors import ModelError


def write(path, header: dict | bytes, data: bytes = b"") -> SafetensorsFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return SafetensorsFile(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def entry(begin: int, end: int, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_what_the_library_wrote(path, dtype):
    tensors = {"b": torch.randn(3, 5).to(dtype), "a": torch.randn(7).to(dtype)}
    save_file(tensors, path)
    file = SafetensorsFile(path)
    assert set(file.tensors) == {"a", "b"}
    for name, want in tensors.items():
        assert torch.equal(file.read(name), want) and file.tensors[name].shape == tuple(want.shape)


def test_lfs_pointer(path):
    """H11: a Git LFS pointer is called one."""
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4983476\n")
    with pytest.raises(ModelError, match=r"model.safetensors: looks like a Git LFS pointer \(\d+ bytes") as caught:
        SafetensorsFile(path)
    assert "git lfs pull" in (caught.value.hint or "")


def test_cut_at_60_percent(path):
    """H11, M4: a download that was cut: both sizes, at every start."""
    save_file({"w": torch.zeros(100, 100)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size * 6 // 10])
    with pytest.raises(ModelError, match=f"want {size} bytes as its header says, got {size * 6 // 10}") as caught:
        SafetensorsFile(path)
    assert "incomplete download" in (caught.value.hint or "")


@pytest.mark.parametrize("size", [0, 5])
def test_a_few_bytes(path, size):
    """H11: nothing, or five bytes."""
    path.write_bytes(b"\x10\0\0\0\0\0\0\0"[:size])
    with pytest.raises(ModelError, match=f"want at least 8 bytes, got {size}"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 9])
def test_header_longer_than_the_file(path, length):
    """H11: a header length of 2^63 allocates nothing."""
    path.write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(ModelError, match=f"its header alone needs {length + 8} bytes, got 16"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{not json", 0, "the header is not JSON"),
        (b"[" * 5000, 0, "the header is not JSON"),
        (b"[1]", 0, "not a JSON object"),
        ({}, 0, "holds no tensors"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, "w: the header entry is malformed"),
        ({"w": entry(0, 8, dtype="F31")}, 8, "w: the header entry is malformed"),
        ({"w": entry(0, 8, shape=(-2,))}, 8, "w: the header entry is malformed"),
        ({"w": entry(0, 8, shape=(3,))}, 8, r"w: F32 \[3\] needs 12 bytes, the header gives it 8"),
        ({"w": entry(0, 8, shape=(2**40, 2**40))}, 8, "needs 4835703278458516698824704 bytes"),
        ({"w": entry(4, 12)}, 12, "w: data starts at byte 4, want 0"),
        ({"v": entry(0, 8), "w": entry(4, 12)}, 12, "w: data starts at byte 4, want 8"),
        ({"w": entry(0, 8)}, 9, "bytes as its header says, got"),
    ],
)
def test_malformed_headers(path, header, data, said):
    """H11: entries that overlap, leave gaps or lie about sizes."""
    with pytest.raises(ModelError, match=said):
        write(path, header, b"\0" * data)


def test_types_we_do_not_compute_with(path):
    file = write(path, {"w": entry(0, 16, dtype="F64")}, b"\0" * 16)
    with pytest.raises(ModelError, match="w has type F64; supported: F32, F16, BF16"):
        file.read("w")
