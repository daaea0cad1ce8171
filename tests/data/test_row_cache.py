"""Tokenised rows on disk: equal to fresh ones to the bit, and never those of another file, template or option."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from data.toys import CHATML, byte_level, write_jsonl

from quatrain.config import DataOptions
from quatrain.data import pipeline
from quatrain.data.cache import RowCache
from quatrain.data.pipeline import Prepared, examine
from quatrain.data.row import Row
from quatrain.data.tokenizer import Tokenizer

ROWS = [{"instruction": f"i{i}", "output": "o" * i, "id": i} for i in range(8)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", *ROWS, {"instruction": "é 😀", "output": 7})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever files are really tokenised."""
    count: list[int] = []
    original = pipeline._outcomes

    def counted(*arguments: Any) -> Any:
        count.append(1)
        return original(*arguments)

    monkeypatch.setattr(pipeline, "_outcomes", counted)
    return count


def load(
    data: Path, folder: Path | None, tokenizer: Tokenizer | None = None, seq: int = 512, **options: Any
) -> Prepared:
    options = {"on_bad_row": "skip", **options}
    return examine([data], DataOptions(**options), tokenizer or byte_level(), max_seq_len=seq, cache=folder)


def content(prepared: Prepared) -> tuple[list[Row], list[Row], object]:
    return list(prepared.train), list(prepared.validation), prepared.report


def test_rows_and_report_of_the_cache_are_the_fresh_ones(data: Path, folder: Path, tokenised: list[int]) -> None:
    fresh = load(data, None, val_split=0.3)
    first, second = load(data, folder, val_split=0.3), load(data, folder, val_split=0.3)
    assert len(tokenised) == 2 and len(list(folder.iterdir())) == 1
    assert content(fresh) == content(first) == content(second) and len(second.train) == 5
    assert [list(p.notices) for p in (fresh, first, second)] == [[], [], []]


def test_an_edited_template_is_never_trained_on_with_old_prompts(
    data: Path, folder: Path, tmp_path: Path, tokenised: list[int]
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(CHATML)
    old = load(data, folder, chat_template=str(template))
    stat = template.stat()
    template.write_text(CHATML.replace("'\\n' + m", "'\\t' + m"))
    os.utime(template, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (template.stat().st_size, template.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    new = load(data, folder, chat_template=str(template))
    assert len(tokenised) == 2
    assert new.train[0].input_ids != old.train[0].input_ids
    assert byte_level().decode(new.train[0].input_ids).startswith("<|im_start|>user\ti1")


def test_an_edited_file_has_other_rows_whatever_its_time_says(data: Path, folder: Path, tokenised: list[int]) -> None:
    old, stat = load(data, folder), data.stat()
    data.write_text(data.read_text().replace("i3", "X3"))
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = load(data, folder)
    assert len(tokenised) == 2 and data.stat().st_size == stat.st_size
    assert [a == b for a, b in zip(old.train, new.train, strict=True)].count(False) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"system": "s"},
        {"train_on_eos": "none"},
        {"last_turn_only": True},
        {"keep_empty": True},
        {"json_fields": ["output"]},
        {"row_schema": "alpaca"},
        {"allow_special": True},
        {"format": "jsonl"},
        {"truncation": "truncate"},
        {"seq": 40},
        {"tokenizer": byte_level(("<|im_start|>", "<|im_end|>", "<x>"))},
        {"tokenizer": byte_level(template=CHATML + " ")},
    ],
)
def test_whatever_decides_the_rows_is_in_the_key(
    data: Path, folder: Path, tokenised: list[int], options: dict[str, Any]
) -> None:
    load(data, folder), load(data, folder, **options)
    assert len(tokenised) == 2
    assert content(load(data, folder, **options)) == content(load(data, None, **options))
    assert len(tokenised) == 3, "the second entry is used too"


@pytest.mark.parametrize("options", [{"val_split": 0.2}, {"max_unsupervised": 0.9}, {"on_bad_row": "stop"}])
def test_what_is_done_with_the_rows_is_not(data: Path, folder: Path, tokenised: list[int], options: Any) -> None:
    load(data, folder)
    assert content(load(data, folder, **options)) == content(load(data, None, **options))
    assert len(tokenised) == 2


def test_the_day_is_in_the_key_of_templates_that_print_it(data: Path, folder: Path, tokenised: list[int]) -> None:
    dated = byte_level(template="{{ strftime_now('%d %b') }}" + CHATML)
    for tokenizer, count in ((byte_level(), 1), (dated, 3)):
        first, second = (load(data, folder, tokenizer, template_date=day) for day in ("2024-01-02", "2024-01-03"))
        assert len(tokenised) == count
        assert (first.train[0] == second.train[0]) == (tokenizer is not dated)


def test_the_place_of_a_file_is_in_its_rows(data: Path, folder: Path, tmp_path: Path) -> None:
    """Rows say where they come from, so the same bytes under another name are tokenised again."""
    load(data, folder)
    other = Path(shutil.copy(data, tmp_path / "other.jsonl"))
    assert load(other, folder).train[0].source == f"{other}:2"


def test_a_damaged_entry_is_said_and_written_again(data: Path, folder: Path, tokenised: list[int]) -> None:
    want = content(load(data, folder))
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 4]) + whole[101:], b"", b"hello" * 20):
        entry.write_bytes(damaged)
        again = load(data, folder)
        assert content(again) == want and "will be written again" in again.notices[0]
        assert entry.read_bytes() == whole
    assert len(tokenised) == 5
    load(data, folder, seq=100)
    other = next(path for path in folder.iterdir() if path != entry)
    shutil.copy(other, entry)
    assert "holds something else" in load(data, folder).notices[0]


def test_a_cache_that_cannot_be_written_stops_nothing(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prepared = load(data, tmp_path / "file")
    assert content(prepared) == content(load(data, None)) and "rows are not kept" in prepared.notices[0]


def test_a_full_disk_stops_nothing(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    prepared = load(data, folder)
    assert len(prepared.train) == 7 and "are not kept: the disk has 0 MB left" in prepared.notices[0]
    assert list(folder.iterdir()) == []


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pipeline._outcomes

    def changing(*arguments: Any) -> Any:
        yield from original(*arguments)
        data.write_text(data.read_text() + "\n")

    monkeypatch.setattr(pipeline, "_outcomes", changing)
    prepared = load(data, folder)
    assert len(prepared.train) == 7 and "changed while they were read" in prepared.notices[0]
    assert list(folder.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pipeline, "_outcomes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(data, folder)
    assert list(folder.iterdir()) == []


def test_a_dump_reads_the_files_and_keeps_nothing(data: Path, folder: Path) -> None:
    dump = io.StringIO()
    examine([data], DataOptions(), byte_level(), cache=folder, dump=dump)
    assert len(dump.getvalue().splitlines()) == 9 and not folder.exists()


def test_entries_are_listed_and_cleared(data: Path, folder: Path) -> None:
    load(data, folder), load(data, folder, seq=100)
    foreign = "0a" * 16
    (folder / f"{foreign}.rows").write_bytes(b"hello")
    (folder / ".y.partial").write_bytes(b"left behind")
    cache = RowCache(folder)
    entries = {entry.key: entry for entry in cache.entries()}
    assert len(entries) == 3 and entries[foreign].made is None
    key = next(key for key in entries if key != foreign)
    assert entries[key].made.files[0][0] == str(data) and entries[key].made.key == key
    assert [entry.key for entry in cache.clear(key)] == [key]
    assert len(cache.clear()) == 2 and list(folder.iterdir()) == []
