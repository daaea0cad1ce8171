"""A Hugging Face tokenizer -> GGUF metadata. What it becomes is read back and compared on a text before it is taken.

The file names the rule by which text is cut into words; there is no place for the rule itself. A tokenizer is taken
when one of the rules we know cuts and encodes a probe text exactly as the tokenizer does, and is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf, words_of
from quatrain.errors import ModelError

if TYPE_CHECKING:
    from quatrain.data.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_PREFIX = "tokenizer.ggml."
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_vocabulary(tokenizer: Tokenizer, rows: int, probe: str, *, bos_written: bool | None) -> dict[str, Any]:
    """The `tokenizer.*` keys for a tokenizer and an embedding of `rows` rows; rows without a token are named as unused.

    `bos_written`: whether the chat template writes BOS itself (None: there is no template). llama.cpp puts BOS before a
    prompt when `add_bos_token` says so, and drops the template's own then, so the flag is set only where training had
    one. Raises ModelError for tokens without a row, and for a tokenizer that none of the known rules equals on `probe`.
    """
    content = tokenizer.content
    if tokenizer.vocab_size > rows:
        raise ModelError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the embedding {rows} rows",
            hint="the tokenizer and the weights must come from the same model",
        )
    kind = content["model"].get("type", "BPE")
    if kind != "BPE" or not content["model"].get("merges"):
        raise _unknown(f"a {kind} model" if kind != "BPE" else "no merges")
    tokens, types = _tokens(tokenizer, rows)
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    for name, role in _SPECIAL.items():
        if (token := tokenizer.special_tokens.get(role)) is not None:
            keys[f"{name}_token_id"] = tokenizer.token_id(token)
    keys["add_bos_token"] = tokenizer.add_bos and bos_written is not False
    keys["add_eos_token"] = tokenizer.add_eos
    for more in _candidates(tokenizer, tokens, types):
        metadata = {_PREFIX + name: value for name, value in (keys | more).items()}
        if _equal(tokenizer, metadata, probe):
            break
    else:
        raise _unknown("a rule for cutting words")
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _tokens(tokenizer: Tokenizer, rows: int) -> tuple[list[str], list[int]]:
    """(text, type) of every row."""
    tokens, types = [f"[UNUSED{row}]" for row in range(rows)], [_UNUSED] * rows
    fallback = bool(tokenizer.content["model"].get("byte_fallback"))
    for token, row in tokenizer.content["model"]["vocab"].items():
        byte = fallback and len(token) == 6 and token.startswith("<0x")
        tokens[row], types[row] = token, _BYTE if byte else _NORMAL
    for token, special in tokenizer.added_tokens.items():
        row = tokenizer.token_id(token)
        assert row is not None
        tokens[row], types[row] = token, _CONTROL if special else _USER_DEFINED
    unknown = tokenizer.token_id(tokenizer.unk_token) if fallback and tokenizer.unk_token else None
    if unknown is not None:
        types[unknown] = _UNKNOWN
    return tokens, types


def _candidates(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> Iterator[dict[str, Any]]:
    """The keys that may describe the tokenizer: by name for byte-level BPE, by scores for SentencePiece."""
    pairs = tokenizer.content["model"].get("merges", [])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in pairs]
    if not tokenizer.content["model"].get("byte_fallback"):
        for name in PRE_TOKENIZERS:
            yield {"model": "gpt2", "pre": name, "merges": merges}
        return
    # SentencePiece merges by score, so a token's score is how early it can be made; what nothing makes comes last.
    made: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        made.setdefault(merge.replace(" ", ""), rank)
    scores = [float(-made.get(token, len(merges))) for token in tokens]
    for prefix in (True, False):
        yield {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}


def _equal(tokenizer: Tokenizer, metadata: Mapping[str, Any], probe: str) -> bool:
    """Whether what the metadata describes cuts the probe into the same words and gives the same ids."""
    other = tokenizer_from_gguf(metadata, "the exported tokenizer")
    assert other is not None
    if metadata[_PREFIX + "model"] == "gpt2" and words_of(tokenizer, probe) != words_of(other, probe):
        return False
    return tokenizer.encode(probe) == other.encode(probe)


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"the tokenizer has {what} that GGUF files have no name for here; known: SentencePiece BPE, and byte-level BPE "
        f"as in {', '.join(PRE_TOKENIZERS)}",
        hint="use --format hf, and convert that folder with llama.cpp's convert_hf_to_gguf.py",
    )
