"""Classes A6, B11, B17, C3 and C6 of docs/cases.md: length, truncation and what is left to learn."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from data.toys import byte_level, chat, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.pipeline import examine, prepare
from quatrain.data.row import IGNORE
from quatrain.errors import DataError

PLAIN = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
TOKENIZER = byte_level(("<s>", "</s>"), bos="<s>", eos="</s>", template="{{ bos_token }}" + PLAIN)


def rows_of(path: Path, *sizes: tuple[int, int]) -> Path:
    """Rows with a question and an answer of so many tokens each, and 2 more for BOS and EOS."""
    return write_jsonl(path, *({"prompt": "q" * question, "completion": "a" * answer} for question, answer in sizes))


def test_b11_a_cut_answer_is_learned_up_to_the_cut(tmp_path: Path) -> None:
    """B11: an answer of 12 tokens cut after 7: those 7 are learned, and no end token."""
    path = rows_of(tmp_path / "rows.jsonl", (4, 12))
    (row,) = prepare([path], DataOptions(truncation="truncate"), TOKENIZER, max_seq_len=1 + 4 + 7).train
    assert row.labels == (IGNORE,) * 5 + tuple(TOKENIZER.encode("a" * 7))
    report = prepare([path], DataOptions(truncation="truncate"), TOKENIZER, max_seq_len=18).report
    assert (report.truncated, report.used) == (0, 1)


def test_c6_the_default_drops_and_cutting_keeps_bos_and_headers(tmp_path: Path) -> None:
    """C6: a row that is too long is dropped; cutting takes from its end, so what stays begins a render."""
    messages = chat("q" * 10, "a" * 5, system="s" * 40)
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": messages}, {"messages": chat("q", "a")})
    dropped = prepare([path], DataOptions(), byte_level(), max_seq_len=80)
    assert prepare([path], DataOptions(), byte_level(), max_seq_len=32).report.skipped == dropped.report.skipped
    beyond = prepare([path], DataOptions(truncation="truncate"), byte_level(), max_seq_len=32).report
    assert beyond.skipped == {"no supervised token left after truncation": 1} and beyond.used == 1
    assert dropped.report.skipped == {"longer than max_seq_len": 1} and len(dropped.train) == 1
    cut = prepare([path], DataOptions(truncation="truncate"), byte_level(), max_seq_len=84)
    whole = prepare([path], DataOptions(), byte_level(), max_seq_len=512)
    assert cut.report.truncated == 1
    assert cut.train[0].input_ids == whole.train[0].input_ids[:84] and len(whole.train[0]) == 86
    assert cut.train[0].labels == whole.train[0].labels[:84]


def test_c3_rows_without_supervised_tokens_stop_the_run(tmp_path: Path) -> None:
    """C3: rows whose answer lies beyond the limit are counted before step 1; too many of them stop the run."""
    lost, kept = (100, 1), (2, 2)
    few = rows_of(tmp_path / "few.jsonl", *[lost] * 3, *[kept] * 7)
    for truncation, reason in (
        ("drop", "longer than max_seq_len"),
        ("truncate", "no supervised token left after truncation"),
    ):
        options = DataOptions(truncation=truncation)  # type: ignore[arg-type]
        prepared = prepare([few], options, TOKENIZER, max_seq_len=32)
        assert prepared.report.skipped == {reason: 3} and prepared.report.used == 7
        many = rows_of(tmp_path / "many.jsonl", *[lost] * 6, *[kept] * 4)
        with pytest.raises(DataError, match="60% of the rows have no supervised token left: 6 of 10"):
            prepare([many], options, TOKENIZER, max_seq_len=32)
        forced = options.model_copy(update={"max_unsupervised": 1.0})
        assert prepare([many], forced, TOKENIZER, max_seq_len=32).report.used == 4
        none = rows_of(tmp_path / "none.jsonl", lost)
        with pytest.raises(DataError, match=r"none\.jsonl: no row is left: read 1; skipped: 1 x"):
            prepare([none], forced, TOKENIZER, max_seq_len=32)


def test_a6_one_very_long_row(tmp_path: Path) -> None:
    """A6: a line of 30 MB is read, then dropped or cut by its tokens; memory stays near the size of that row."""
    path = rows_of(tmp_path / "rows.jsonl", (2, 2), (2, 30_000_000), (3, 3))
    for truncation, used in (("drop", 2), ("truncate", 3)):
        options = DataOptions(truncation=truncation)  # type: ignore[arg-type]
        tracemalloc.start()
        prepared = examine([path], options, TOKENIZER, max_seq_len=64)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert prepared.problem is None and prepared.report.used == used
        assert peak < 6 * 30_000_000  # the line, its text, its parsed value: a few times the row, not its tokens
    assert len(prepared.train[1]) == 64 and prepared.report.truncated == 1


def test_b17_ids_outside_the_embedding_table(tmp_path: Path) -> None:
    """B17: an id beyond the embedding is a named error; a pad token beyond it is never used, so it does no harm."""
    path = rows_of(tmp_path / "rows.jsonl", (2, 2))
    assert TOKENIZER.vocab_size == 258
    prepare([path], DataOptions(), TOKENIZER, vocab_rows=258)
    padded = byte_level(("<s>", "</s>", "[PAD]"), bos="<s>", eos="</s>", template="{{ bos_token }}" + PLAIN)
    assert padded.token_id("[PAD]") == 258 and prepare([path], DataOptions(), padded, vocab_rows=258).report.used == 1
    with pytest.raises(DataError, match=r"token 257 \('</s>'\) is outside the model's 257 embedding rows"):
        prepare([path], DataOptions(), TOKENIZER, vocab_rows=257)


def test_a_row_with_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "b", "weight": 0}
    path = write_jsonl(tmp_path / "rows.jsonl", {"messages": [*chat("a"), turn]})
    with pytest.raises(DataError, match="no supervised token"):
        prepare([path], DataOptions(), TOKENIZER)
