"""What `quatrain check` shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from data.toys import byte_level, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.pipeline import examine
from quatrain.data.report import Stats, sample_of
from quatrain.data.row import Row

ROWS = [
    {"instruction": "a", "output": "bc"},
    {"instruction": "a", "output": ""},
    {"instruction": "a", "output": 7},
    {"instruction": "dé", "output": "😀"},
]


def test_statistics() -> None:
    assert Stats.of(np.arange(1, 101)) == Stats(min=1, median=50.5, mean=50.5, p95=95, max=100, total=5050)
    assert Stats.of(np.array([3])) == Stats(3, 3, 3.0, 3, 3, 3)
    assert Stats.of(np.array([])) is None


def test_totals_agree_and_are_plain_json(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    prepared = examine([path], DataOptions(), byte_level())
    report = prepared.report.as_json()
    assert (report["read"], report["used"]) == (4, 2)
    assert report["read"] == report["used"] + sum(report["skipped"].values())
    assert report["supervised"]["total"] == sum(row.num_supervised for row in prepared.train) == 3 + 5
    assert report["lengths"]["total"] == sum(map(len, prepared.train))
    assert report["skipped_at"]["empty answer"][0].startswith(f"{path}:2: ")
    assert json.loads(json.dumps(report)) == report
    assert prepared.problem is not None and "1 of 4 rows cannot be used" in str(prepared.problem)


def test_dump_accounts_for_every_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    dump = io.StringIO()
    prepared = examine([path], DataOptions(validation=str(path)), byte_level(), dump=dump)
    lines = [json.loads(line) for line in dump.getvalue().splitlines()]
    assert [line["source"] for line in lines] == [f"{path}:{i}" for i in (1, 2, 3, 4)] * 2
    assert [line.get("skipped") for line in lines[:2]] == [None, "empty answer"]
    assert tuple(lines[3]["input_ids"]) == prepared.train[1].input_ids
    assert tuple(lines[3]["labels"]) == prepared.train[1].labels


def test_samples_mark_what_is_learned(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    samples = examine([path], DataOptions(on_bad_row="skip"), byte_level()).report.samples
    assert [[(part.text, part.supervised) for part in sample.segments] for sample in samples] == [
        [("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False), ("bc<|im_end|>", True), ("\n", False)],
        [("<|im_start|>user\ndé<|im_end|>\n<|im_start|>assistant\n", False), ("😀<|im_end|>", True), ("\n", False)],
    ]
    assert sample_of(Row((), ()), byte_level()).segments == []
