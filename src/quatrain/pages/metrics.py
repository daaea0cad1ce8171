"""`metrics.jsonl` as numbers to draw: columns of floats, so that a long run takes little memory."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quatrain.pages.charts import Point, smoothed, thinned

COLUMNS = ("epoch", "loss", "lr", "grad_norm", "tokens", "response_tokens", "tokens_per_s", "skipped")


@dataclass
class Metrics:
    """Of each optimizer step one value in every column, NaN where there is none; evaluations, measurements of the
    layers and sample answers as they were written."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """One line of the file. One of a kind that is not known is left out."""
        if "loss" in line:
            self.steps.append(float(line["step"]))
            for name, column in self.columns.items():
                column.append(_number(line.get(name)))
        for key, kept in (("eval_loss", self.evaluations), ("adapter_norms", self.layers), ("samples", self.samples)):
            if key in line:
                kept.append(line)

    def points(self, name: str) -> list[Point]:
        """(step, value) of a column, as many as a line needs."""
        return thinned(self._points(name))

    def smoothed_points(self, name: str) -> list[Point]:
        """As `points`, of the mean of the last few steps at each."""
        return thinned(smoothed(self._points(name)))

    def _points(self, name: str) -> list[Point]:
        return [
            (step, None if math.isnan(value) else value)
            for step, value in zip(self.steps, self.columns[name], strict=True)
        ]

    def evaluation_points(self, name: str = "eval_loss") -> list[Point]:
        return [(line["step"], line.get(name)) for line in self.evaluations]

    def last(self, name: str, of: Callable[[list[float]], float] = lambda values: values[-1], most: int = 50) -> Any:
        """`of` the last finite values of a column; None without any."""
        values = [value for value in self.columns[name][-most:] if not math.isnan(value)]
        return of(values) if values else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest loss."""
        finite = [line for line in self.evaluations if line["eval_loss"] is not None]
        return min(finite, key=lambda line: float(line["eval_loss"])) if finite else None


def read_metrics(path: Path) -> Metrics:
    """The file at `path`; empty where there is none. Lines that are cut short or damaged are left out: a run may be
    writing one just now."""
    metrics = Metrics()
    if not path.is_file():
        return metrics
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                metrics.add(line if isinstance(line["step"], int) else {})
            except (ValueError, KeyError, TypeError):
                continue
    return metrics


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
