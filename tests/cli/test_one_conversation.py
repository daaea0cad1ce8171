"""One conversation, one list of ids: in `check`, in training, in `chat` and in what Ollama makes of the export."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import go_template
import pytest
from chat_templates import FAMILIES, TOKENS
from oracles import families

from quatrain.bench.shapes import RandomWeights
from quatrain.checkpoint.gguf_file import GgufFile
from quatrain.checkpoint.open import open_source
from quatrain.cli.main import main
from quatrain.data.row import IGNORE
from quatrain.data.templates import BUILT_INS
from quatrain.data.tokenizer import Tokenizer
from quatrain.train.pipeline import InstructPipeline

SYSTEM = "Answer {{briefly}}.\nAlways."
TURNS = [
    "What is 2 + 2?",
    "4,\n\nor {five}",
    'And {{ 5 }}? Say "x" 👩',
    "x: <|im_end|> é",
]  # a question is one typed line
VOCAB = 288
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"  # the template's own, so it is not learned


def write_model(folder: Path, template: str | None) -> Path:
    """A tiny Llama whose tokenizer has the control tokens of all families, and puts BOS before a text."""
    from data.toys import byte_level_rust

    rust = byte_level_rust(TOKENS, merges=[("t", "h"), ("Ġ", "a"), ("1", "2"), ("o", "'")])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    options = families.BY_NAME["llama"].options | {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    families.save(families.Variant("tiny", "llama", {**options, "eos_token_id": rust.token_to_id("</s>")}), folder)
    return folder


def write_rows(path: Path, *, system: bool) -> Path:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(TURNS)]
    rows = [messages, [{"role": "system", "content": SYSTEM}, *messages]] if system else [messages]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def checked(words: list[str], dump: Path) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each row as `check` shows them."""
    assert main(["check", *words, "--dump", str(dump)]) == 0
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    return [(row["input_ids"], row["labels"]) for row in rows]


def trained(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each row as the engine gets them."""
    seen: list[tuple[list[int], list[int]]] = []
    start_step = InstructPipeline.start_step

    def watched(self: InstructPipeline, micro_batches: Any) -> Any:
        if not isinstance(self.source, RandomWeights):  # those are measured to say how long the run will take
            seen.extend((list(row.input_ids), list(row.labels)) for rows in micro_batches for row in rows)
        return start_step(self, micro_batches)

    with monkeypatch.context() as patch:
        patch.setattr(InstructPipeline, "start_step", watched)
        assert main(["train", *words, "--max-steps", "1", "--compute-dtype", "fp32", "--lora-rank", "2"]) == 0
    return seen


def chatted(monkeypatch: pytest.MonkeyPatch, model: Path, system: str | None) -> list[list[int]]:
    """The ids of each prompt of a chat in which the model gives the answers of the data."""
    tokenizer = Tokenizer.from_folder(model / "adapter")
    assert tokenizer is not None
    answers, prompts = iter(TURNS[1::2]), []

    def scripted(self: InstructPipeline, ids: list[int], config: object) -> Iterator[int]:
        prompts.append(list(ids))
        return iter(tokenizer.encode(next(answers)))

    with monkeypatch.context() as patch:
        patch.setattr(InstructPipeline, "stream", scripted)
        patch.setattr("sys.stdin", io.StringIO("".join(question + "\n" for question in TURNS[::2])))
        words = ["chat", "--model", str(model), "--compute-dtype", "fp32"]
        assert main([*words, "--system", system or ""]) == 0
    return prompts


def in_ollama(folder: Path, system: str | None) -> list[list[int]]:
    """The ids of each prompt as Ollama makes them: its TEMPLATE over the turns, encoded with control tokens, and BOS in
    front where the file says so."""
    commands = dict(go_template.modelfile_commands((folder / "Modelfile").read_text(encoding="utf-8")))
    model = folder / commands["FROM"]
    tokenizer, metadata = open_source(str(model)).tokenizer(), GgufFile(model).metadata
    assert tokenizer is not None and tokenizer.bos_id is not None
    prompts = []
    for count in range(1, len(TURNS), 2):
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(TURNS[:count])]
        head = [{"role": "system", "content": system}] if system else []
        text = go_template.render(commands["TEMPLATE"], [*head, *turns])
        ids = tokenizer.encode(text, parse_special=True)
        prompts.append([tokenizer.bos_id, *ids] if metadata["tokenizer.ggml.add_bos_token"] else ids)
    return prompts


@pytest.mark.parametrize("name", [*BUILT_INS, *FAMILIES])
def test_one_conversation_one_list_of_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """B1, B14, L7: with and without a system text, over two answers, on every path."""
    model = write_model(tmp_path / "model", FAMILIES.get(name))
    takes_system = name != "mistral-v3"
    rows = write_rows(tmp_path / "rows.jsonl", system=takes_system)
    words = ["--model", str(model), "--data", str(rows), "--template-date", "2001-02-03"]
    words += ["--chat-template", name] if name in BUILT_INS else []
    shown = checked(words, tmp_path / "dump.jsonl")
    seen = trained(monkeypatch, [*words, "--out", str(tmp_path / "run")])
    assert sorted(seen) == sorted(shown) and len(shown) == 1 + takes_system

    out, tokenizer = tmp_path / "ollama", Tokenizer.from_folder(tmp_path / "run" / "adapter")
    assert tokenizer is not None
    words = ["export", "--adapter", str(tmp_path / "run"), "--format", "ollama", "--type", "f16"]
    assert main([*words, "--out", str(out)]) == 0
    for (ids, labels), system in zip(shown, [None, SYSTEM], strict=False):
        prompts = chatted(monkeypatch, tmp_path / "run", system)
        assert len(prompts) == 2
        for prompt in prompts:
            assert ids[: len(prompt)] == prompt and labels[len(prompt) - 1] == IGNORE
            first = next(at for at in range(len(prompt), len(ids)) if labels[at] != IGNORE)
            assert tokenizer.decode(ids[len(prompt) : first]) in ("", EMPTY_THOUGHT if name == "qwen3" else "")
        assert in_ollama(out, system) == prompts
