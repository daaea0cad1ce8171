"""The cache of quantised models: the second load gives the first one's bits, and nothing spoiled is ever used."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from oracles import families

from quatrain.checkpoint import cache as cache_module
from quatrain.checkpoint.cache import BaseCache, Made
from quatrain.checkpoint.load import load_params
from quatrain.checkpoint.open import open_source
from quatrain.data.disk import cache_folder
from quatrain.errors import ModelError
from quatrain.model.params import ModelParams
from quatrain.ops.nf4 import Nf4Tensor
from quatrain.ops.nf4.reference import quantize


class Counting:
    """A quantiser that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: torch.Tensor, *, double_quant: bool) -> Nf4Tensor:
        self.calls += 1
        return quantize(weight, double_quant=double_quant)


def load(folder: Path, cache: BaseCache | None, counting: Counting | None = None, **options) -> ModelParams:
    settings = {"quantize": "nf4", "double_quant": True, "compute_dtype": torch.bfloat16, **options}
    return load_params(open_source(str(folder)), **settings, quantizer=counting or Counting(), cache=cache)


def contents(params: ModelParams) -> dict[str, tuple]:
    """Every tensor as (type, shape, bytes) by its place."""
    found: dict[str, torch.Tensor | None] = {
        "embed": params.embed,
        "head": params.head,
        "final_norm": params.final_norm,
    }
    for at, block in enumerate(params.blocks):
        for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
            found[f"{at}.{name}"] = getattr(block, name)
        for name, linear in block.linears.items():
            found[f"{at}.{name}.bias"] = linear.bias
            assert isinstance(linear.weight, Nf4Tensor)
            for part in ("codes", "absmax", "absmax_codes", "absmax2", "offset", "code2"):
                found[f"{at}.{name}.{part}"] = getattr(linear.weight, part)
    return {
        name: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in found.items()
        if t is not None
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    families.save(families.BY_NAME["llama"], tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> BaseCache:
    return BaseCache(tmp_path / "cache" / "deep")


def only_entry(cache: BaseCache) -> Path:
    (entry,) = cache.entries()
    return entry.path


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
@pytest.mark.parametrize("double_quant", [False, True])
def test_the_second_load_has_the_same_bits_and_quantises_nothing(variant, double_quant, tmp_path):
    families.save(variant, tmp_path / "model")
    cache, first, second = BaseCache(tmp_path / "cache"), Counting(), Counting()
    want = load(tmp_path / "model", cache, first, double_quant=double_quant)
    got = load(tmp_path / "model", cache, second, double_quant=double_quant)
    assert first.calls > 0 and second.calls == 0 and cache.notices == []
    assert contents(got) == contents(want)
    assert (got.head is got.embed) == got.spec.tie_word_embeddings
    assert all(block.input_norm.data_ptr() % 4 == 0 for block in got.blocks)


def test_other_settings_or_another_model_are_other_entries(model, cache, tmp_path):
    load(model, cache)
    for options in ({"double_quant": False}, {"compute_dtype": torch.float32}, {"compute_dtype": torch.float64}):
        counting = Counting()
        assert contents(load(model, cache, counting, **options)) == contents(load(model, None, **options))
        assert counting.calls > 0
        counting = Counting()
        assert contents(load(model, cache, counting, **options)) == contents(load(model, None, **options))
        assert counting.calls == 0
    assert len(cache.entries()) == 4
    weights = model / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    counting = Counting()
    load(model, cache, counting)
    assert counting.calls > 0 and len(cache.entries()) == 5


def test_the_same_files_elsewhere_are_the_same_entry(model, cache, tmp_path):
    load(model, cache)
    shutil.copytree(model, tmp_path / "other")
    counting = Counting()
    load(tmp_path / "other", cache, counting)
    assert counting.calls == 0


def test_another_version_does_not_read_it(model, cache, monkeypatch):
    load(model, cache)
    for name, value in (("version", "9.9"), ("format", 99)):
        made = cache.entries()[0].made
        assert made is not None and Made(**{**vars(made), name: value}).key != made.key


def test_plain_models_are_not_kept(model, cache):
    load(model, cache, quantize="none")
    assert cache.entries() == [] and not cache.folder.exists()


def test_a_write_into_a_mapped_tensor_stays_in_the_process(model, cache):
    load(model, cache)
    before = only_entry(cache).read_bytes()
    params = load(model, cache)
    params.embed.zero_()
    params.blocks[0].linears["q_proj"].weight.codes.fill_(0x77)
    assert only_entry(cache).read_bytes() == before


def test_a_mapped_entry_outlives_its_deletion_and_its_replacement(model, cache):
    want = contents(load(model, None))
    load(model, cache)
    params = load(model, cache)
    cache.clear()
    assert contents(params) == want
    load(model, cache)
    assert contents(params) == want


SPOILED = {
    "empty": lambda raw: b"",
    "short header": lambda raw: raw[:40],
    "half": lambda raw: raw[: len(raw) // 2],
    "one byte short": lambda raw: raw[:-1],
    "one byte long": lambda raw: raw + b"\0",
    "first data bit": lambda raw: flipped(raw, int.from_bytes(raw[:8], "little") + 8),
    "middle bit": lambda raw: flipped(raw, len(raw) // 2),
    "last bit": lambda raw: flipped(raw, len(raw) - 1),
    "another name": lambda raw: raw.replace(b"q_proj.weight:codes", b"k_proj.weight:codez", 1),
    "zeros": lambda raw: bytes(len(raw)),
    "text": lambda raw: b"hello",
}


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_entry_is_passed_over_with_a_notice_and_written_again(model, cache, spoil):
    want = contents(load(model, cache))
    path = only_entry(cache)
    good = path.read_bytes()
    path.write_bytes(spoil(good))
    counting = Counting()
    assert contents(load(model, cache, counting)) == want
    assert counting.calls > 0 and len(cache.notices) == 1
    assert "is not used and will be written again" in cache.notices[0] and str(cache.folder) in cache.notices[0]
    assert path.read_bytes() == good
    counting = Counting()
    load(model, cache, counting)
    assert counting.calls == 0


def test_an_entry_under_another_ones_name_is_not_used(model, cache):
    load(model, cache)
    foreign = only_entry(cache).read_bytes()
    load(model, cache, double_quant=False)
    for entry in cache.entries():
        entry.path.write_bytes(foreign)
    counting = Counting()
    assert contents(load(model, cache, counting, double_quant=False)) == contents(load(model, None, double_quant=False))
    assert counting.calls > 0 and "holds something else" in cache.notices[0]


def test_a_foreign_safetensors_file_is_not_used(model, cache):
    from safetensors.torch import save_file

    load(model, cache)
    path = only_entry(cache)
    save_file({"x": torch.zeros(4)}, path, metadata={"quatrain": "[]"})
    assert cache.entries()[0].made is None
    load(model, cache)
    assert "holds something else" in cache.notices[0]


def test_a_folder_that_cannot_be_written_costs_a_notice(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = BaseCache(tmp_path / "file" / "cache")
    assert contents(load(model, cache)) == contents(load(model, None))
    assert len(cache.notices) == 1 and "is not kept" in cache.notices[0]


def test_a_full_disk_leaves_no_part_behind(model, cache, monkeypatch):
    def full(tensor: torch.Tensor) -> memoryview:
        written.append(tensor)
        if len(written) > sizes:
            raise OSError(28, "No space left on device")
        return whole(tensor)

    written: list[torch.Tensor] = []
    whole = cache_module._bytes
    sizes = 1 << 30
    load(model, None)
    monkeypatch.setattr(cache_module, "_bytes", full)
    load(model, cache)
    count = len(written) // 2  # once for the digest, once for the file
    cache.clear()
    written, sizes = [], count + 3
    assert contents(load(model, cache)) == contents(load(model, None))
    assert len(cache.notices) == 1 and "No space left on device" in cache.notices[0]
    assert list(cache.folder.iterdir()) == []


def test_the_cache_takes_half_of_what_the_disk_has_left_at_most(model, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    load(model, cache)
    assert cache.entries() == [] and "the disk has 0 MB left" in cache.notices[0]


def test_writers_do_not_meet(model, cache):
    """Eight loads at once into an empty cache: one good entry, no leftovers, no notice."""
    start, results = threading.Barrier(8), []

    def one() -> None:
        mine = BaseCache(cache.folder)
        start.wait()
        results.append((contents(load(model, mine)), mine.notices))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = contents(load(model, None))
    assert len(results) == 8 and all(found == want and notices == [] for found, notices in results)
    assert [path.suffix for path in cache.folder.iterdir()] == [".safetensors"]
    counting = Counting()
    load(model, cache, counting)
    assert counting.calls == 0


def test_an_interrupted_write_leaves_nothing(model, cache, monkeypatch):
    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(model, cache)
    assert list(cache.folder.iterdir()) == []


def test_a_model_that_is_refused_is_not_kept(model, cache):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match="NaN"):
        load(model, cache)
    assert cache.entries() == []


def test_clear_by_key_and_all_with_leftovers(model, cache):
    load(model, cache)
    load(model, cache, double_quant=False)
    key = cache.entries()[0].key
    assert [entry.key for entry in cache.clear(key[:12])] == [key]
    assert len(cache.entries()) == 1
    (cache.folder / ".abc.partial").write_bytes(b"x")
    (cache.folder / "keep.txt").write_text("not ours")
    cache.clear()
    assert [path.name for path in cache.folder.iterdir()] == ["keep.txt"]


def test_the_header_is_plain_safetensors(model, cache):
    from safetensors import safe_open

    load(model, cache)
    with safe_open(only_entry(cache), "pt") as file:
        made = json.loads(file.metadata()["quatrain"])["made"]
        assert made["model"] == str(model) and made["compute_dtype"] == "bfloat16" and made["double_quant"] is True
        codes = file.get_tensor("model.layers.0.mlp.up_proj.weight:codes")
    weight = load(model, None).blocks[0].linears["up_proj"].weight
    assert torch.equal(codes, weight.codes)


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("QUATRAIN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(None) == tmp_path / ".cache" / "quatrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "quatrain"
    monkeypatch.setenv("QUATRAIN_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder(None) == tmp_path / "own"
    assert cache_folder("~/here") == tmp_path / "here"
