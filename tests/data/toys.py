"""Small tokenizers and templates whose ids can be counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from quatrain.data.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen3's manner: reasoning is shown for the last answer only, and taken out of earlier ones.
THINKING = (
    "{% set last = messages|length - 1 %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{% if loop.index0 == last %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen2.5's manner of tools.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    '{% for c in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    added: Sequence[str] = (),
    *,
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    template: str | None = CHATML,
    adds_bos: bool = False,
    adds_eos: bool = False,
) -> Tokenizer:
    """One token for each byte, plus `special` and `added` tokens."""
    rust = byte_level_rust(special, added)
    if adds_bos or adds_eos:
        around = [(token, rust.token_to_id(token)) for token in (bos, eos) if token]
        single = " ".join(filter(None, [bos if adds_bos else None, "$A", eos if adds_eos else None]))
        rust.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return Tokenizer(rust.to_str(), template, bos, eos, add_bos=adds_bos, add_eos=adds_eos)


def byte_level_rust(
    special: Sequence[str], added: Sequence[str] = (), merges: Sequence[tuple[str, str]] = ()
) -> RustTokenizer:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    rust = RustTokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    rust.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return rust


def sentencepiece(scheme: str, template: str | None = None) -> Tokenizer:
    """A SentencePiece-like BPE. `scheme` is Metaspace's prepend scheme, or "legacy" for Llama 2's normalizer."""
    corpus = ["[INST] hello world, what is the answer? [/INST] the answer is 42 user assistant system"] * 20
    special = ["<unk>", "<s>", "</s>"]
    rust = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + fallback, show_progress=False)
    rust.train_from_iterator(corpus, trainer)
    content = json.loads(rust.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["decoder"] = json.loads(_sentencepiece_decoder(rust))["decoder"]
    return Tokenizer(json.dumps(content), template, "<s>", "</s>", unk_token="<unk>", add_bos=True)


def _sentencepiece_decoder(rust: RustTokenizer) -> str:
    strip = decoders.Strip(" ", 1, 0)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return str(rust.to_str())


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
