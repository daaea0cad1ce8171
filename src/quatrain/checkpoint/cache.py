"""Quantise once: a loaded base model on disk, mapped into memory by every later start.

One entry is one safetensors file, `<key>.safetensors`: all tensors of the model as `load_params` makes them, and in the
header's metadata what they were made from and the SHA-256 of what follows. The key is a hash of the source's
fingerprint, the settings and the versions of format and package; nothing else decides what a load makes.

Whoever reads an entry verifies the whole of it first. That costs about what it takes to read it, which the first step
would do anyway, and a fraction of quantising it again; therefore writing needs no fsync, and nothing that a crash, a
full disk or another program does to the folder can get into a run. An entry is written under a name of its own and
renamed: readers see all of it or nothing, writers do not meet, and a mapped entry that is replaced or deleted stays
readable until the process that mapped it ends.

The cache never fails a run: what goes wrong becomes a line in `notices`, and the model is loaded from its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quatrain
from quatrain.checkpoint.safetensors_file import SafetensorsFile, torch_dtypes
from quatrain.data.disk import PARTIAL, Entry, delete_entries, entries_in
from quatrain.errors import ModelError

if TYPE_CHECKING:
    import torch

    from quatrain.ops.nf4 import Nf4Tensor

FORMAT = 1
SUFFIX = ".safetensors"
_ALIGN = 64  # bytes, as torch aligns what it allocates
_PARTS = ("codes", "absmax", "absmax_codes", "absmax2", "offset")
_INFO = "quatrain"  # the metadata key of an entry's description


@dataclass(frozen=True)
class Made:
    """What an entry is made of: the model as the user named it, and all that decides its content."""

    model: str
    fingerprint: str
    double_quant: bool
    compute_dtype: str
    version: str = quatrain.__version__
    format: int = FORMAT

    @property
    def key(self) -> str:
        """32 hexadecimal digits. The model's name is not part of it: the same bytes under two names are one entry."""
        decisive = {name: value for name, value in asdict(self).items() if name != "model"}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]


class BaseCache:
    """The cache in `folder`, which need not exist yet. `notices` collects what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: list[str] = []

    def read(self, made: Made, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor | Nf4Tensor] | None:
        """The tensors by name, mapped; None where there is no such entry, or none that can be trusted. `shapes` are the
        model's, by name."""
        path = self.folder / (made.key + SUFFIX)
        try:
            if not path.is_file():
                return None
            tensors = _mapped(path, made)
        except (OSError, ModelError) as error:
            self._note(f"its entry for this model is not used and will be written again: {error}")
            return None
        with suppress(OSError):  # in a cache that others own, the time of the last use goes unrecorded
            os.utime(path)
        return _joined(tensors, shapes)

    def write(self, made: Made, tensors: Mapping[str, torch.Tensor | Nf4Tensor]) -> None:
        """Adds or replaces an entry. It may take half of what the disk has left: a run needs the disk as well."""
        parts = _parts(tensors)
        size = sum(part.numel() * part.element_size() for part in parts.values())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if 2 * size > free:
                self._note(
                    f"the quantised model ({size / 1e6:.0f} MB) is not kept: the disk has {free / 1e6:.0f} MB left"
                )
                return
            self._write(made, parts)
        except OSError as error:
            self._note(f"the quantised model is not kept: {error.strerror or error}")

    def entries(self) -> list[Entry]:
        """Every entry, the last used first. Raises OSError when the folder cannot be read."""
        return entries_in(self.folder, SUFFIX, _describe)

    def clear(self, key: str | None = None) -> list[Entry]:
        """Deletes the entries whose key starts with `key`, or all of them and what unfinished writes have left.

        Returns what was deleted. Raises OSError when the system refuses."""
        gone = [entry for entry in self.entries() if key is None or entry.key.startswith(key)]
        delete_entries(self.folder, gone, unfinished=key is None)
        return gone

    def _write(self, made: Made, parts: dict[str, torch.Tensor]) -> None:
        header = _header(made, parts)
        partial = self.folder / f".{made.key}.{uuid.uuid4().hex}{PARTIAL}"
        try:
            with partial.open("xb") as file:
                file.write(header)
                for part in parts.values():
                    file.write(_bytes(part))
            partial.replace(self.folder / (made.key + SUFFIX))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _note(self, text: str) -> None:
        self.notices.append(f"cache {self.folder}: {text}")


def _mapped(path: Path, made: Made) -> dict[str, torch.Tensor]:
    """The entry's tensors. Raises ModelError unless the file is what `_write` wrote for `made`."""
    file = SafetensorsFile(path)
    found, digest = _read_info(file)
    if found is None or found.key != made.key:
        raise ModelError(f"{path} holds something else")
    tensors, data = file.map()
    if _digest(((name, info.dtype, info.shape) for name, info in file.tensors.items()), [data]) != digest:
        raise ModelError(f"{path} is not what was written: its SHA-256 differs")
    return tensors


def _describe(path: Path) -> Made | None:
    try:
        return _read_info(SafetensorsFile(path))[0]
    except (ModelError, OSError):
        return None


def _read_info(file: SafetensorsFile) -> tuple[Made | None, str]:
    """(what the header says that the entry is made of, the digest it gives); (None, "") for a foreign file."""
    try:
        info = json.loads(file.metadata[_INFO])
        return Made(**info["made"]), str(info["sha256"])
    except (KeyError, ValueError, TypeError):
        return None, ""


def _header(made: Made, parts: Mapping[str, torch.Tensor]) -> bytes:
    """The safetensors header with its length before it, padded so that the data starts aligned."""
    entries: dict[str, Any] = {}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.numel() * part.element_size()
        entries[name] = {"dtype": _type_name(part), "shape": list(part.shape), "data_offsets": [begin, end]}
    listing = ((name, entry["dtype"], entry["shape"]) for name, entry in entries.items())
    info = {"made": asdict(made), "sha256": _digest(listing, map(_bytes, parts.values()))}
    text = json.dumps({"__metadata__": {_INFO: json.dumps(info)}, **entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _digest(listing: Iterable[tuple[str, str, Iterable[int]]], data: Iterable[memoryview]) -> str:
    """SHA-256 over names, types and shapes in the order of the data, and over the data."""
    digest = hashlib.sha256(json.dumps([[name, dtype, list(shape)] for name, dtype, shape in listing]).encode())
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def _parts(tensors: Mapping[str, torch.Tensor | Nf4Tensor]) -> dict[str, torch.Tensor]:
    """Plain tensors by name, `name:part` for those of an NF4 weight, in the order of the file.

    What fills whole cache lines comes first, then the rest by size of its elements: all starts stay aligned."""
    from quatrain.ops.nf4 import Nf4Tensor

    parts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Nf4Tensor):
            held = {part: getattr(tensor, part) for part in _PARTS}
            parts |= {f"{name}:{part}": value for part, value in held.items() if value is not None}
        else:
            parts[name] = tensor
    order = sorted(parts, key=lambda name: (parts[name].nbytes % _ALIGN != 0, -parts[name].element_size()))
    return {name: parts[name] for name in order}


def _joined(
    parts: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor | Nf4Tensor]:
    """The inverse of `_parts`."""
    from quatrain.ops.nf4 import Nf4Tensor
    from quatrain.ops.nf4.reference import nested_code_book

    joined: dict[str, torch.Tensor | Nf4Tensor] = {}
    quantised: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in parts.items():
        name, _, part = key.partition(":")
        if part:
            quantised.setdefault(name, {})[part] = tensor
        else:
            joined[name] = tensor
    for name, held in quantised.items():
        rows, columns = shapes[name]
        book = nested_code_book() if "absmax_codes" in held else None
        joined[name] = Nf4Tensor((rows, columns), code2=book, **held)
    return joined


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _type_name(tensor: torch.Tensor) -> str:
    return next(name for name, dtype in torch_dtypes().items() if dtype == tensor.dtype)
