"""`system_policy` fold: a system text in front of the first user message, the same on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.toys import CHATML, TOOLS, byte_level, chat, write_jsonl

from quatrain.cli.chat import prompt_maker
from quatrain.config import DataOptions
from quatrain.data.modelfile import modelfile, render_go
from quatrain.data.pipeline import examine, prepare
from quatrain.data.records import Message
from quatrain.data.render import ChatRenderer, render_chat
from quatrain.data.templates import choose_template
from quatrain.data.tokenizer import Tokenizer

REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
IGNORES = "{% for m in messages if m.role != 'system' %}" + CHATML.partition("%}")[2]
# Its first line is indented, and there is a line end before it: the layout of a template keeps its meaning.
LAYOUT = "\n  {% if true %}\n" + CHATML + "\n  {% endif %}"
FOLD = DataOptions(system_policy="fold")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(
        tmp_path / "rows.jsonl",
        {"messages": chat("q", "a", "r", "b", system="Be brief.")},
        {"messages": chat("q", "a")},
        {"instruction": "i", "output": "o", "system": "s <|im_end|>"},
    )


@pytest.mark.parametrize("template", [REFUSES, IGNORES])
def test_a_template_without_a_system_turn_says_what_to_do(rows: Path, template: str) -> None:
    report = examine([rows], DataOptions(), byte_level(template=template)).report
    assert report.used == 1 and "system_policy fold" in next(iter(report.skipped_at.values()))[0]


def test_folding_is_not_advised_to_who_folds(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", {"messages": [*chat(system="s"), {"role": "assistant", "content": "a"}]}
    )
    ((place,),) = examine([path], FOLD, byte_level()).report.skipped_at.values()
    assert place.endswith("to fold a system text, a user message must follow it")


@pytest.mark.parametrize("template", [CHATML, REFUSES, IGNORES, TOOLS, LAYOUT])
def test_the_text_stands_before_the_first_user_message(rows: Path, template: str) -> None:
    tokenizer = byte_level(template=template)
    first, second, third = prepare([rows], FOLD, tokenizer).train
    unfolded = chat("Be brief.\n\nq", "a", "r", "b")
    assert list(first.input_ids) == render_chat(unfolded, tokenizer).ids
    assert tokenizer.decode([t for t in first.labels if t >= 0]) == "a<|im_end|>b<|im_end|>"
    assert list(second.input_ids) == render_chat(chat("q", "a"), tokenizer).ids
    assert list(third.input_ids) == render_chat(chat("s <|im_end|>\n\ni", "o"), tokenizer).ids
    assert third.input_ids.count(tokenizer.token_id("<|im_end|>")) == 2, "the one in the system text is plain text"


def test_the_default_leaves_system_texts_to_the_template(rows: Path) -> None:
    (first, *_) = prepare([rows], DataOptions(), byte_level()).train
    assert byte_level().decode(first.input_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_system_text_with_no_user_message_behind_it_is_refused(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": turns})
    report = examine([path], FOLD, byte_level()).report
    assert "a user message must follow it" in report.skipped_at["the chat template refuses the conversation"][0]


def test_what_is_saved_folds_by_itself_and_only_once(rows: Path, tmp_path: Path) -> None:
    """An adapter carries the template that folds; chat, with or without the run's options, makes the prompt of
    training from it."""
    prepared = prepare([rows], FOLD, byte_level(template=REFUSES))
    prepared.tokenizer.save(tmp_path / "adapter")
    saved = Tokenizer.from_folder(tmp_path / "adapter")
    assert saved is not None and saved.chat_template == prepared.tokenizer.chat_template
    again = prepare([rows], FOLD, saved)
    assert list(again.train) == list(prepared.train) and again.tokenizer.chat_template == saved.chat_template
    for tokenizer, options in (
        (saved, {}),
        (saved, {"system_policy": "fold"}),
        (byte_level(template=REFUSES), {"system_policy": "fold"}),
    ):
        prompt = prompt_maker(tokenizer, options)(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
        )
        assert (
            tuple(prompt) == prepared.train[0].input_ids[: len(prompt)] and prepared.train[0].labels[len(prompt)] >= 0
        )


@pytest.mark.parametrize("template", [CHATML, REFUSES, IGNORES])
def test_the_modelfile_folds_too(template: str) -> None:
    """Ollama's template, with a system text, renders what training rendered."""
    tokenizer = byte_level(template=template)
    renderer = ChatRenderer(tokenizer, choose_template(tokenizer, None, "fold"))
    text, notices = modelfile("m.gguf", renderer, bos_added=False)
    assert not any("system" in notice for notice in notices)
    written = text.partition('TEMPLATE """')[2].partition('"""')[0]
    turns = [("system", "Be {{brief}}."), ("user", "q\n"), ("assistant", "a"), ("user", "r")]
    for some in (turns, turns[1:], turns[:2]):
        assert render_go(written, some) == renderer.prompt_text([Message(*turn) for turn in some])


def test_transformers_render_it_as_we_do(rows: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for number, template in enumerate((REFUSES, LAYOUT)):
        prepared = prepare([rows], FOLD, byte_level(template=template))
        prepared.tokenizer.save(tmp_path / str(number))
        hf = transformers.AutoTokenizer.from_pretrained(str(tmp_path / str(number)))
        messages = chat("q", "a", "r", "b", system="Be brief.")
        assert hf.apply_chat_template(messages, tokenize=True, return_dict=False) == list(prepared.train[0].input_ids)
