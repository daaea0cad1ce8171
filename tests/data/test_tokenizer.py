"""Classes A17, A18, B14, B16, B17, K5 and K6 of docs/cases.md: text to ids, back, and to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data.toys import CHATML, byte_level, byte_level_rust, chat, sentencepiece, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.config import DataOptions
from quatrain.data.pipeline import prepare
from quatrain.data.stream import StopTexts
from quatrain.data.tokenizer import Piece, Tokenizer, replace_surrogates
from quatrain.errors import DataError, ModelError

BYTES = byte_level()
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Co"]))


def folder_of(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A Hugging Face folder with odd spacing in its files, so that a re-serialised copy would differ."""
    folder = tmp_path / "model"
    tokenizer.save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content, indent=7, sort_keys=True) + "\n\n")
    (folder / "special_tokens_map.json").write_text('{ "pad_token": {"content": "<|im_end|>"} }')
    return folder


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_a18_decode_gives_back_what_was_encoded(text: str) -> None:
    """A18: nothing is normalised on the way to ids and back."""
    assert BYTES.decode(BYTES.encode(text)) == text


def test_a17_surrogates() -> None:
    """A17: the rule for prompts that are typed is the rule for data."""
    assert replace_surrogates("a\ud83d\ude00b\ud83dc\ude00") == "a\U0001f600b\ufffdc\ufffd"
    assert BYTES.decode(BYTES.encode("ok \ud83d end")) == "ok \ufffd end"


@pytest.mark.parametrize("scheme", ["byte", "first", "always", "never", "legacy"])
def test_b16_guarding_changes_no_other_id(scheme: str) -> None:
    """B16: guarding control tokens changes no other id, in any kind of tokenizer."""
    tokenizer = byte_level(("<s>", "</s>"), eos="</s>") if scheme == "byte" else sentencepiece(scheme)
    plain = tokenizer._full
    text = "<s>[INST] hello wörld 42 [/INST] the answer</s> <s> is\n\n  not  </s>"
    expected = plain.encode(text, add_special_tokens=False)
    got = tokenizer.encode_pieces([Piece(text, scaffold=True)])
    assert (got.ids, got.offsets) == (expected.ids, expected.offsets)
    pieces = [Piece("<s>", True), Piece("[INST] hello </s> there"), Piece("</s>", True)]
    guarded = tokenizer.encode_pieces(pieces)
    assert guarded.ids.count(tokenizer.eos_id) == 1
    assert "".join(piece.text for piece in pieces)[slice(*guarded.offsets[-1])] == "</s>"
    assert tokenizer.eos_id not in tokenizer.encode("a </s> b")


def test_b16_the_reserved_characters_are_refused() -> None:
    """B16: the characters that stand for control tokens inside are refused from outside."""
    with pytest.raises(DataError, match="private-use"):
        BYTES.encode("a \U00100000 b")


def test_b14_files_travel_byte_for_byte(tmp_path: Path) -> None:
    """B14: nothing was changed, so every tokenizer file is saved byte for byte."""
    folder = folder_of(tmp_path, byte_level(bos="<|im_start|>"))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None and (loaded.bos_token, loaded.pad_token) == ("<|im_start|>", "<|im_end|>")
    loaded.save(tmp_path / "adapter")
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "adapter").iterdir())
    for name in names:
        assert (tmp_path / "adapter" / name).read_bytes() == (folder / name).read_bytes(), name


def test_b14_the_template_that_was_used_is_saved(tmp_path: Path) -> None:
    """B14: a template chosen for training is what a plain Hugging Face tokenizer finds beside the adapter."""
    transformers = pytest.importorskip("transformers")
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for m in messages %}{{ m.role + '>' + m.content + '<|im_end|>' }}{% endfor %}\n")
    folder = folder_of(tmp_path, byte_level())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None
    rows = write_jsonl(tmp_path / "rows.jsonl", {"messages": chat("a", "b")})
    prepared = prepare([rows], DataOptions(chat_template=str(mine)), loaded)
    prepared.tokenizer.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    hf = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "adapter"))
    assert hf.chat_template == mine.read_text()
    assert hf.eos_token == "<|im_end|>" == hf.pad_token
    ids = hf.apply_chat_template(chat("a", "b"), tokenize=True, return_dict=False)
    assert tuple(ids) == prepared.train[0].input_ids
    again = Tokenizer.from_folder(tmp_path / "adapter")
    assert again is not None and again.chat_template == mine.read_text()


@pytest.mark.parametrize("adds", [False, True])
def test_bos_is_added_as_the_files_say(tmp_path: Path, adds: bool) -> None:
    folder = tmp_path / "model"
    byte_level(("<s>",), bos="<s>", eos=None, template=None, adds_bos=adds).save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["add_bos_token"]  # then the post-processor decides
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None and (loaded.encode("a", bos=True)[0] == loaded.bos_id) is adds


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, byte_level(template=None))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None and loaded.chat_template == CHATML


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    for content, problem in ((b"{", "not JSON"), (b"{}", "cannot be used"), (b"\xff", "not UTF-8")):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelError, match=f"{tmp_path}.*{problem}"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("config", [{"chat_template": 3}, {"eos_token": ["</s>"]}])
def test_values_that_are_no_texts_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    folder = folder_of(tmp_path, byte_level())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=f"{folder}: tokenizer_config.json: .*want a string, got"):
        Tokenizer.from_folder(folder)


def test_b17_special_tokens_must_exist() -> None:
    """B17: a pad token that the vocabulary lacks is not added; an end token that it lacks is an error."""
    with pytest.raises(ModelError, match=r"eos_token is '\[END\]', which is not in the vocabulary"):
        byte_level(eos="[END]")
    unused = Tokenizer(byte_level_rust(["</s>"]).to_str(), eos_token="</s>", pad_token="[PAD]")
    assert unused.token_id("[PAD]") is None  # padding is never used, so no row is added for it


def test_a_token_that_is_only_in_the_vocabulary_is_guarded_too() -> None:
    content = json.loads(byte_level_rust(["</s>"]).to_str())
    index = content["added_tokens"].pop()["id"]
    content["model"]["vocab"]["</s>"] = index
    tokenizer = Tokenizer(json.dumps(content), eos_token="</s>")
    assert tokenizer.encode("</s>", parse_special=True) == [index] == [tokenizer.eos_id]
    assert index not in tokenizer.encode("</s>")


def test_named_special_tokens_are_guarded_whatever_their_flag() -> None:
    tokenizer = byte_level((), ("</s>", "<free>"), eos="</s>", template=None)
    assert tokenizer.eos_id not in tokenizer.encode("</s>")
    assert tokenizer.encode("<free>") == [tokenizer.token_id("<free>")]
    strict = tokenizer.with_chat_template("<free>{{ messages }}")  # now it is a marker of the template
    assert tokenizer.token_id("<free>") not in strict.encode("<free>")
    assert tokenizer.encode("<free>") == [tokenizer.token_id("<free>")]


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_k6_streams_hold_bytes_until_a_character_is_complete(text: str) -> None:
    """K6: any text, streamed token by token: no half character is shown."""
    stream = BYTES.stream_decoder()
    shown = [stream.push(token) for token in BYTES.encode(text)]
    assert "".join(shown) + stream.finish() == text
    assert all("\ufffd" not in part or "\ufffd" in text for part in shown)


def test_k6_an_emoji_comes_whole_and_broken_bytes_come_at_the_end() -> None:
    """K6: an emoji of four byte tokens comes with the last one."""
    stream = BYTES.stream_decoder()
    assert [stream.push(token) for token in BYTES.encode("é😀")] == ["", "é", "", "", "", "😀"]
    for token in BYTES.encode("😀")[:2]:
        assert stream.push(token) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("scheme", ["first", "always", "legacy"])
def test_streams_keep_the_spaces_of_sentencepiece(scheme: str) -> None:
    tokenizer = sentencepiece(scheme)
    ids = tokenizer.encode("hello world, the answer is 42 é😀 ok")
    stream = tokenizer.stream_decoder()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_k5_a_stop_text_may_come_in_pieces() -> None:
    """K5: a stop text is found in the text, however the tokens cut it; nothing from it on is shown."""
    stops = StopTexts(["###", "\nUser:"])
    assert [stops.push(part) for part in ("Hi #", "1\nUs", "e ##", "#\n", "more")] == ["Hi ", "#1", "\nUse ", "", ""]
    assert stops.stopped and stops.finish() == ""
    held = StopTexts(["###"])
    assert held.push("a##") == "a" and held.finish() == "##" and not held.stopped
    first = StopTexts(["bc", "b"])
    assert first.push("abc") == "a" and first.stopped


def test_sizes() -> None:
    assert byte_level(("<s>", "</s>"), eos="</s>").vocab_size == 258
    assert BYTES.longest_token == len("<|im_start|>")
