"""The tokenizer in GGUF metadata -> a tokenizers JSON, with special tokens and chat template.

Two kinds occur in the supported families: byte-level BPE (`gpt2`), whose rule for cutting text into words has only a
name in the file, and SentencePiece BPE (`llama`), which has scores instead of merges and falls back to bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quatrain.errors import ModelError

if TYPE_CHECKING:
    from quatrain.data.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"  # SentencePiece's visible space

# How words are cut, in the notation of each model's own tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Words:
    """A rule: `pattern` (None: GPT-2's), digits one by one first, whole words before merges, BOS by default."""

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = _Words(_CONTRACTIONS + r"\p{N}{1,3}" + _REST, ignore_merges=True, add_bos=True)
_QWEN2 = _Words(_CONTRACTIONS + r"\p{N}" + _REST)
PRE_TOKENIZERS = {
    "gpt-2": _Words(),
    "smollm": _Words(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Words(_TEKKEN, ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """The tokenizer of a GGUF file, or None if the file has none.

    Raises ModelError for a kind or a word-cutting rule we do not know: a guess would shift every id.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    reader = _Vocabulary(metadata, where)
    if kind == "gpt2":
        name = metadata.get("tokenizer.ggml.pre", "default")
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{where}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}",
                hint="use the model's Hugging Face folder, which has its tokenizer.json",
            )
        words = PRE_TOKENIZERS[name]
        content, add_bos = _byte_level(reader, words), words.add_bos
    elif kind == "llama":
        content, add_bos = _sentencepiece(reader, metadata.get("tokenizer.ggml.add_space_prefix", True)), True
    else:
        raise ModelError(f"{where}: tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    return _wrap(content, reader, metadata, add_bos)


def words_of(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Where the tokenizer's own rule cuts a text, before any merge: (begin, end) in characters."""
    from tokenizers import Tokenizer as RustTokenizer

    rule = RustTokenizer.from_str(json.dumps(tokenizer.content)).pre_tokenizer
    return [span for _, span in rule.pre_tokenize_str(text)] if rule is not None else [(0, len(text))]


class _Vocabulary:
    """Tokens, types, scores and special ids of the metadata, checked against one another."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int, default=[1] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{where}: {len(self.tokens)} tokens but {len(self.types)} token types")
        # Padding rows can repeat a text: the first one has it.
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)

    def _list(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, list) or any(not isinstance(item, kind) for item in value):
            raise ModelError(f"{self.where}: tokenizer.ggml.{name} is missing or no list of {kind.__name__}")
        return value

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise ModelError(f"{self.where}: {len(self.tokens)} tokens but {len(scores)} scores")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str)]
        bad = next((merge for merge in merges if len(merge) != 2), None)
        if bad is not None:
            raise ModelError(f"{self.where}: tokenizer.ggml.merges: want two tokens, got {bad[0]!r}")
        return [(left, right) for left, right in merges]

    def special(self, name: str) -> str | None:
        """The text of the special token `name`, e.g. "bos"."""
        index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ModelError(f"{self.where}: tokenizer.ggml.{name}_token_id is {index!r} of {len(self.tokens)} tokens")
        return self.tokens[index]

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in text before it is cut into words."""
        kinds = {_CONTROL: True, _USER_DEFINED: False, _UNKNOWN: True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": token, **flags, "special": kinds[kind]}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds and self.ids[token] == index
        ]


def _byte_level(vocabulary: _Vocabulary, words: _Words) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if words.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if words.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": words.pattern}, "behavior": "Isolated", "invert": False})
    steps.append({**byte_level, "use_regex": words.pattern is None})
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocabulary.ids,
            "merges": vocabulary.merges(),
            "ignore_merges": words.ignore_merges,
        },
    }


def _sentencepiece(vocabulary: _Vocabulary, prefix: bool) -> dict[str, Any]:
    visible = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    spaces = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _SPACE}, visible] if prefix else [visible],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *(strip if prefix else [])],
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary.ids,
            "merges": _merges_by_score(vocabulary),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, likeliest token first: SentencePiece merges by score."""
    scores, found = vocabulary.scores(), []
    for token, index in vocabulary.ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary.ids and right in vocabulary.ids:
                found.append((-scores[index], index, vocabulary.ids[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _wrap(content: dict[str, Any], vocabulary: _Vocabulary, metadata: Mapping[str, Any], add_bos: bool) -> Tokenizer:
    from quatrain.data.tokenizer import Tokenizer

    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    if begins and bos is not None:  # we add it ourselves; other programs that read the JSON go by its post-processor
        content["post_processor"] = _begins_with(bos, vocabulary.ids[bos])
    return Tokenizer(
        json.dumps(content, ensure_ascii=False),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=eos,
        pad_token=vocabulary.special("padding"),
        unk_token=vocabulary.special("unknown"),
        add_bos=begins and bos is not None,
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None,
    )


def _begins_with(token: str, index: int) -> dict[str, Any]:
    """A post-processor that puts `token` before a text."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
