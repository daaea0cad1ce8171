"""How rows become optimizer steps: one count for schedule, progress and checkpoints; no row lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from train.standin import rows_of

from quatrain.config import TrainOptions
from quatrain.data.row import Row
from quatrain.data.rows import Rows
from quatrain.errors import ConfigError, DataError
from quatrain.train.batching import Batching, Step


def sources(steps: Iterable[Step]) -> list[str]:
    return sorted(row.source for step in steps for micro_batch in step for row in micro_batch)


def test_steps_are_counted_on_usable_rows() -> None:
    """C7: 90 rows that are left of a file, in batches of 9."""
    assert Batching(rows_of(90), TrainOptions(batch_size=9, epochs=1), 0).length.steps_of_epoch == (10,)


def test_the_last_accumulation_group_may_be_partial() -> None:
    """E4: 100 rows, micro-batches of 3, accumulation 4: 34 micro-batches, 9 steps an epoch, 18 in two."""
    batching = Batching(rows_of(100), TrainOptions(batch_size=3, accumulation=4, epochs=2), 0)
    steps = batching.epoch(0)
    assert sum(map(len, steps)) == 34 and len(steps) == 9
    assert [len(part) for part in steps[-1]] == [3, 1]
    assert batching.length.total_steps == 18 and batching.length.steps_of_epoch == (9, 9)


def test_packing_by_token_budget() -> None:
    """D4: 10 rows of 100 tokens in packs of 256: 5 packs an epoch, 10 steps in two; no row is lost."""
    rows = rows_of(10, tokens=100)
    batching = Batching(rows, TrainOptions(batch_tokens=256, epochs=2), 0)
    assert batching.length.total_steps == 10 and batching.length.steps_of_epoch == (5, 5)
    assert batching.length.largest_micro_batch == 200
    assert sources(batching.epoch(0)) == sources(batching.epoch(1)) == sorted(row.source for row in rows)


def test_a_step_of_tokens_is_cut_to_micro_batches_without_rounding_the_step() -> None:
    """E6: 1000 tokens a step in micro-batches of 300: the step holds what it holds without them."""
    rows = rows_of(40, tokens=100)
    whole = Batching(rows, TrainOptions(batch_tokens=1000, epochs=1), 0)
    cut = Batching(rows, TrainOptions(batch_tokens=1000, epochs=1), 0, micro_batch_tokens=300)
    assert cut.length.largest_micro_batch == 300 and cut.length.most_micro_batches == 4
    assert [sources([step]) for step in cut.epoch(0)] == [sources([step]) for step in whole.epoch(0)]


@pytest.mark.parametrize("more", [{"epochs": 10**20}, {"max_steps": 10**12}], ids=str)
def test_a_run_without_end_is_refused_before_its_epochs_are_counted(more: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=f"{next(iter(more))} {next(iter(more.values()))}: .*over 10 rows, want at most"
    ):
        _ = Batching(rows_of(10), TrainOptions(batch_size=4, **more), 0).length


def test_max_steps_goes_on_into_as_many_epochs_as_it_takes() -> None:
    length = Batching(rows_of(10), TrainOptions(batch_size=4, max_steps=7), 0).length
    assert length.steps_of_epoch == (3, 3, 3) and length.total_steps == 7
    assert [length.position(step) for step in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]
    assert length.epochs_done(4) == pytest.approx(1 + 1 / 3)
    assert [step for step in range(1, 8) if length.ends_epoch(step)] == [3, 6]
    assert [length.occurrences(every) for every in (1, 3, 7, 8, "epoch")] == [7, 3, 1, 1, 3]


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    import random

    rows, options = rows_of(50), TrainOptions(batch_size=5, epochs=2)
    first = list(Batching(rows, options, 3).epoch(1))
    random.random()
    assert list(Batching(rows, options, 3).epoch(1)) == first
    assert list(Batching(rows, options, 4).epoch(1)) != first
    assert list(Batching(rows, options, 3).epoch(0)) != first


def test_shapes_are_those_of_the_steps() -> None:
    rows = Rows.of(row for tokens in (10, 30, 7, 50, 20) for row in rows_of(7, tokens))
    for options in (TrainOptions(batch_size=3, accumulation=2), TrainOptions(batch_tokens=120)):
        epoch = Batching(rows, options, 5, micro_batch_tokens=60).epoch(1)
        assert epoch.shapes() == {
            (max(sum(map(len, part)) for part in step), max(sum(r.num_supervised for r in part) for part in step),
             len(step)) for step in epoch
        }  # fmt: skip
        assert epoch.largest_micro_batch == max(sum(map(len, part)) for step in epoch for part in step) <= 60
        assert list(epoch.starting_at(2)) == list(epoch)[2:]


def test_a_row_longer_than_a_step_of_tokens_is_named() -> None:
    rows = Rows.of([*rows_of(3), Row.from_pair([1], [2] * 10, "rows.jsonl:7")])
    with pytest.raises(DataError, match=r"rows\.jsonl:7: 11 tokens do not fit a step of 10"):
        Batching(rows, TrainOptions(batch_tokens=10), 0).epoch(0)
