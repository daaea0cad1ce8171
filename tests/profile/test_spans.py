"""The profiler counts what ran, where it ran, and nothing when it is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from quatrain.ops.linear_lora import Linear, Lora
from quatrain.profile import limits
from quatrain.profile.limits import Limits, best_rate, matrix_product, memory_traffic
from quatrain.profile.report import rows
from quatrain.profile.spans import Profiler


@dataclass(frozen=True)
class _Ops:
    linear_lora_forward: Callable[..., None]
    attention_forward: Callable[..., None]
    lora_down_forward: Callable[..., None]
    rope_forward: Callable[..., None]
    adamw_step: Callable[..., None]


def _ops(profiler: Profiler) -> _Ops:
    return profiler.timed(_Ops(*[lambda *_: None] * 5))


def _linear(n: int, k: int, r: int) -> Linear:
    return Linear(torch.zeros(n, k), None, Lora(torch.zeros(r, k), torch.zeros(n, r), *torch.zeros(2, 1), 1.0, 0))


def test_off_means_no_spans() -> None:
    profiler = Profiler()
    _ops(profiler).linear_lora_forward([], [], torch.zeros(2, 3), [], None, None)
    assert profiler.spans() == []


def test_calls_flops_and_bytes_by_part_and_layer() -> None:
    profiler = Profiler(enabled=True)
    ops = _ops(profiler)
    x, linear = torch.zeros(5, 8), _linear(4, 8, 2)
    for layer in (0, 1):
        with profiler.part("forward", layer):
            ops.linear_lora_forward([torch.zeros(5, 4)], [torch.zeros(5, 2)], x, [linear], None, torch.zeros(0))
    spans = profiler.spans()
    assert [(s.part, s.layer, s.op, s.calls) for s in spans] == [
        ("forward", 0, "linear_lora_forward", 1),
        ("forward", 1, "linear_lora_forward", 1),
    ]
    assert spans[0].flops == 2 * 5 * 4 * 8 + 2 * 5 * 2 * (4 + 8)
    assert spans[0].bytes == 4 * (5 * 4 + 5 * 2 + 5 * 8 + 4 * 8)  # out, u, x, weight
    (total,) = profiler.by_op()
    assert (total.calls, total.flops) == (2, 2 * spans[0].flops)
    assert profiler.part_seconds.keys() == {"forward"} and profiler.part_seconds["forward"] >= total.seconds
    profiler.clear()
    assert profiler.spans() == [] and profiler.part_seconds == {}


@pytest.mark.parametrize(("window", "pairs"), [(None, 6 + 3), (2, 5 + 3), (1, 3 + 2)])
def test_attention_flops_count_visible_pairs(window: int | None, pairs: int) -> None:
    profiler = Profiler(enabled=True)
    q = torch.zeros(5, 4, 8)  # rows of 3 and 2 tokens: 1 + 2 + 3 and 1 + 2 visible pairs
    _ops(profiler).attention_forward(q, q, q, q, q, (0, 3, 5), 1.0, window)
    assert profiler.spans()[0].flops == 2 * pairs * 4 * 8 * 2


def test_what_is_updated_in_place_is_read_and_written() -> None:
    profiler = Profiler(enabled=True)
    x, table = torch.zeros(5, 4, 8), torch.zeros(5, 4)
    ops = _ops(profiler)
    ops.rope_forward(x, table, table)
    ops.adamw_step(*[torch.zeros(100)] * 4, torch.zeros(()))
    assert [span.bytes for span in profiler.spans()] == [2 * 4 * 160 + 2 * 4 * 20, 4 * (100 * 7 + 1)]


def test_lora_down_has_its_flops() -> None:
    profiler = Profiler(enabled=True)
    _ops(profiler).lora_down_forward([torch.zeros(5, 2)], torch.zeros(5, 8), [_linear(4, 8, 2)], None)
    assert profiler.spans()[0].flops == 2 * 5 * 2 * 8


def test_report_gives_share_and_the_binding_limit() -> None:
    profiler = Profiler(enabled=True)
    _ops(profiler).linear_lora_forward([], [], torch.zeros(2, 8), [_linear(4, 8, 2)], None, None)
    span = profiler.spans()[0]
    span.seconds, span.flops, span.bytes = 2.0, 100.0, 30.0
    (row,) = rows([span], Limits(flops_per_second=100.0, bytes_per_second=10.0))
    assert row["share"] == 1.0
    assert row["percent_of_limit"] == pytest.approx(150.0)  # bytes bind: 15 a second of 10
    assert row["limit"] == "memory"


def test_the_best_rate_counts_the_work_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SETTLED", 0.0)
    done = iter([1e9, 1.0, 8.0, 2.0])  # the first call warms up
    assert 0 < best_rate(lambda: next(done), 3) < 1e9
    copy, triad = memory_traffic(floats=1000)
    assert (copy(), triad()) == (8000.0, 12000.0)
    assert matrix_product(torch.float32, size=10)() == 2000.0
