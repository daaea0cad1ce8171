"""Models of the Hugging Face hub, through huggingface_hub: online, or offline from its cache."""

from __future__ import annotations

import re
from pathlib import Path

from quatrain.checkpoint.hf_folder import CONFIG, check_quantization, read_json
from quatrain.errors import ModelError
from quatrain.model.from_config import spec_from_config

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a model folder needs; everything else in a repository (pickles, other formats, images) stays there.
_WANTED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form owner/name."""
    return _ID.fullmatch(text) is not None and not text.endswith((".gguf", ".safetensors", ".json"))


def snapshot(model_id: str, revision: str | None) -> Path:
    """The local folder of a hub model. The configuration comes first: an unsupported model costs no further download.

    Raises ModelError if the model is unknown, private, unsupported, or neither reachable nor in the cache.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        config = read_json(Path(hf_hub_download(model_id, CONFIG, revision=revision)))
        spec_from_config(config, f"{model_id}/{CONFIG}")
        check_quantization(config, f"{model_id}/{CONFIG}")
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise ModelError(
            f"{model_id}: access must be requested on its page", hint="then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model_id}: no such model on the hub (or it is private), and no such file or folder here",
            hint="check the name; for a private model log in with `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model_id}: no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model_id}: not in the local cache, and the hub cannot be reached; nor is it a file or folder here",
            hint="connect once to fetch it, or give the path of a model folder or .gguf file",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model_id}: the hub did not deliver it: {error}") from error
