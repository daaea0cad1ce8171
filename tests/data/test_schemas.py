"""Classes A10 to A21 of docs/cases.md: records to conversations."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from data.toys import CHATML, TOOLS, byte_level, chat, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.outcome import Record, RowError
from quatrain.data.pipeline import examine, prepare
from quatrain.data.records import Conversation, to_conversation
from quatrain.errors import DataError


def turns(values: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation(values, **options).messages]


def conversation(values: dict[str, Any], **options: Any) -> Conversation:
    return to_conversation(Record(values, "f:1"), DataOptions(**options))


def decoded(path: Path, **options: Any) -> list[str]:
    tokenizer = byte_level(template=TOOLS, added=("<tool_call>", "</tool_call>"))
    return [tokenizer.decode(row.input_ids) for row in prepare([path], DataOptions(**options), tokenizer).train]


def calling(arguments: Any, name: str = "clock", **turn: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **turn}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"instruction": "a", "response": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "output": "b", "system": "s"}, [("system", "s"), ("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "input": "x", "output": "b"}, [("user", "a\n\nx"), ("assistant", "b")]),
        ({"instruction": "a", "input": "", "output": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "input": None, "output": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": "a", "completion": " b"}, [("user", "a"), ("assistant", " b")]),
        ({"messages": chat("a", "b")}, [("user", "a"), ("assistant", "b")]),
        ({"messages": json.dumps(chat("a", "b"))}, [("user", "a"), ("assistant", "b")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
    ],
)
def test_schemas(values: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(values) == expected


def test_named_fields_and_a_default_system_text() -> None:
    named = {"prompt_field": "question", "response_field": "answer", "system": "s"}
    assert turns({"question": "q", "answer": "a"}, **named) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    own = {"question": "q", "answer": "a", "who": "w"}
    assert turns(own, **named, system_field="who")[0] == ("system", "w")
    with pytest.raises(RowError, match="did you mean 'question'"):
        turns({"question": "q", "answer": "a"}, prompt_field="questio", response_field="answer")


def test_gsm8k_reads_by_its_field_names(gsm8k: Path) -> None:
    options = DataOptions(prompt_field="question", response_field="answer")
    report = prepare([gsm8k], options, byte_level(), max_seq_len=4096).report
    assert (report.read, report.used, report.schemas) == (2000, 2000, {"prompt": 2000})


def function(name: str, **parameters: Any) -> dict[str, Any]:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def test_a10_absent_keys_stay_absent(tmp_path: Path) -> None:
    """A10: arguments and tool schemas of one row never get another row's keys, nor null for them; a null inside a list
    stays in its place. Parquet unites the fields of all rows; a null that it made is none of ours."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}, calling({"city": "Oslo"}), *chat("a", "b")]},
        {"messages": [{"role": "user", "content": "q"}, calling({"sku": "A-7", "qty": [2, None, 3]}), *chat("a", "b")]},
    ]
    rows[0]["tools"], rows[1]["tools"] = (
        [function("clock", city="string")],
        [function("stock", sku="string", qty="array")],
    )
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    as_text = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(as_text), tmp_path / "text.parquet")
    files = [
        write_jsonl(tmp_path / "rows.jsonl", *rows),
        write_jsonl(tmp_path / "text.jsonl", *as_text),
        tmp_path / "rows.parquet",
        tmp_path / "text.parquet",
    ]
    for file in files:
        first, second = decoded(file)
        assert '{"name": "clock", "arguments": {"city": "Oslo"}}' in first
        assert '"qty": [2, null, 3]' in second and '"sku": "A-7"' in second
        assert '"parameters": {"properties": {"city": {"type": "string"}}}' in first
        assert "null" not in first and "sku" not in first and "qty" not in first
        assert second.count("null") == 1 and "city" not in second


def test_a11_objects_as_answers(tmp_path: Path) -> None:
    """A11: an answer that is an object stops the run with the reason, the count and the option that serialises it."""
    answer = {"name": "Ada", "age": None, "tags": ["x"]}
    path = write_jsonl(tmp_path / "rows.jsonl", {"instruction": "Fill the card", "output": answer})
    with pytest.raises(DataError) as error:
        prepare([path], DataOptions(), byte_level())
    assert "1 of 1 rows cannot be used" in str(error.value)
    assert "output is an object, expected text; use --json-fields output to serialise it" in str(error.value)
    (row,) = prepare([path], DataOptions(json_fields=["output"]), byte_level()).train
    assert '{"name": "Ada", "age": null, "tags": ["x"]}' in byte_level().decode(row.input_ids)
    with pytest.raises(RowError, match=r"output is bytes, expected text$"):  # bytes have no JSON form
        conversation({"instruction": "i", "output": b"x"})


def test_a13_role_names(tmp_path: Path) -> None:
    """A13: from/value and role/content are one thing; an unknown role is named with its line and the accepted ones."""
    human = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
    user = {"conversations": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    first, second = prepare([write_jsonl(tmp_path / "rows.jsonl", human, user)], DataOptions(), byte_level()).train
    assert (first.input_ids, first.labels) == (second.input_ids, second.labels)
    path = write_jsonl(tmp_path / "bad.jsonl", user, {"conversations": [{"from": "narrator", "value": "x"}]})
    with pytest.raises(DataError, match=rf"{path}:2: .*'narrator'.*system, user, assistant, tool, human, gpt"):
        prepare([path], DataOptions(), byte_level())


def test_a14_tool_calls_in_both_spellings(tmp_path: Path) -> None:
    """A14: arguments as text and as an object, calls as a list and as text: the same render, learned, without None."""
    rest = [{"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "Noon."}]
    ask = {"role": "user", "content": "time?"}
    rows = [{"messages": [ask, calling(arguments), *rest]} for arguments in ('{"tz":"UTC"}', {"tz": "UTC"})]
    rows += [
        {"messages": [ask, calling({}, content="", tool_calls=json.dumps(calling({"tz": "UTC"})["tool_calls"])), *rest]}
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    first, *others = decoded(path)
    assert others == [first, first]
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "clock", "arguments": {"tz": "UTC"}}\n</tool_call><|im_end|>'
        in first
    )
    assert "None" not in first
    tokenizer = byte_level(template=TOOLS, added=("<tool_call>", "</tool_call>"))
    row = prepare([path], DataOptions(), tokenizer).train[0]
    learned = tokenizer.decode([label for label in row.labels if label >= 0])
    call = '<tool_call>\n{"name": "clock", "arguments": {"tz": "UTC"}}\n</tool_call><|im_end|>'
    assert learned == call + "Noon.<|im_end|>"
    assert tokenizer.token_id("<tool_call>") in row.labels


def test_a14_a_template_without_tools_refuses(tmp_path: Path) -> None:
    """A14: no tool branch in the template, or broken JSON in a call: refused with that reason."""
    path = write_jsonl(
        tmp_path / "rows.jsonl", {"messages": [{"role": "user", "content": "t?"}, calling({"tz": "UTC"})]}
    )
    with pytest.raises(DataError, match=r"no tool branch \(choose a chat_template that takes tools\)"):
        prepare([path], DataOptions(), byte_level(template=CHATML))
    told = {"messages": chat("t?", "12"), "tools": [{"type": "function", "function": {"name": "clock"}}]}
    with pytest.raises(DataError, match="leaves out the tools"):  # the answer would refer to what the model never reads
        prepare([write_jsonl(path, told)], DataOptions(), byte_level(template=CHATML))
    assert '"name": "clock"' in decoded(path)[0]
    broken = {"messages": [{"role": "user", "content": "t?"}, calling('{"tz":')]}
    with pytest.raises(DataError, match=r"messages\[1\]\.tool_calls\[0\]\.arguments: text that is not JSON"):
        prepare([write_jsonl(path, broken)], DataOptions(), byte_level(template=TOOLS))
    rows = [{"messages": [{"role": "user", "content": "t?"}] * turns + [calling("{")]} for turns in (1, 2, 3)]
    report = examine([write_jsonl(path, *rows)], DataOptions(), byte_level(template=TOOLS)).report
    assert report.skipped == {"messages[].tool_calls[].arguments is not JSON": 3}


def test_a15_empty_answers(tmp_path: Path) -> None:
    """A15: an empty answer is left out and counted (keep_empty trains the end token); null and a missing key have
    reasons of their own, and stop the run."""
    answers: list[dict[str, Any]] = [{"output": ""}, {"output": " "}, {"output": None}, {}, {"output": "ok"}]
    path = write_jsonl(tmp_path / "rows.jsonl", *({"instruction": "i", **answer} for answer in answers))
    prepared = examine([path], DataOptions(on_bad_row="skip"), byte_level())
    assert prepared.report.skipped == {"empty answer": 2, "output is null": 1, "no field response or output": 1}
    assert prepared.report.read == prepared.report.used + sum(prepared.report.skipped.values()) == 5
    with pytest.raises(DataError, match="2 of 5 rows cannot be used: 1 x output is null"):
        prepare([path], DataOptions(), byte_level())
    empty, blank, _ = prepare([path], DataOptions(on_bad_row="skip", keep_empty=True), byte_level()).train
    assert [byte_level().decode([x for x in row.labels if x >= 0]) for row in (empty, blank)] == [
        "<|im_end|>",
        " <|im_end|>",
    ]


def test_a17_lone_surrogates(tmp_path: Path) -> None:
    """A17: a pair is one character, a lone half becomes U+FFFD; what is shown and dumped about rows can be encoded."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"instruction":"smile","output":"ok \\ud83d end"}\n{"instruction":"smile","output":"\\ud83d\\ude00"}\n'
        '{"messages":[{"role":"user","content":"\\udc00"},{"role":"assistant","content":[{"type":"text","text":"\\ud83d"}]}]}\n'
    )
    lone, pair, parts = decoded(path)
    assert "ok \ufffd end" in lone and "\U0001f600" in pair and parts.count("\ufffd") == 2
    with open(path, "a") as file:
        file.write('{"instruction":"a","output":"b","\\ud83d":1}\n{"\\ud83d":"unknown"}\n')
        file.write('{"messages":[{"role":"user","content":[{"type":"\\ud83d"}]}]}\n')
    dump = io.StringIO()
    report = examine([path], DataOptions(), byte_level(), dump=dump).report
    assert report.notes == ["fields that were not read: \ufffd (1 rows)"] and len(report.skipped) == 2
    (json.dumps(report.as_json(), ensure_ascii=False) + dump.getvalue()).encode("utf-8")


def test_a18_no_normalisation(tmp_path: Path) -> None:
    """A18: emoji sequences and both spellings of an accented letter reach the tokenizer as written."""
    text = "❤️ 👩‍💻 \u00e9 e\u0301"
    (got,) = decoded(write_jsonl(tmp_path / "rows.jsonl", {"instruction": "i", "output": text}))
    assert f"assistant\n{text}<|im_end|>" in got


def test_a20_content_in_parts(tmp_path: Path) -> None:
    """A20: text parts join in order; a part that is no text is refused by name."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    assert turns({"messages": chat("Hi", parts)}) == turns({"messages": chat("Hi", "Hello there")})  # type: ignore[arg-type]
    with pytest.raises(RowError, match="'image_url' cannot be used"):
        turns({"messages": chat("Hi", [*parts, {"type": "image_url"}])})  # type: ignore[arg-type]


def test_a21_mixed_schemas(tmp_path: Path) -> None:
    """A21: each row by its own fields, in any order and format; an ambiguous row is named, an unknown key noted."""
    rows: list[dict[str, Any]] = [
        {"instruction": "a", "output": "b", "id": 7},
        {"messages": chat("x", "y")},
        {"prompt": "c", "completion": "d"},
        {"instruction": "e", "response": "f", "output": "g"},
    ]
    options = DataOptions(on_bad_row="skip")
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    prepared = prepare([path], options, byte_level())
    assert prepared.report.schemas == {"alpaca": 1, "messages": 1, "prompt": 1}
    assert prepared.report.notes == ["fields that were not read: id (1 rows)"]
    (place,) = prepared.report.skipped_at["ambiguous row"]
    assert place.startswith(f"{path}:4: the row fits instruction/response and instruction/output")
    turned = prepare([write_jsonl(tmp_path / "turned.jsonl", *reversed(rows))], options, byte_level())
    assert [row.input_ids for row in reversed(turned.train)] == [row.input_ids for row in prepared.train]
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    columns = {name: [row.get(name) for row in rows] for name in {name: None for row in rows for name in row}}
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
    table = prepare([tmp_path / "rows.parquet"], options, byte_level())
    assert [row.input_ids for row in table.train] == [row.input_ids for row in prepared.train]
    assert table.report.schemas == prepared.report.schemas and table.report.skipped == prepared.report.skipped


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"question": "q", "answer": "a"}, "question, answer fit no known schema"),
        ({}, "the row has no fields, want those of a known schema"),
        ({"instruction": "a"}, "has 'instruction' but no field response or output"),
        ({"instruction": " ", "output": "b"}, "instruction is empty"),
        ({"instruction": 3, "output": "b"}, "instruction is a number"),
        ({"messages": []}, "an empty list"),
        ({"messages": "hello"}, "not JSON"),
        ({"messages": ["hi"]}, r"messages\[0\]: want an object"),
        ({"messages": chat("only a question")}, "no assistant turn"),
        ({"messages": [{"role": "user"}, *chat("a", "b")]}, r"messages\[0\]: content is null or missing"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content is an object"),
        ({"messages": [*chat("a"), {"role": "assistant", "content": "b", "weight": 0.5}]}, "want 0 or 1"),
        ({"messages": chat("a", "b"), "tools": "{"}, "tools: text that is not JSON"),
    ],
)
def test_unusable_rows_say_why(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        turns(values)


def test_a_turn_of_weight_0_is_not_learned(tmp_path: Path) -> None:
    messages = chat("a", "first", "b", "second")
    messages[1]["weight"] = 0  # type: ignore[assignment]
    (row,) = prepare([write_jsonl(tmp_path / "rows.jsonl", {"messages": messages})], DataOptions(), byte_level()).train
    assert byte_level().decode([label for label in row.labels if label >= 0]) == "second<|im_end|>"
