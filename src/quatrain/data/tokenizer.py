"""Text to ids and back, with one rule that most encoders lack: content never becomes a control token.

A rendered chat mixes two kinds of text: what the template writes (scaffold) and what the data says (content). Control
tokens may come from the scaffold alone, so that a user who types `<|im_end|>` cannot forge a turn. To have that and
still encode the whole text at once (pieces encoded one by one would differ at their borders), a twin of the tokenizer
is used in which every guarded token is spelled as one private-use character. The scaffold is re-spelled with those
characters before encoding; content is left alone and can no longer match. Ids are the same in both.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.data.outcome import RowError
from quatrain.data.stream import StreamDecoder
from quatrain.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

# Files of a Hugging Face tokenizer that travel with an adapter, byte for byte.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_FIRST_MARK = 0x100000  # plane 16: private use, one character for each guarded token
_RESERVED = "text holds a private-use character of plane 16 (U+100000 and up), which is reserved"
_MARKS = re.compile("[\U00100000-\U0010fffd]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """`text` as valid Unicode: a high and a low surrogate join to one character, a lone one becomes U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text. In a scaffold, guarded tokens are control tokens; in content they are plain text."""

    text: str
    scaffold: bool = False


@dataclass(frozen=True)
class Encoded:
    """`ids[i]` covers the characters `offsets[i]` = (begin, end) of the text that was encoded."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """A `tokenizers` model with its special tokens and chat template.

    `add_bos` and `add_eos` say what the model expects around plain (not templated) text. `files` are the original
    files, which `save` writes back unchanged. Raises ModelError when the JSON or a named special token cannot be used.
    """

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        files: dict[str, bytes] | None = None,
        extra_special: Sequence[str] = (),
    ) -> None:
        self.chat_template = chat_template
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = bos_token, eos_token, pad_token, unk_token
        self.add_bos, self.add_eos = add_bos, add_eos
        self.files = dict(files or {})
        self._extra_special = tuple(extra_special)
        self._json_text = tokenizer_json
        try:
            self._json: dict[str, Any] = json.loads(tokenizer_json)
        except ValueError as error:
            raise ModelError(f"tokenizer.json is not JSON: {error}") from error
        # We add BOS and EOS ourselves, and cut and pad never: the template or the caller says what is there.
        self._json.update(post_processor=None, truncation=None, padding=None)
        self._declare_special(self.special_tokens.values())
        self._full = _load(self._json)
        self.bos_id = self._id_of("bos_token", bos_token)
        self.eos_id = self._id_of("eos_token", eos_token)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder; None if the folder has no tokenizer at all.

        Raises ModelError if there is one that cannot be used (a `tokenizer.model` without `tokenizer.json`, bad JSON).
        """
        folder = Path(folder)
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        if "tokenizer.json" not in files:
            if not files.keys() & {"tokenizer.model", "vocab.json"}:
                return None
            raise ModelError(
                f"{folder}: has {', '.join(sorted(files))} but no tokenizer.json",
                hint="write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
            )
        config = _read_json(folder, files, "tokenizer_config.json") | {}
        for name, value in _read_json(folder, files, "special_tokens_map.json").items():
            config.setdefault(name, value)
        text = _utf8(folder / "tokenizer.json", files["tokenizer.json"])
        extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        extra = extra.values() if isinstance(extra, dict) else extra
        try:
            special = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES}
            add_bos, add_eos = _added_around(text, special["bos_token"], special["eos_token"])
            return cls(
                text,
                chat_template=_template_of(folder, files, config),
                **special,
                add_bos=bool(config.get("add_bos_token", add_bos)) and special["bos_token"] is not None,
                add_eos=bool(config.get("add_eos_token", add_eos)) and special["eos_token"] is not None,
                files=files,
                extra_special=[_token_text(token) or "" for token in extra],
            )
        except ModelError as error:
            raise ModelError(f"{folder}: {error}", hint=error.hint) from error.__cause__

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: the rows an embedding table needs."""
        return int(max(self._full.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token, as tokenizer.json spells them."""
        return dict(self._full.get_vocab(with_added_tokens=True))

    @property
    def content(self) -> dict[str, Any]:
        """The parsed tokenizer.json, without what would add or cut tokens around a text. Not to be changed."""
        return self._json

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no token covers more characters of a text."""
        return max((len(token.encode("utf-8")) for token in self._full.get_vocab(with_added_tokens=True)), default=1)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text, or None."""
        found = self._full.token_to_id(token)
        return None if found is None else int(found)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens that are set, as templates see them: `bos_token`, `eos_token`, ..."""
        named = {name: getattr(self, name) for name in _SPECIAL_NAMES}
        return {name: token for name, token in named.items() if token is not None}

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """Text of each added token, and whether it is flagged special."""
        return {token["content"]: bool(token["special"]) for token in self._json["added_tokens"]}

    @cached_property
    def _ids_of_added(self) -> dict[str, int]:
        return {token.content: index for index, token in self._full.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens: control tokens, and marks such as `<think>`."""
        return frozenset(self._ids_of_added.values())

    @cached_property
    def guarded_tokens(self) -> dict[str, int]:
        """Tokens that content cannot spell, with their ids: all special ones and all that the template mentions."""
        template = self.chat_template or ""
        named = {token for token, special in self.added_tokens.items() if special or token in template}
        return {token: index for token, index in self._ids_of_added.items() if token in named}

    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a text has, but for the chat template."""
        named = [self.special_tokens, self._extra_special, self.add_bos, self.add_eos]
        return hashlib.sha256(f"{json.dumps(named)}\n{self._json_text}".encode("utf-8", "surrogatepass")).hexdigest()

    # Encoding

    def encode(self, text: str, *, bos: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of plain text. `bos` puts the model's BOS first if the model expects one there (once, and never twice).

        Special-token text stays plain text unless `parse_special`. Lone surrogates become U+FFFD; nothing else changes.
        """
        ids = self.encode_pieces([Piece(replace_surrogates(text), scaffold=parse_special)]).ids
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def encode_pieces(self, pieces: Iterable[Piece]) -> Encoded:
        """Encode the joined text of `pieces` at once; control tokens come from scaffold pieces only.

        Offsets count characters of the joined text. Raises RowError if a text holds one of the private-use characters
        that stand for control tokens (plane 16), since it could not be told apart.
        """
        spelled: list[str] = []
        length, ends, shifts = 0, [-1], [0]  # from spelled position ends[i] on, the original is shifts[i] further
        for piece in pieces:
            if _MARKS.search(piece.text):
                raise RowError(_RESERVED)
            for text, original in self._spell(piece):
                spelled.append(text)
                length += len(text)
                if text != original:
                    ends.append(length)
                    shifts.append(shifts[-1] + len(original) - len(text))
        encoding = self._twin.encode("".join(spelled), add_special_tokens=False)

        def original_position(at: int) -> int:
            return at + shifts[bisect.bisect_right(ends, at) - 1]

        offsets = [(original_position(begin), original_position(end)) for begin, end in encoding.offsets]
        return Encoded(list(encoding.ids), offsets)

    def _spell(self, piece: Piece) -> list[tuple[str, str]]:
        """(text for the twin, original text) pairs that make up a piece."""
        if not piece.scaffold or self._guard_pattern is None:
            return [(piece.text, piece.text)]
        parts = self._guard_pattern.split(piece.text)
        return [(self._marks.get(part, part) if i % 2 else part, part) for i, part in enumerate(parts)]

    @cached_property
    def _marks(self) -> dict[str, str]:
        return {token: chr(_FIRST_MARK + rank) for rank, token in enumerate(self.guarded_tokens)}

    @cached_property
    def _guard_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.guarded_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @cached_property
    def _twin(self) -> RustTokenizer:
        """The tokenizer with each guarded token re-spelled as its mark, in the added tokens and in the vocabulary."""
        twin = _load(_respelled(self._json, self._marks))
        for token, expected in self.guarded_tokens.items():
            got = twin.token_to_id(self._marks[token])
            if got != expected:
                raise ModelError(f"tokenizer: guarding {token!r} moved its id from {expected} to {got}")
        return twin

    # Decoding

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special))

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder that takes ids one by one and gives text only when its bytes are complete."""
        return StreamDecoder(lambda ids: self.decode(ids, skip_special=skip_special))

    # Copies and files

    def with_chat_template(self, template: str | None) -> Tokenizer:
        """The same tokenizer with another chat template, which `save` then writes. With its own it is itself: what
        depends on a template takes a third of a second to work out, and is kept."""
        if template == self.chat_template:
            return self
        clone = copy.copy(self)
        for name in ("guarded_tokens", "_marks", "_guard_pattern", "_twin"):
            clone.__dict__.pop(name, None)  # these depend on the template
        clone.chat_template = template
        return clone

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files: the originals byte for byte, and the chat template that is really used."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files_to_save().items():
            (folder / name).write_bytes(content)

    def files_to_save(self) -> dict[str, bytes]:
        """What `save` writes, by file name."""
        files = dict(self.files) or {
            "tokenizer.json": self._json_text.encode("utf-8"),
            "tokenizer_config.json": _dump_json(self._config()),
        }
        if self.chat_template is not None and _template_of(Path(), files, _parsed_config(files)) != self.chat_template:
            config = _parsed_config(files)
            if config.pop("chat_template", None) is not None:  # one template, not two that disagree
                files["tokenizer_config.json"] = _dump_json(config)
            files["chat_template.jinja"] = self.chat_template.encode("utf-8")
        return files

    def _config(self) -> dict[str, Any]:
        flags = {"add_bos_token": self.add_bos, "add_eos_token": self.add_eos}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens, **flags}

    def _id_of(self, name: str, token: str | None) -> int | None:
        if token is None:
            return None
        found = self.token_id(token)
        if found is None:
            raise ModelError(f"tokenizer: {name} is {token!r}, which is not in the vocabulary")
        return found

    def _declare_special(self, named: Iterable[str]) -> None:
        """Flag the named special tokens special, and enter those that are only in the vocabulary as added tokens."""
        entries = {entry["content"]: entry for entry in self._json.setdefault("added_tokens", [])}
        vocab = _vocab(self._json)
        for token in (*named, *self._extra_special):
            if token in entries:
                entries[token]["special"] = True
            elif token in vocab:
                plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
                self._json["added_tokens"].append({"id": vocab[token], "content": token, **plain, "special": True})
        self._json["added_tokens"].sort(key=lambda entry: entry["id"])


def _load(content: dict[str, Any]) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_str(json.dumps(content, ensure_ascii=False))
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(f"tokenizer.json cannot be used: {error}") from error


def _vocab(content: dict[str, Any]) -> dict[str, int]:
    vocab = content["model"].get("vocab", {})
    return vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}


def _respelled(content: dict[str, Any], marks: dict[str, str]) -> dict[str, Any]:
    """`content` (a tokenizer.json) in which each key of `marks` is spelled as its value."""
    model = dict(content["model"])
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):  # BPE, WordLevel, WordPiece
        model["vocab"] = {marks.get(piece, piece): index for piece, index in vocab.items()}
    else:  # Unigram
        model["vocab"] = [[marks.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    if model.get("merges"):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[left, right] for left, right in pairs if not {left, right, left + right} & marks.keys()]
    added = [{**entry, "content": marks.get(entry["content"], entry["content"])} for entry in content["added_tokens"]]
    return {**content, "model": model, "added_tokens": added}


def _added_around(tokenizer_json: str, bos: str | None, eos: str | None) -> tuple[bool, bool]:
    """Whether the file's own post-processor puts BOS before and EOS after a text."""
    try:
        original = json.loads(tokenizer_json)
    except ValueError as error:
        raise ModelError(f"tokenizer.json is not JSON: {error}") from error
    tokens = _load(original).encode("a").tokens
    return bool(tokens) and tokens[0] == bos, bool(tokens) and tokens[-1] == eos


def _token_text(value: Any) -> str | None:
    """A special token as text; files write it as a string or as an object with `content`."""
    return _string("a special token", value.get("content") if isinstance(value, dict) else value)


def _string(what: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ModelError(f"tokenizer_config.json: {what}: want a string, got {json.dumps(value)}")
    return value


def _template_of(folder: Path, files: dict[str, bytes], config: dict[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return _utf8(folder / "chat_template.jinja", files["chat_template.jinja"])
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}
    return _string("chat_template", template.get("default") if isinstance(template, dict) else template)


def _parsed_config(files: dict[str, bytes]) -> dict[str, Any]:
    return dict(json.loads(files.get("tokenizer_config.json", b"{}")))


def _read_json(folder: Path, files: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ModelError(f"{folder / name}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name}: want a JSON object, got {type(content).__name__}")
    return content


def _utf8(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from error


def _dump_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
