"""Classes D4, N2 and Q5 of docs/cases.md: split, order and packs."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from data.toys import byte_level, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from quatrain.config import DataOptions
from quatrain.data.order import Share, epoch_order, generator, split
from quatrain.data.pack import pack
from quatrain.data.pipeline import examine, prepare
from quatrain.errors import DataError


def packs(lengths: list[int], capacity: int) -> list[list[int]]:
    bounds = pack(np.array(lengths), capacity)
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    return [lengths[a:b] for a, b in pairwise(bounds)]


def test_d4_packs() -> None:
    """D4: ten rows of 100 tokens make five packs of 256."""
    assert packs([100] * 10, 256) == [[100, 100]] * 5
    assert len(packs([128] * 4, 256)) == 2  # a pack may be full to the last token


@given(st.lists(st.integers(2, 50)), st.integers(50, 120))
def test_d4_no_row_is_lost_split_or_moved(lengths: list[int], capacity: int) -> None:
    """D4: whatever the lengths, every row is in one pack, whole and in order; no pack has room for the next row."""
    found = packs(lengths, capacity)
    assert [length for part in found for length in part] == lengths
    assert all(0 < sum(part) <= capacity for part in found)
    assert all(sum(part) + following[0] > capacity for part, following in pairwise(found))


def test_a_row_longer_than_a_pack_is_alone() -> None:
    assert packs([4, 11, 4, 4], 10) == [[4], [11], [4, 4]]


def order(n: int, seed: int, epoch: int) -> list[int]:
    return epoch_order([Share(n)], seed, epoch).tolist()


def test_n2_the_order_is_a_function_of_seed_and_epoch() -> None:
    """N2: another process has the same order; global generators neither move it nor are they moved."""
    orders = [order(50, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(places) == list(range(50)) for places in orders)
    random.seed(7)
    np.random.seed(7)
    before = (random.getstate()[1], np.random.get_state()[1].tolist())
    assert order(50, 1, 0) == orders[0]
    assert (random.getstate()[1], np.random.get_state()[1].tolist()) == before  # global generators are left alone
    code = "from quatrain.data.order import Share, epoch_order; print(epoch_order([Share(50)], 1, 0).tolist())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == f"{orders[0]}\n"


def test_n2_the_streams_are_pinned() -> None:
    """N2: split and order have generators of their own."""
    # A change here breaks the promise that an older run can be resumed.
    assert order(8, seed=42, epoch=0) == [3, 4, 1, 6, 2, 5, 7, 0]
    assert generator(1, "split").integers(1 << 30) != generator(1, "order").integers(1 << 30)


def test_the_split_is_a_partition_that_keeps_the_order() -> None:
    train, held = (places.tolist() for places in split(100, 0.2, seed=3))
    assert sorted(train + held) == list(range(100)) and len(held) == 20
    assert train == sorted(train) and held == sorted(held)
    assert split(100, 0.2, seed=3)[1].tolist() == held != split(100, 0.2, seed=4)[1].tolist()


def test_q5_a_split_of_less_than_one_row(tmp_path: Path) -> None:
    """Q5: one row at least is held out, and that is said; a split that leaves nothing to train on is refused."""
    rows = [{"instruction": f"i{i}", "output": "o"} for i in range(20)]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    prepared = prepare([path], DataOptions(val_split=0.01), byte_level())
    assert (len(prepared.train), len(prepared.validation)) == (19, 1)
    assert prepared.report.notes == ["val_split 0.01 of 20 rows is less than one; 1 is held out"]
    one = write_jsonl(tmp_path / "one.jsonl", rows[0])
    with pytest.raises(DataError, match="leaves nothing to train on"):
        prepare([one], DataOptions(val_split=0.5), byte_level())


def test_q5_a_validation_file_of_no_use(tmp_path: Path) -> None:
    """Q5: a validation file without a usable row is refused."""
    path = write_jsonl(tmp_path / "rows.jsonl", {"instruction": "i", "output": "o"})
    empty = write_jsonl(tmp_path / "empty.jsonl", {"instruction": "i", "output": ""})
    with pytest.raises(DataError, match=r"empty\.jsonl: no row is left"):
        prepare([path], DataOptions(validation=str(empty)), byte_level())
    prepared = examine([path], DataOptions(validation=str(path)), byte_level())
    assert prepared.validation_report is not None and prepared.validation_report.used == 1
    assert (prepared.report.train_rows, prepared.report.validation_rows) == (1, 1)


def test_duplicate_prompts_stay(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *[{"instruction": "i", "output": "o"}] * 3)
    assert len(prepare([path], DataOptions(), byte_level()).train) == 3
