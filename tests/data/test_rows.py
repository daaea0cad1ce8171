"""Rows in a flat file: what comes back is what was written, and a file that is not whole is never read."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data.toys import byte_level
from hypothesis import given
from hypothesis import strategies as st

from quatrain.config import DataOptions, TrainOptions
from quatrain.data.pipeline import prepare
from quatrain.data.row import IGNORE, Row
from quatrain.data.rows import Rows, RowStore, RowWriter, read_info
from quatrain.errors import DataError
from quatrain.train.batching import Batching

ROWS = [
    Row((5, 6, 7), (IGNORE, 6, 7), "a.jsonl:1"),
    Row((0,), (0,), "a.jsonl:9"),
    Row((2**31 - 1, 0), (IGNORE, IGNORE), "b: c.jsonl:2"),
    Row((1, 2), (1, 2), "sample"),
    Row((3,), (IGNORE,), "a.jsonl:3"),
]


def file_of(rows: list[Row], **info: object) -> bytes:
    file = io.BytesIO()
    writer = RowWriter(file)
    for row in rows:
        writer.append(row)
    writer.finish(info)
    return file.getvalue()


def test_rows_come_back_as_they_were() -> None:
    rows = Rows.of(ROWS)
    assert list(rows) == ROWS and rows[-1] == ROWS[-1] and list(rows[1:4:2]) == ROWS[1:4:2]
    assert rows.lengths.tolist() == [len(row) for row in ROWS]
    assert rows.supervised.tolist() == [row.num_supervised for row in ROWS]
    assert list(Rows.of([])) == [] and Rows.of([]).lengths.tolist() == []
    with pytest.raises(IndexError):
        rows[5]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1), max_size=20))
def test_any_ids_and_labels_come_back(drawn: list[list[tuple[int, bool]]]) -> None:
    rows = [
        Row(tuple(i for i, _ in row), tuple(i if learned else IGNORE for i, learned in row), f"f:{n}")
        for n, row in enumerate(drawn)
    ]
    assert list(Rows.of(rows)) == rows


def test_a_selection_is_a_view_in_its_own_order() -> None:
    rows = Rows.of(ROWS)
    chosen = rows.select(np.array([4, 0, 0, 2]))
    assert list(chosen) == [ROWS[4], ROWS[0], ROWS[0], ROWS[2]]
    assert chosen.lengths.tolist() == [1, 3, 3, 2] and chosen.supervised.tolist() == [0, 2, 2, 0]
    assert list(chosen.select(np.array([3, 1]))) == [ROWS[2], ROWS[0]]


def test_the_digest_is_about_tokens_and_order_alone() -> None:
    digest = Rows.of(ROWS).digest()
    assert digest == Rows.of([Row(row.input_ids, row.labels, "elsewhere:1") for row in ROWS]).digest()
    other = [*ROWS[:-1], Row((3,), (3,))]
    split_elsewhere = [Row((5, 6), (IGNORE, 6)), Row((7, 0), (7, 0)), *ROWS[2:]]
    rows = Rows.of(ROWS)
    found = {digest, Rows.of(other).digest(), Rows.of(split_elsewhere).digest(), rows.select(np.array([1, 0])).digest()}
    assert len(found) == 4


def test_a_label_that_is_another_token_is_refused() -> None:
    with pytest.raises(ValueError, match="neither its token nor"):
        file_of([Row((1, 2), (IGNORE, 3))])


def test_every_flipped_byte_and_every_cut_is_found() -> None:
    whole = file_of(ROWS, note="x")
    assert RowStore(whole).info == {"note": "x"}
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1
        for damaged in (bytes(broken), whole[:at], whole[at + 1 :]):
            with pytest.raises(DataError):
                RowStore(damaged)


def test_the_description_is_read_without_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.rows"
    path.write_bytes(file_of(ROWS, made="of this"))
    with path.open("rb") as file:
        assert read_info(file) == {"made": "of this"}
    for content in (b"", b"hello", bytes(200)):
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(DataError):
            read_info(file)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """Reading, splitting, counting steps, dealing out: three times the rows take little more for each: 120 bytes for
    what finds copies among them, and some more at the end."""
    peaks, sizes = [], []
    prepare([write_table(tmp_path / f"warm.{kind}", kind, 10)], DataOptions(), byte_level())
    for number in (1100, 3300):  # both beyond the block of rows that signatures are made for at a time
        path = write_table(tmp_path / f"{number}.{kind}", kind, number)
        tokenizer, options = byte_level(), DataOptions(val_split=0.1)
        tracemalloc.start()
        prepared = prepare([path], options, tokenizer)
        batching = Batching(prepared.train, TrainOptions(epochs=2, batch_size=2), 1, shares=prepared.shares)
        assert batching.length.total_steps == number * 9 // 10
        assert sum(len(step[0]) for step in batching.epoch(0)) == len(prepared.train) == number * 9 // 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(prepared.report.lengths.total)
    # In lists a token would take 16 bytes and more, so a row of 200 of them 3,200.
    assert sizes[1] - sizes[0] > 2200 * 200
    assert (peaks[1] - peaks[0]) / 2200 < 400, peaks


def write_table(path: Path, kind: str, number: int) -> Path:
    rows = ({"instruction": f"{i}", "output": "x" * 200} for i in range(number))
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        path.write_text("instruction,output\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(list(rows)), path, row_group_size=100)
    return path
