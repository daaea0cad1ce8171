"""Tokenizers rebuilt from GGUF metadata: the real one of SmolLM2, and small ones of each kind."""

from __future__ import annotations

import pytest

from quatrain.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from quatrain.checkpoint.open import open_source
from quatrain.errors import ModelError


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return open_source(str(smollm2_path)).tokenizer()


def test_smollm2_vocabulary(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.token_id("<|im_start|>") == 1 == smollm2.bos_id
    assert smollm2.token_id("<|im_end|>") == 2 == smollm2.eos_id
    assert "<|im_start|>" in smollm2.chat_template and not smollm2.add_bos


def test_smollm2_splits_digits_one_by_one(smollm2):
    pieces = [smollm2.decode([i]) for i in smollm2.encode("In 2024 it's 3.14")]
    assert pieces == ["In", " ", "2", "0", "2", "4", " it", "'s", " ", "3", ".", "1", "4"]


def test_smollm2_special_tokens_are_parsed_only_when_asked(smollm2):
    assert smollm2.encode("<|im_start|>user", parse_special=True)[0] == 1
    assert 1 not in smollm2.encode("<|im_start|>user")


@pytest.mark.parametrize(
    "text",
    ["plain words", "  two  spaces\n\n\tand tabs ", "❤️ 👩‍💻 é e\u0301", "naïve 日本語 Привет", "a\r\nb", "\x00\x7f"],
)
def test_smollm2_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def byte_level(pre: str | None, tokens=(), merges=(), types=(), **extra) -> dict:
    """Metadata of a toy byte-level tokenizer: the 256 byte characters, then `tokens`."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*alphabet, *tokens],
        "tokenizer.ggml.token_type": [1] * 256 + list(types or [1] * len(tokens)),
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


def pieces(pre: str, text: str) -> list[str]:
    """How a rule cuts `text`: with an empty merge list only the words show, through the pre-tokenizer itself."""
    import json

    from tokenizers import Tokenizer as RustTokenizer

    tokenizer = tokenizer_from_gguf(byte_level(pre), "toy.gguf")
    rust = RustTokenizer.from_str(json.dumps(tokenizer._json))
    return [text[begin:end] for _, (begin, end) in rust.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["It", "'s", " HeLLO", " 12345", "!!", "\n\n", " x"]),
        ("smollm", ["It", "'s", " HeLLO", " ", "1", "2", "3", "4", "5", "!!", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " HeLLO", " ", "123", "45", "!!\n\n", " x"]),
        ("qwen2", ["It", "'s", " HeLLO", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
        ("tekken", ["It", "'s", " He", "LLO", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
    ],
)
def test_word_rules(pre, want):
    assert pieces(pre, "It's HeLLO 12345!!\n\n x") == want


@pytest.mark.parametrize("pre", [None, "default", "deepseek-llm"])
def test_an_unknown_word_rule_is_refused(pre):
    with pytest.raises(ModelError, match=r"toy.gguf: tokenizer.ggml.pre is '(default|deepseek-llm)'; supported: gpt-2"):
        tokenizer_from_gguf(byte_level(pre), "toy.gguf")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_added_tokens_special_ids_and_bos(pre):
    tokens = ["ab", "<s>", "<tool>", "<pad>"]
    metadata = byte_level(pre, tokens, ["a b"], [1, 3, 4, 3], bos_token_id=257, eos_token_id=257, padding_token_id=259)
    tokenizer = tokenizer_from_gguf(metadata, "toy.gguf")
    assert tokenizer.added_tokens == {"<s>": True, "<tool>": False, "<pad>": True}
    assert tokenizer.encode("ab<tool>ab", parse_special=False)[:2] == [256, 258]
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.bos_id) == ("<s>", "<pad>", 257)
    assert tokenizer.add_bos == PRE_TOKENIZERS[pre].add_bos
    off = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False}, "toy.gguf")
    assert not off.add_bos and off.encode("ab", bos=True) == [256]


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_TOKENS += ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "llo", "▁hello", "hello", "el"]
# "ll" is likelier than "he" and "el"; longer words are put together from both.
SPM_SCORES = dict(zip(SPM_TOKENS[259:], [-9, -9, -9, -9, -9, -5, -3, -1, -2, -6, -7, -4], strict=True))


def sentencepiece(**extra) -> dict:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_TOKENS,
        "tokenizer.ggml.scores": [float(SPM_SCORES.get(token, 0.0)) for token in SPM_TOKENS],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * 12)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = tokenizer_from_gguf(sentencepiece(), "toy.gguf")

    def tokens(text: str) -> list[str]:
        return [SPM_TOKENS[i] for i in tokenizer.encode(text)]

    assert tokens("hello") == ["▁hello"]
    assert tokens("hell") == ["▁", "he", "ll"], "he (-3) comes before ▁h (-5)"
    assert tokens("oell") == ["▁", "o", "e", "ll"], "ll (-1) comes before el (-4)"
    assert tokens("é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", "  é\nhe", "日本"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.add_bos and tokenizer.encode("hello", bos=True)[0] == 1


def test_sentencepiece_without_the_leading_space():
    tokenizer = tokenizer_from_gguf(sentencepiece(add_space_prefix=False), "toy.gguf")
    assert [SPM_TOKENS[i] for i in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "t5"}, "is 't5'; supported: gpt2, llama"),
        ({"tokenizer.ggml.scores": [0.0]}, "but 1 scores"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is missing or no list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "but 1 token types"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000 of"),
    ],
)
def test_broken_metadata_is_refused(changes, said):
    with pytest.raises(ModelError, match=said):
        tokenizer_from_gguf({**sentencepiece(), **changes}, "toy.gguf")


def test_no_tokenizer_in_the_file():
    assert tokenizer_from_gguf({}, "toy.gguf") is None
    with pytest.raises(ModelError, match="want two tokens, got 'ab'"):
        tokenizer_from_gguf(byte_level("gpt-2", ["ab"], ["ab"]), "toy.gguf")


@pytest.mark.parametrize("add_bos", [True, False])
def test_other_programs_put_bos_where_we_do(tmp_path, add_bos):
    """B1, B2: the tokenizer.json made from metadata begins a text with BOS exactly where the file says so."""
    import transformers

    metadata = byte_level("llama-bpe", ["<s>"], ["a b"], [3], bos_token_id=256, add_bos_token=add_bos)
    metadata["tokenizer.ggml.tokens"].append("ab")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = tokenizer_from_gguf(metadata, "toy.gguf")
    tokenizer.save(tmp_path)
    got = transformers.AutoTokenizer.from_pretrained(tmp_path)("ab ab")["input_ids"]
    assert got == tokenizer.encode("ab ab", bos=True) and (got[0] == 256) == add_bos
