"""Which evaluation is the best, and when patience ends."""

from __future__ import annotations

import math

import pytest

from quatrain.train.early_stopping import BestTracker


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_first_evaluation_that_is_not_finite_is_not_the_best(first: float) -> None:
    """F10: NaN and infinity are never the best."""
    tracker = BestTracker(patience=2)
    assert not tracker.update(1, first) and tracker.best_step is None and tracker.misses == 1
    assert tracker.update(2, 5.0) and (tracker.best_step, tracker.misses) == (2, 0)


def test_an_equal_loss_is_a_miss_and_an_improvement_starts_again() -> None:
    tracker = BestTracker(patience=2)
    assert [tracker.update(step, loss) for step, loss in enumerate([1.0, 1.0, 0.9, 0.9], 1)] == [
        True,
        False,
        True,
        False,
    ]
    assert not tracker.exhausted
    tracker.update(5, 2.0)
    assert tracker.exhausted and tracker.best_step == 3


def test_without_patience_nothing_stops() -> None:
    tracker = BestTracker()
    for step in range(50):
        tracker.update(step, 1.0)
    assert not tracker.exhausted
