"""Several sources with weights: what an epoch takes of each, and that held-out rows stay out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from data.toys import byte_level, write_jsonl

from quatrain.config import DataOptions, DataSource, TrainOptions
from quatrain.data.order import Share, epoch_order
from quatrain.data.pipeline import Prepared, prepare
from quatrain.errors import DataError
from quatrain.train.batching import Batching


def write(folder: Path, name: str, number: int) -> Path:
    return write_jsonl(folder / name, *({"instruction": f"{name} {i}", "output": "o"} for i in range(number)))


def sources(prepared: Prepared, epoch: int, seed: int = 1) -> list[str]:
    batching = Batching(prepared.train, TrainOptions(batch_size=4, epochs=9), seed, shares=prepared.shares)
    return [Path(row.source).name for step in batching.epoch(epoch) for part in step for row in part]


def test_weights_repeat_and_sample(tmp_path: Path) -> None:
    """Weight 0.5 takes half of the rows, 2.5 each row twice and half of them once more, 1 each row once."""
    a, b, c = (write(tmp_path, name, 10) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    prepared = prepare([f"{a}@0.5", f"{b}@2.5", c], DataOptions(), byte_level())
    taken = Counter(sources(prepared, 0))
    by_file = {name: sorted(n for source, n in taken.items() if source.startswith(name)) for name in "abc"}
    assert by_file == {"a": [1] * 5, "b": [2] * 5 + [3] * 5, "c": [1] * 10}
    assert [(s.name, s.weight, s.used, s.train, s.epoch) for s in prepared.report.sources] == [
        (str(a), 0.5, 10, 10, 5), (str(b), 2.5, 10, 10, 25), (str(c), 1, 10, 10, 10),
    ]  # fmt: skip


def test_over_the_epochs_every_row_comes_equally_often(tmp_path: Path) -> None:
    """A share of 0.3 moves on from epoch to epoch: ten epochs take each of ten rows three times."""
    prepared = prepare([f"{write(tmp_path, 'a.jsonl', 10)}@0.3"], DataOptions(), byte_level())
    epochs = [sources(prepared, epoch) for epoch in range(10)]
    assert all(len(set(epoch)) == 3 for epoch in epochs)
    assert set(Counter(source for epoch in epochs for source in epoch).values()) == {3}
    assert len({tuple(sorted(epoch)) for epoch in epochs}) > 1


def test_the_mix_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    """A resumed run asks for an epoch out of turn, in a new process: nothing is carried from one to the next."""
    entries = [f"{write(tmp_path, 'a.jsonl', 20)}@0.4", write(tmp_path, "b.jsonl", 5)]
    first, again = (prepare(entries, DataOptions(), byte_level()) for _ in range(2))
    epochs = [sources(first, epoch) for epoch in range(3)]
    assert [sources(again, epoch) for epoch in (2, 0, 1)] == [epochs[2], epochs[0], epochs[1]]
    assert sources(first, 0, seed=2) != epochs[0]


def test_weight_one_changes_nothing(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.jsonl", 7), write(tmp_path, "b.jsonl", 6)
    prepared = prepare([f"{a}@1", DataSource(path=str(b))], DataOptions(), byte_level())
    plain = Batching(prepared.train, TrainOptions(batch_size=4), 1)
    weighted = Batching(prepared.train, TrainOptions(batch_size=4), 1, shares=prepared.shares)
    assert list(plain.epoch(1)) == list(weighted.epoch(1))


def test_rows_are_held_out_before_they_are_weighted(tmp_path: Path) -> None:
    """However often a source is repeated, no row that validates is trained on."""
    entries = [f"{write(tmp_path, 'a.jsonl', 30)}@3", f"{write(tmp_path, 'b.jsonl', 30)}@0.5"]
    prepared = prepare(entries, DataOptions(val_split=0.3), byte_level())
    held = {Path(row.source).name for row in prepared.validation}
    assert len(held) == 18 and {name[0] for name in held} == {"a", "b"}
    for epoch in range(6):
        assert held.isdisjoint(sources(prepared, epoch))
    (a, b) = prepared.report.sources
    assert a.train + b.train == 42 and (a.epoch, b.epoch) == (3 * a.train, round(0.5 * b.train))


def test_a_small_share_is_one_row_at_least() -> None:
    assert Share(10, 0.01).taken == 1 and Share(0, 2.0).taken == 0
    assert len(epoch_order([Share(10, 0.01), Share(0, 3), Share(3)], 1, 0)) == 4


def test_validation_rows_have_no_weight(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", 3)
    with pytest.raises(DataError, match="validation rows have no weight"):
        prepare([path], DataOptions(validation=f"{path}@2"), byte_level())
