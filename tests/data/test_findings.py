"""What `quatrain check` finds in rows: each kind on rows made for it, and none on good rows."""

from __future__ import annotations

import random
import time
import typing
from pathlib import Path
from typing import Any

import pytest
from data.toys import CHATML, byte_level, chat, write_jsonl

from quatrain.config import DataOptions, Fault
from quatrain.data.duplicates import Fingerprints, within
from quatrain.data.findings import KINDS, Finding, excerpt
from quatrain.data.pipeline import examine, prepare
from quatrain.data.row import IGNORE, Row
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import DataError


def good(i: int) -> dict[str, str]:
    """Row i of a set without fault: all answers differ, are complete and say little in common."""
    dice = random.Random(i)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(3, 8))) for _ in range(28)]
    return {"prompt": f"What about {i}: {' '.join(words[:8])}?", "completion": f"It is {' '.join(words[8:])}: {i}."}


def found_in(path: Path, rows: list[Any], tokenizer: Tokenizer | None = None, **options: Any) -> dict[str, Finding]:
    write_jsonl(path / "rows.jsonl", *rows)
    options = {"on_bad_row": "skip", **options}
    report = examine([path / "rows.jsonl"], DataOptions(**options), tokenizer or byte_level(), max_seq_len=4096).report
    return {found.kind: found for found in report.findings}


def lines(found: Finding) -> list[int]:
    return [int(place.split("rows.jsonl:")[1].split(":")[0]) for place in found.places]


def test_nothing_is_found_in_good_rows(tmp_path: Path) -> None:
    assert found_in(tmp_path, [good(i) for i in range(200)]) == {}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("boilerplate", {"completion": "As an AI language model, I have no opinion on that."}),
        ("boilerplate", {"completion": "I'm sorry, but I can't help with that request."}),
        ("placeholder", {"completion": "Dear [Your Name], lorem ipsum."}),
        ("placeholder", {"completion": "The price is {{ price }} a piece."}),
        ("null-answer", {"completion": "N/A"}),
        ("role-text", {"completion": "It is so.\nUser: And then?\nAssistant: Then it ends."}),
        ("role-text", {"prompt": "USER: Why so?\nASSISTANT:"}),
        ("template-text", {"prompt": "Explain <|im_end|><|im_start|>assistant please"}),
        ("template-text", {"prompt": "### Instruction:\nSay it\n\n### Response:"}),
        ("template-twice", {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}),
        ("template-twice", {"completion": "It is so.<|im_end|>"}),
        ("template-twice", {"prompt": "[INST] Say it [/INST]"}),
        ("cut-answer", {"completion": good(3)["completion"] + " It goes on for a while and then it sto"}),
        ("unbalanced", {"completion": 'He said "so it is.'}),
        ("unbalanced", {"completion": "```python\nprint(1)\n"}),
        ("replacement-character", {"completion": "caf\ufffd."}),
        ("mojibake", {"completion": "caf\u00c3\u00a9, isnâ€™t it."}),
        ("control-character", {"prompt": "a\x07b"}),
        ("invisible-character", {"prompt": "a\u200bb \u202eab"}),
        ("long-rows", {"prompt": "long " * 700}),
        ("short-answers", {"completion": "y."}),
    ],
)
def test_a_row_that_is_unlike_the_others(tmp_path: Path, kind: str, change: dict[str, str]) -> None:
    rows = [good(i) for i in range(60)]
    rows[41] |= change
    found = found_in(tmp_path, rows)
    assert set(found) - {"short-answers"} == {kind} - {"short-answers"}, found
    assert (found[kind].count, lines(found[kind])) == (1, [42])
    assert found[kind].text.startswith(f"1 of 60 rows (1.7%) {KINDS[kind].says}")


@pytest.mark.parametrize(
    "text",
    [
        "Both Ångström and Ãlvaro are names.",
        "👩‍💻 ❤️ and نمی‌خواهم need joiners.",
        "Use `user: root` in the file, and x < y > z.",
        "<think>So it is.</think>It is.",
        "NÃO, À SÃO PAULO.",
        "The list a[0] and {b: 1} are closed.",
        "AI can be helpful; I cannot say more.",
    ],
)
def test_odd_but_right_texts_are_left_alone(tmp_path: Path, text: str) -> None:
    rows = [good(i) for i in range(60)]
    rows[3] |= {"prompt": text, "completion": text}
    assert set(found_in(tmp_path, rows)) <= {"short-answers"}


def test_places_are_the_first_five(tmp_path: Path) -> None:
    rows = [good(i) | ({"completion": f"caf\ufffd {i}."} if i % 4 == 3 else {}) for i in range(40)]
    found = found_in(tmp_path, rows)["replacement-character"]
    assert (found.count, found.severity, lines(found)) == (10, "warning", [4, 8, 12, 16, 20])


def test_copies_near_copies_and_contradictions(tmp_path: Path) -> None:
    """A copy is equal; a near copy differs in case, spaces and a word in a long text; a contradiction has the prompt of
    another row."""
    long = "One {} thing after another happens in this long text, so that most of its words are its own."
    rows = [good(i) for i in range(100)]
    rows[10] = {"prompt": long.format("small"), "completion": "It is long."}
    rows[20] = {"prompt": long.format("Small").upper().replace(" ", "  "), "completion": "it is LONG!"}
    rows[30] = rows[5]
    rows[40] = rows[6] | {"completion": "No, it is another answer entirely."}
    found = found_in(tmp_path, rows)
    assert {kind: lines(it) for kind, it in found.items() if kind != "short-answers"} == {
        "duplicates": [31], "near-duplicates": [21], "same-prompt": [41],
    }  # fmt: skip
    assert found["near-duplicates"].places[0].endswith("rows.jsonl:21: see " + str(tmp_path / "rows.jsonl:11"))
    assert [found[kind].severity for kind in ("duplicates", "near-duplicates", "same-prompt")] == [
        "warning", "note", "note",
    ]  # fmt: skip


def test_shared_instructions_are_no_near_copies(tmp_path: Path) -> None:
    """Rows that are mostly one long instruction, in the system text or in the prompt, are not taken for copies."""
    dice = random.Random("instruction")
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(580)]
    system, task = " ".join(words[:290]), " ".join(words[290:])
    rows = [row | {"system": system, "prompt": f"{task} {row['prompt']}"} for row in map(good, range(100))]
    assert found_in(tmp_path, rows) == {}


def test_near_copies_are_found_as_estimated() -> None:
    """Of pairs of rows with a known share of common runs, those well above 0.85 are found and those well below are
    not."""
    tokenizer = byte_level()
    letters = [index for token, index in tokenizer.vocabulary.items() if len(token) == 1 and token.isalpha()]

    def row(seed: int, changed: int) -> Row:
        ids = [letters[(seed * 7919 + i * i * (seed + 3)) % len(letters)] for i in range(400)]
        for i in range(changed):
            ids[i * 23 + 3] = letters[(ids[i * 23 + 3] * 5 + 1) % len(letters)]
        return Row(tuple(ids), (IGNORE, *ids[1:]), f"f:{seed}")

    for changed, least, most in ((1, 90, 100), (3, 55, 100), (16, 0, 5)):  # shares of about 0.97, 0.93, 0.66
        rows = [row(seed, part) for part in (0, changed) for seed in range(100)]
        found = {it.kind: it.count for it in within(Fingerprints(tokenizer).extend(rows))}
        assert least <= found.get("near-duplicates", 0) <= most, (changed, found)


def test_validation_that_is_trained_on(tmp_path: Path) -> None:
    rows = [good(i) for i in range(60)]
    near = {"prompt": rows[9]["prompt"].upper(), "completion": rows[9]["completion"].upper()}
    write_jsonl(tmp_path / "held.jsonl", good(98), rows[7], rows[8] | {"completion": "Something else."}, near)
    write_jsonl(tmp_path / "rows.jsonl", *rows)
    options = DataOptions(validation=str(tmp_path / "held.jsonl"))
    report = examine([tmp_path / "rows.jsonl"], options, byte_level(), max_seq_len=999, near=True).report
    assert {found.kind: (found.count, found.severity, found.places[0]) for found in report.findings} == {
        "overlap": (1, "warning", f"{tmp_path}/held.jsonl:2: see {tmp_path}/rows.jsonl:8"),
        "prompt-overlap": (1, "warning", f"{tmp_path}/held.jsonl:3: see {tmp_path}/rows.jsonl:9"),
        "near-overlap": (1, "note", f"{tmp_path}/held.jsonl:4: see {tmp_path}/rows.jsonl:10"),
    }
    doubled = write_jsonl(tmp_path / "doubled.jsonl", *rows, *rows)
    kinds = [
        f.kind for f in examine([doubled], DataOptions(val_split=0.5), byte_level(), max_seq_len=999).report.findings
    ]
    assert "overlap" in kinds and "duplicates" in kinds


def test_cached_rows_have_the_same_findings(tmp_path: Path) -> None:
    rows = [good(i) for i in range(30)]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows, rows[3], good(4) | {"completion": "caf\ufffd."})
    options = DataOptions(val_split=0.5, truncation="truncate")
    first, second = (
        examine([path], options, byte_level(), max_seq_len=250, cache=tmp_path / "cache").report for _ in range(2)
    )
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert {"duplicates", "replacement-character"} <= {found.kind for found in first.findings}
    assert first == second and len(first.would_fit) > 1


def test_one_answer_for_all(tmp_path: Path) -> None:
    for answers, severity in ((["blue."], "warning"), (["blue.", "red.", "green."], "note")):
        rows = [good(i) | {"completion": answers[i % len(answers)]} for i in range(60)]
        found = found_in(tmp_path, rows)["identical-answers"]
        assert (found.severity, found.count) == (severity, 60 // len(answers))


def test_answers_cut_at_one_length(tmp_path: Path) -> None:
    rows = [good(i) for i in range(60)]
    for i in range(10, 16):
        rows[i]["completion"] = (rows[i]["completion"] * 9)[:299] + "."
    found = found_in(tmp_path, rows)
    assert found["same-length"].count == 6 and found["same-length"].text.endswith("in characters: 300")


def test_json_answers_that_do_not_parse(tmp_path: Path) -> None:
    rows = [good(i) | {"completion": f'{{"value": {i}, "unit": "k"}}'} for i in range(60)]
    assert found_in(tmp_path, rows) == {}
    rows[50]["completion"] = '{"value": 50, "unit": "k"'
    found = found_in(tmp_path, rows)
    assert lines(found["not-json"]) == [51] and found["not-json"].severity == "warning"
    assert "not-json" not in found_in(tmp_path, [good(i) for i in range(60)] + rows[50:51])


def test_b1_two_bos_are_an_error(tmp_path: Path) -> None:
    """B1: a template that writes BOS twice is refused before training, unless it is allowed by name."""
    twice = byte_level(("<s>", "<|im_start|>", "<|im_end|>"), bos="<s>", template="<s><s>" + CHATML)
    found = found_in(tmp_path, [good(i) for i in range(3)], twice)
    assert (found["two-bos"].severity, found["two-bos"].count) == ("error", 3)
    with pytest.raises(DataError, match=r"two-bos: 3 of 3 rows \(100%\) begin with two BOS tokens") as caught:
        prepare([tmp_path / "rows.jsonl"], DataOptions(), twice, max_seq_len=999)
    assert "rows.jsonl:1" in str(caught.value) and "--allow two-bos" in str(caught.value.hint)
    assert len(prepare([tmp_path / "rows.jsonl"], DataOptions(allow=["two-bos"]), twice, max_seq_len=999).train) == 3
    once = byte_level(("<s>", "<|im_start|>", "<|im_end|>"), bos="<s>", template="<s>" + CHATML)
    report = prepare([tmp_path / "rows.jsonl"], DataOptions(), once, max_seq_len=999).report
    assert report.findings == [] and report.token_counts["begin with one BOS"] == 3


def test_b2_no_bos_where_the_tokenizer_puts_one_is_noted(tmp_path: Path) -> None:
    """B2: no BOS at all is said, since plain text gets one from this tokenizer."""
    special = ("<s>", "<|im_start|>", "<|im_end|>")
    tokenizer = byte_level(special, bos="<s>", template=CHATML, adds_bos=True)
    found = found_in(tmp_path, [good(i) for i in range(3)], tokenizer)
    assert found["no-bos"].count == 3 and found["no-bos"].severity == "note"


def test_b3_rows_without_an_end_token_are_counted(tmp_path: Path) -> None:
    """B3: answers that lose their end token, by option or by a cut, are counted."""
    rows = [good(i) for i in range(10)]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    report = examine([path], DataOptions(train_on_eos="none"), byte_level(), max_seq_len=999).report
    assert report.token_counts["learn no end token last"] == 10
    assert [(f.kind, f.severity) for f in report.findings] == [("no-end-token", "warning")]
    cut = examine([path], DataOptions(truncation="truncate"), byte_level(), max_seq_len=200).report
    assert {f.kind: f.count for f in cut.findings}["no-end-token"] == cut.truncated == 10


def test_b7_a_set_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    """B7: rows whose labels are all masked are an error, not a run that learns nothing."""
    masked = {"messages": [*chat("a"), {"role": "assistant", "content": "b", "weight": 0}]}
    path = write_jsonl(tmp_path / "rows.jsonl", *[masked] * 4)
    prepared = examine([path], DataOptions(on_bad_row="skip"), byte_level())
    assert prepared.problem is not None and "no row is left" in str(prepared.problem)
    assert prepared.report.skipped == {"no supervised token": 4}


def test_b16_texts_about_templates_do_not_stop_a_run(tmp_path: Path) -> None:
    """B16: what a user types about control tokens is a note; texts that begin or end with them in most rows were
    rendered before, and stop the run."""
    about = [good(i) | {"prompt": f"What does <|im_end|> mean in row {i}?"} for i in range(20)]
    assert {f.severity for f in found_in(tmp_path, about).values()} == {"warning"}
    rendered = [
        {"prompt": f"<|im_start|>user\n{row['prompt']}<|im_end|>\n", "completion": row["completion"]}
        for row in map(good, range(20))
    ]
    assert found_in(tmp_path, rendered)["template-twice"].severity == "error"
    with pytest.raises(DataError, match=r"template-twice: 20 of 20 rows"):
        prepare([tmp_path / "rows.jsonl"], DataOptions(), byte_level(), max_seq_len=999)
    assert found_in(tmp_path, rendered[:3] + [good(i) for i in range(9)])["template-twice"].severity == "warning"
    assert found_in(tmp_path, rendered, allow_special=True) == {}  # as asked for


def test_rendered_texts_may_go_to_a_format_without_marks(tmp_path: Path) -> None:
    """With the plain format, texts with the marks of some template are a way to work: nothing is refused."""
    rendered = [good(i) | {"prompt": f"[INST] Say {i} [/INST]"} for i in range(20)]
    plain = byte_level(("</s>",), eos="</s>", template=None)
    assert {f.kind: f.severity for f in found_in(tmp_path, rendered, plain).values()} == {"template-text": "warning"}
    ended = [row | {"completion": row["completion"] + "</s>"} for row in rendered]
    assert found_in(tmp_path, ended, plain)["template-twice"].severity == "error"


def test_a15_empty_answers_that_are_kept_are_noted(tmp_path: Path) -> None:
    """A15: with keep_empty the rows that train the end token alone are counted."""
    rows = [good(0), good(1), good(2) | {"completion": " "}]
    assert lines(found_in(tmp_path, rows, keep_empty=True)["empty-answer"]) == [3]


def test_a17_lone_surrogates_are_noted_as_replaced(tmp_path: Path) -> None:
    """A17: a lone surrogate became U+FFFD, and that is said."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "smile", "output": "ok \\ud83d end"}\n')
    (found,) = examine([path], DataOptions(), byte_level()).report.findings
    assert found.kind == "replacement-character" and found.places == [f"{path}:1: ok \ufffd end"]


def test_lengths_beyond_the_limit(tmp_path: Path) -> None:
    """C3, C6: what a larger max_seq_len would keep is said."""
    path = write_jsonl(tmp_path / "rows.jsonl", *({"prompt": "q" * n, "completion": "a"} for n in (5, 50, 90, 200)))
    for truncation in ("drop", "truncate"):
        options = DataOptions(truncation=truncation, max_unsupervised=1.0)  # type: ignore[arg-type]
        report = examine([path], options, byte_level(), max_seq_len=100).report
        assert report.would_fit == {100: 2, 200: 3, 400: 4}
    assert report.histogram is not None and sum(report.histogram.rows) == sum(report.histogram.supervised) == 2


def test_the_findings_that_stop_a_run_are_those_that_can_be_allowed() -> None:
    assert {kind for kind, rules in KINDS.items() if rules.error_from <= 1} == set(typing.get_args(Fault))


def test_excerpts_show_what_cannot_be_seen() -> None:
    assert excerpt("a\x1b[2J\u202eb\nc") == "a\\u001b[2J\\u202eb\\nc"
    assert excerpt("x" * 200 + "HERE" + "y" * 200, 200, 204) == "…" + "x" * 28 + "HERE" + "y" * 28 + "…"
    assert len(excerpt("z" * 500)) <= 121


def test_a_row_costs_little_time_and_memory() -> None:
    tokenizer = byte_level()
    rows = [Row(tuple((i * k) % 250 for k in range(1, 101)), (IGNORE,) * 50 + (1,) * 50, f"f:{i}") for i in range(3000)]
    began = time.process_time()
    prints = Fingerprints(tokenizer).extend(rows)
    within(prints)
    assert time.process_time() - began < 3  # it takes about 0.3 s
    assert sum(part.nbytes for part in prints._signatures) + 8 * len(prints._hashes) <= 100 * len(rows)
