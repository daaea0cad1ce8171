"""The learning rate schedule: counted in optimizer steps, peak where promised, never dead at the end."""

from __future__ import annotations

import math

import pytest

from quatrain.optim.schedule import Schedule, warmup_steps_of


@pytest.mark.parametrize(
    ("total", "steps", "ratio", "want"),
    [(18, None, 0.1, 2), (18, 7, 0.1, 7), (10, None, 0.1, 1), (10, None, 0.0, 0), (5, 9, 0.0, 5)],
)
def test_warmup_is_counted_in_optimizer_steps(total: int, steps: int | None, ratio: float, want: int) -> None:
    """F1: a tenth of 18 steps is 2, whatever the accumulation."""
    assert warmup_steps_of(total, steps=steps, ratio=ratio) == want


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_peak_is_reached_at_the_end_of_warm_up_and_the_last_step_still_learns(kind: str) -> None:
    """F1: the peak at step 2 of 18, and above zero at the last."""
    schedule = Schedule(kind, peak=2e-4, total_steps=18, warmup_steps=2)  # type: ignore[arg-type]
    rates = [schedule(step) for step in range(1, 19)]
    assert rates[0] == 1e-4 and rates[1] == 2e-4 == max(rates)
    assert rates[-1] > 0
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_without_warm_up_the_first_step_runs_at_the_peak() -> None:
    assert Schedule("cosine", peak=1.0, total_steps=1)(1) == 1.0
    assert Schedule("linear", peak=1.0, total_steps=4)(1) == 1.0


def test_values_of_the_formulas() -> None:
    linear = Schedule("linear", peak=1.0, total_steps=4, floor=0.2)
    assert [round(linear(step), 12) for step in (1, 2, 3, 4, 5, 99)] == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    cosine = Schedule("cosine", peak=1.0, total_steps=4, floor=0.2)
    assert cosine(3) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert cosine(5) == pytest.approx(0.2)


def test_a_warm_up_as_long_as_the_run_is_only_warm_up() -> None:
    schedule = Schedule("cosine", peak=1.0, total_steps=3, warmup_steps=3)
    assert [schedule(step) for step in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_steps_start_at_one() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        Schedule("constant", peak=1.0, total_steps=3)(0)
