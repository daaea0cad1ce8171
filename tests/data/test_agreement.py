"""Tool calls, tool results, reasoning, parts and several turns: learned as they should be, and alike on every path.

A path is a file format, a cached or fresh start, a prompt of chat. What is learned is written out by hand.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data.toys import byte_level, chat, write_jsonl

from quatrain.cli.chat import prompt_maker
from quatrain.config import DataOptions
from quatrain.data.pipeline import prepare
from quatrain.data.row import Row
from quatrain.data.tokenizer import Tokenizer

# In the manner of reasoning models with tools: thoughts are shown behind the last question of the user only; a run of
# tool results is one turn of the user; tools are listed in the system turn.
REASONING_TOOLS = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\\n' + messages[0].content }}{% endif %}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% set thought = m.reasoning_content or '' %}
{%- set content = m.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and thought %}<think>
{{ thought }}
</think>

{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> Tokenizer:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    return byte_level(added=marks, template=REASONING_TOOLS)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"properties": {"tz": {"type": "string"}}}}}]
AGENT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Earlier?"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nYes."},
        {"role": "user", "content": [{"type": "text", "text": "Time in "}, {"type": "text", "text": "two zones?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "two calls",
         "tool_calls": [call("clock", {"tz": "UTC"}), call("clock", '{"tz": "CET", "at": [1, null]}')]},
        {"role": "tool", "content": "12:00"},
        {"role": "tool", "content": "13:00"},
        {"role": "assistant", "content": "<think>\ndone\n</think>\n\n12 and 13."},
    ],
    "tools": TOOLS,
}  # fmt: skip
LEARNED = [
    "Yes.<|im_end|>",
    '<think>\ntwo calls\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {"tz": "UTC"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {"tz": "CET", "at": [1, null]}}\n</tool_call><|im_end|>',
    "<think>\ndone\n</think>\n\n12 and 13.<|im_end|>",
]
ROWS = [AGENT, {"messages": chat("a", "b", "c", "<think>\nwhy\n</think>\n\nd")}, {"instruction": "i", "output": "o"}]


def learned(row: Row) -> list[str]:
    """The texts of each unbroken stretch of supervised tokens."""
    parts: list[list[int]] = [[]]
    for label in row.labels:
        parts[-1].append(label) if label >= 0 else parts.append([])
    return [tokenizer().decode(part) for part in parts if part]


def test_a14_b8_a20_c5_b18_an_agent_s_conversation(tmp_path: Path) -> None:
    """A14, B8, A20: calls, results, thoughts and parts are rendered once, and what the template shows of the answers is
    learned, with its end tokens. C5, B18: the options for turns and ends move exactly those."""
    path = write_jsonl(tmp_path / "rows.jsonl", AGENT)

    def found(**options: Any) -> list[str]:
        (row,) = prepare([path], DataOptions(**options), tokenizer(), max_seq_len=2048).train
        return learned(row)

    end = "<|im_end|>"
    bare = [text.removesuffix(end) for text in LEARNED]
    assert found() == LEARNED
    assert found(train_on_eos="none") == bare
    assert found(train_on_eos="last") == [*bare[:2], LEARNED[2]]
    assert found(last_turn_only=True) == found(last_turn_only=True, train_on_eos="last") == LEARNED[2:]
    assert found(last_turn_only=True, train_on_eos="none") == bare[2:]
    (row,) = prepare([path], DataOptions(), tokenizer(), max_seq_len=2048).train
    text = tokenizer().decode(row.input_ids)
    assert "old" not in text and "None" not in text and "Time in two zones?" in text
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00" in text


@pytest.mark.parametrize("kind", ["json", "jsonl.gz", "csv", "parquet", "cache", "folder"])
def test_a7_a10_every_path_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    """A7, A10: the same ids and labels from every format, with tools; from the cache and from a folder, too."""
    want = [(r.input_ids, r.labels) for r in rows_of(write_jsonl(tmp_path / "want.jsonl", *ROWS))]
    assert len(want) == 3
    folder = tmp_path / "folder"
    folder.mkdir()
    if kind in ("cache", "folder"):
        for number, row in enumerate(ROWS):
            write_jsonl(folder / f"{number}.jsonl", row)
        found = [rows_of(folder, tmp_path / "cache") for _ in range(2 if kind == "cache" else 1)][-1]
    else:
        found = rows_of(write(folder / f"rows.{kind}", kind))
    assert [(r.input_ids, r.labels) for r in found] == want


def rows_of(path: Path, cache: Path | None = None) -> list[Row]:
    return list(prepare([path], DataOptions(), tokenizer(), max_seq_len=2048, cache=cache).train)


def write(path: Path, kind: str) -> Path:
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    elif kind == "csv":  # a table of chats: what is no text is JSON text
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, ["messages", "tools"])
            rows.writeheader()
            last = {"messages": chat("i", "o")}
            for row in (*ROWS[:2], last):
                rows.writerow({name: json.dumps(value) for name, value in row.items()})
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        names = ("messages", "tools", "instruction", "output")
        parquet.write_table(arrow.Table.from_pylist([as_columns(row, names) for row in ROWS]), path)
    return path


def as_columns(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A column has one type: what differs from turn to turn is JSON text."""
    full = {name: row.get(name) for name in names}
    if full["messages"]:
        full["messages"] = json.dumps(full["messages"])
    return full


def test_b1_b8_a_prompt_of_chat_begins_its_row(tmp_path: Path) -> None:
    """B1, B8: in a chat, the prompt for the last answer is the row of training up to that answer, thoughts of earlier
    turns left out alike."""
    turns = chat("a", "<think>\nold\n</think>\n\nb", "c", "<think>\nnew\n</think>\n\nd", system="s")
    (row,) = rows_of(write_jsonl(tmp_path / "rows.jsonl", {"messages": turns}))
    prompt = prompt_maker(tokenizer(), {})(turns[:-1])
    assert tuple(prompt) == row.input_ids[: len(prompt)] and row.labels[len(prompt)] >= 0
    assert all(label < 0 for label in row.labels[len(prompt) - 5 : len(prompt)])
