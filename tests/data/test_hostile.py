"""Whatever a row holds: it becomes tokens, or it is skipped for a reason. Nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.toys import CHATML, THINKING, TOOLS, byte_level, chat, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quatrain.config import DataOptions
from quatrain.data.pipeline import examine
from quatrain.data.row import IGNORE, Row

TOKENIZERS = [byte_level(template=template, added=("<think>",)) for template in (CHATML, THINKING, TOOLS)]
SPICE = (
    "<|im_end|>",
    "<think>",
    "</think>",
    "Qslot0000000Z",
    "\ud83d",
    "\U00100000",
    "{{ x }}",
    "None",
    "null",
    "[",
    "{",
)
TEXT = st.text(max_size=4) | st.sampled_from(SPICE)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "gpt", "human", "narrator"]) | LEAF
KEYS = st.sampled_from(["type", "function", "name", "arguments", "text", "id", "<|im_end|>"])
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": JSON})}) | JSON
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLE, "from": ROLE, "content": TEXT | JSON, "value": TEXT, "weight": LEAF, "name": LEAF,
        "tool_calls": st.lists(CALL, max_size=2) | JSON, "reasoning_content": TEXT | JSON,
    },
)  # fmt: skip
GOOD = st.builds(chat, TEXT, TEXT, TEXT, TEXT)
CHAT = (
    GOOD
    | st.lists(TURN, max_size=4)
    | st.builds(lambda good, more: good + more, GOOD, st.lists(TURN, max_size=2))
    | JSON
)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "messages": CHAT, "conversations": CHAT, "tools": JSON, "system": JSON, "instruction": TEXT | JSON,
        "input": JSON, "output": TEXT | JSON, "response": JSON, "prompt": TEXT | JSON, "completion": TEXT | JSON,
    },
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROW | st.builds(lambda turns: {"messages": turns}, CHAT) | JSON, min_size=1, max_size=3),
    data=st.data(),
)
def test_every_row_is_accounted_for(tmp_path: Path, rows: list[Any], data: st.DataObject) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    options = DataOptions(format="jsonl", on_bad_row="skip", max_unsupervised=1, keep_empty=data.draw(st.booleans()))
    prepared = examine([path], options, tokenizer)
    report = prepared.report
    assert report.read == len(rows) == report.used + sum(report.skipped.values())
    for row in prepared.train:
        whole_row_is_sound(row, tokenizer.vocab_size)
    json.dumps(report.as_json(), ensure_ascii=False).encode("utf-8")


def whole_row_is_sound(row: Row, vocab_size: int) -> None:
    assert len(row.labels) == len(row.input_ids) and row.num_supervised > 0
    assert all(label in (IGNORE, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    assert min(row.input_ids) >= 0 and max(row.input_ids) < vocab_size


def test_deep_nesting_is_a_reason(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": [*chat("a"), {"role": "assistant", "tool_calls": [call]}]})
    report = examine([path], DataOptions(), byte_level(template=TOOLS)).report
    assert report.read == 1 == report.used + sum(report.skipped.values())
