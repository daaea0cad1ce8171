"""Data sets of the Hugging Face hub: what is asked of the package `datasets`, and the rows that come of it."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data.toys import TOOLS, byte_level, chat, write_jsonl

from quatrain.config import DataOptions
from quatrain.data.hub import HubRows
from quatrain.data.pipeline import examine, prepare
from quatrain.errors import DataError

ROWS = [{"instruction": f"i{i}", "output": "o", "meta": {"a": i, "b": None}} for i in range(4)]


class Standin(list):  # type: ignore[type-arg]
    """What `load_dataset` returns, as far as it is used."""

    cache_files: list[dict[str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Stands in for the package `datasets`; grows by what is asked of it."""
    calls: list[tuple[Any, ...]] = []
    data = Standin(ROWS)
    (tmp_path / "part.arrow").write_bytes(b"content")
    data.cache_files = [{"filename": str(tmp_path / "part.arrow")}]

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> Standin:
        if name == "owner/none":
            raise FileNotFoundError("Dataset 'owner/none' doesn't exist on the Hub")
        calls.append((name, config, split, revision))
        return data

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        ("hf:owner/name", ("owner/name", None, "train", None)),
        ("hf:name@0.5", ("name", None, "train", None)),
        ("hf:owner/name:config=main:split=train[:10%]:revision=abc", ("owner/name", "main", "train[:10%]", "abc")),
        ("hf:o.w-n/n_1:split=test", ("o.w-n/n_1", None, "test", None)),
    ],
)
def test_what_is_asked_for(asked: list[tuple[Any, ...]], typed: str, want: tuple[Any, ...]) -> None:
    prepared = prepare([typed], DataOptions(), byte_level())
    assert asked == [want] and len(prepared.train) == 4
    assert prepared.train[2].source == typed.removesuffix("@0.5") + ":3"
    assert prepared.report.sources[0].weight == (0.5 if "@" in typed else 1)


@pytest.mark.parametrize(
    "typed",
    ["hf:", "hf:/", "hf:a/b/c", "hf:owner/name:slpit=x", "hf:owner/name:split=", "hf:o/n:split=a:split=b", "hf:o n"],
)
def test_names_that_cannot_be(asked: list[tuple[Any, ...]], typed: str) -> None:
    with pytest.raises(DataError, match="not a data set's name; want hf:owner/name"):
        prepare([typed], DataOptions(), byte_level())
    assert asked == []


def test_rows_mix_with_files(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", {"instruction": "i", "output": "o"})
    report = prepare([str(path), "hf:owner/name"], DataOptions(), byte_level()).report
    assert [(source.name, source.used) for source in report.sources] == [(str(path), 1), ("hf:owner/name", 4)]


def test_rows_are_kept_under_the_content_of_their_files(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    def entries() -> int:
        prepare(["hf:owner/name"], DataOptions(), byte_level(), cache=tmp_path / "cache")
        return len(list((tmp_path / "cache").iterdir()))

    assert (entries(), entries()) == (1, 1)
    (tmp_path / "part.arrow").write_bytes(b"CONTENT")
    assert entries() == 2
    fingerprints = {HubRows.parse(f"hf:a/b{more}").fingerprint() for more in ("", ":split=x", ":revision=y")}
    assert len(fingerprints) == 3


def test_a_data_set_that_cannot_be_had_is_named(asked: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DataError, match="hf:owner/none: cannot be loaded: Dataset 'owner/none' doesn't exist"):
        prepare(["hf:owner/none"], DataOptions(), byte_level())


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.split(".")[0] == "datasets":
            raise ImportError(name)
        return original(name, *more)

    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="needs the package datasets") as error:
        prepare(["hf:owner/name"], DataOptions(), byte_level())
    assert error.value.hint == "install it with: pip install 'quatrain[datasets]'"


def test_the_real_package_gives_the_rows_of_a_parquet_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: nested fields that a row lacks stay absent; the rows are those of the same file read without the package."""
    datasets = pytest.importorskip("datasets", reason="pip install quatrain[datasets]")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "owner" / "name" / "train.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(arrow.Table.from_pylist(tool_rows()), file)
    tokenizer = byte_level(template=TOOLS, added=("<tool_call>", "</tool_call>"))
    plain = prepare([file], DataOptions(), tokenizer).train
    for entry in ("hf:owner/name", "hf:owner/name:split=train[1:]"):
        rows = prepare([entry], DataOptions(), tokenizer, cache=tmp_path / "cache").train
        assert [row.input_ids for row in rows] == [row.input_ids for row in plain][-len(rows) :]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    texts = [tokenizer.decode(row.input_ids) for row in plain]
    assert '{"city": "Oslo"}' in texts[0] and "sku" not in texts[0] and "null" not in "".join(texts)
    with pytest.raises(DataError, match="hf:owner/name:split=nothing: cannot be loaded"):
        prepare(["hf:owner/name:split=nothing"], DataOptions(), tokenizer)


def tool_rows() -> list[dict[str, Any]]:
    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        turns = [*chat("q"), {"role": "assistant", "content": "", "tool_calls": calls}]
        return {"messages": [*turns, {"role": "tool", "content": "done"}, *chat("q", "a")[1:]]}

    return [row({"city": "Oslo"}), row({"sku": "A-7", "qty": 2})]


def test_a_folder_that_the_package_saved(tmp_path: Path) -> None:
    """Its Arrow files are read without the package; the JSON files beside them are not data."""
    datasets = pytest.importorskip("datasets", reason="pip install quatrain[datasets]")
    tokenizer = byte_level(template=TOOLS, added=("<tool_call>", "</tool_call>"))
    data = datasets.Dataset.from_list(tool_rows() * 3)
    data.save_to_disk(str(tmp_path / "one"), num_shards=2)
    rows = prepare([f"{tmp_path / 'one'}@2"], DataOptions(), tokenizer).train
    path = write_jsonl(tmp_path / "rows.jsonl", *tool_rows() * 3)
    want = [row.input_ids for row in prepare([path], DataOptions(), tokenizer).train]
    assert [row.input_ids for row in rows] == want
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="several splits") as error:
        prepare([tmp_path / "two"], DataOptions(), tokenizer)
    assert "one of test, train" in str(error.value.hint)
    cut = next((tmp_path / "one").glob("*.arrow"))
    cut.write_bytes(cut.read_bytes()[:-300])
    with pytest.raises(DataError, match="broken Arrow file"):
        examine([tmp_path / "one"], DataOptions(), tokenizer)
