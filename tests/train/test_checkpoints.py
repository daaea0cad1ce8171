"""Folders that a crash cannot spoil, and which checkpoint a resume picks."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from quatrain.checkpoint import atomic
from quatrain.checkpoint.atomic import staged_folder, verify_folder, write_file
from quatrain.checkpoint.resume import check_same_parameters, newest_complete, rotate, save_checkpoint
from quatrain.errors import CheckpointError


def write(target: Path, text: str) -> None:
    with staged_folder(target) as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "a.txt").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_complete_and_can_be_replaced(tmp_path: Path) -> None:
    """M2: a folder is there whole, with a manifest that fits."""
    write(tmp_path / "x", "one")
    verify_folder(tmp_path / "x")
    write(tmp_path / "x", "two")
    verify_folder(tmp_path / "x")
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == "two" and names(tmp_path) == ["x"]


def test_a_failure_while_writing_leaves_the_old_one(tmp_path: Path) -> None:
    """M2: an error on the way leaves what was there."""
    write(tmp_path / "x", "one")
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "x") as staging:
        (staging / "b.txt").write_text("half")
        raise RuntimeError
    with pytest.raises(CheckpointError, match="No space left"), staged_folder(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    verify_folder(tmp_path / "x")
    assert names(tmp_path) == ["x"] and names(tmp_path / "x") == ["inner", "manifest.json"]


def test_a_disk_that_is_full_while_tensors_are_written(tmp_path: Path) -> None:
    """M7: safetensors writes its file by itself. The file is cut at a size here, as a full disk would."""
    save_checkpoint(tmp_path, 1, {"master.w": torch.ones(3)}, {"progress": {}})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step-000002.*File too large"):
            save_checkpoint(tmp_path, 2, {"master.w": torch.ones(10_000)}, {"progress": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["step-000001"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """M2: the folder behind a link is replaced, and nothing is left beside either."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for text in ("one", "two"):
        write(tmp_path / "link", text)
    assert names(tmp_path) == ["link", "real"] and (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "inner" / "a.txt").read_text() == "two"


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    """M2: a file of that name stays where it is."""
    (tmp_path / "x").write_text("rows")
    with pytest.raises(CheckpointError, match="it is a file, want a folder"):
        write(tmp_path / "x", "one")
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "rows"


def test_a_crash_between_the_renames_is_undone(tmp_path: Path) -> None:
    """M2: killed between the two renames."""
    target, aside = tmp_path / "x", tmp_path / ".x.previous"
    write(target, "one")
    target.rename(aside)
    atomic.recover(target)
    verify_folder(target)
    assert names(tmp_path) == ["x"]


def test_a_crash_before_the_old_folder_is_deleted_is_finished(tmp_path: Path) -> None:
    """M2: killed after them."""
    write(tmp_path / "x", "new")
    write(tmp_path / ".x.previous", "old")
    atomic.recover(tmp_path / "x")
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == "new" and names(tmp_path) == ["x"]


def test_ctrl_c_between_the_renames_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", "one")
    rename = Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        if self.name == ".x.partial":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", "two")
    verify_folder(tmp_path / "x")
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == "one" and names(tmp_path) == ["x"]


def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """M2: a process that dies at the n-th fsync, rename or deletion of a save that replaces step 2: one of its two
    versions is there, whole, and the next save works."""
    calls = 0
    while True:
        folder = tmp_path / str(calls)
        save_checkpoint(folder, 1, {"w": torch.tensor(1.0)}, {})
        save_checkpoint(folder, 2, {"w": torch.tensor(2.0)}, {})
        child = os.fork()
        if child == 0:
            die_at_call(calls)
            save_checkpoint(folder, 2, {"w": torch.tensor(3.0)}, {})
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        checkpoint, passed_over = newest_complete(folder)
        assert checkpoint is not None and checkpoint.step == 2 and passed_over == []
        value = checkpoint.tensors()["w"].item()
        assert value == 3.0 if code == 0 else value in (2.0, 3.0)
        save_checkpoint(folder, 2, {"w": torch.tensor(4.0)}, {})
        assert newest_complete(folder)[0].tensors()["w"].item() == 4.0  # type: ignore[union-attr]
        assert names(folder) == ["step-000001", "step-000002"]
        if code == 0:
            break
        calls += 1
    assert calls >= 8  # fsync of two files, the manifest and three folders, two renames, a replace, a deletion


def die_at_call(number: int) -> None:
    """From now on this process ends, without any clean-up, at the call of that number (from 0) to the file system."""
    seen = 0
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "rename"), (atomic.shutil, "rmtree")):

        def counted(*arguments: object, call: Any = getattr(owner, name), **more: object) -> Any:
            nonlocal seen
            if seen == number:
                os._exit(9)
            seen += 1
            return call(*arguments, **more)

        setattr(owner, name, counted)


def spoil_nothing_there(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def spoil_cut(folder: Path) -> None:
    os.truncate(folder / "state.safetensors", 20)


def spoil_empty(folder: Path) -> None:
    os.truncate(folder / "state.safetensors", 0)


def spoil_missing(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def spoil_bit(folder: Path) -> None:
    content = bytearray((folder / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "state.safetensors").write_bytes(content)


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": [')


def spoil_manifest_kind(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": {"state.safetensors": 3}}')


SPOILERS = [v for k, v in list(globals().items()) if k.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_an_incomplete_checkpoint_is_passed_over_with_its_reason(tmp_path: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    """M2: cut, empty, missing or altered files: resume takes the newest checkpoint that is whole."""
    for step in (8, 20, 100):
        save_checkpoint(tmp_path, step, {"master.w": torch.full((3,), float(step))}, {"progress": {}})
    spoil(tmp_path / "step-000100")
    checkpoint, passed_over = newest_complete(tmp_path)
    assert checkpoint is not None and checkpoint.step == 20
    assert torch.equal(checkpoint.tensors()["master.w"], torch.full((3,), 20.0))
    assert len(passed_over) == 1 and "step-000100" in passed_over[0]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    """F11: step 999,999 is older than step 1,000,000."""
    for step in (20, 1_000_000, 999_999):
        save_checkpoint(tmp_path, step, {"w": torch.zeros(1)}, {})
    checkpoint, _ = newest_complete(tmp_path)
    assert checkpoint is not None and checkpoint.step == 1_000_000
    assert [path.name for path in rotate(tmp_path, 1, best_step=20)] == ["step-999999"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_never_reach_a_file(tmp_path: Path, bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"non-finite.*master\.b"):
        save_checkpoint(tmp_path, 3, {"master.a": torch.zeros(2), "master.b": torch.tensor([1.0, bad])}, {})
    assert list(tmp_path.iterdir()) == []


def test_state_of_views_of_one_buffer_comes_back_by_name(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    state = {"master.a": flat[:6].view(2, 3), "master.b": flat[6:].view(3, 2), "step": torch.tensor(4)}
    save_checkpoint(tmp_path, 4, state, {})
    checkpoint, _ = newest_complete(tmp_path)
    assert checkpoint is not None
    tensors = checkpoint.tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in state.items()}
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_state_of_other_parameters_is_refused_by_module(tmp_path: Path) -> None:
    """F7: state is kept by name; other targets are refused by module."""

    def keys(*modules: str) -> list[str]:
        names = [f"base_model.model.model.layers.0.self_attn.{module}.lora_A.weight" for module in modules]
        return [f"{kind}.{name}" for kind in ("master", "exp_avg") for name in names]

    check_same_parameters(keys("q_proj"), keys("q_proj"), tmp_path)
    with pytest.raises(CheckpointError, match=r"the checkpoint has none for o_proj$"):
        check_same_parameters(keys("q_proj", "v_proj"), keys("q_proj", "v_proj", "o_proj"), tmp_path)
    with pytest.raises(CheckpointError, match=r"the run has no v_proj$"):
        check_same_parameters(keys("q_proj", "v_proj"), keys("q_proj"), tmp_path)


def test_a_checkpoint_holds_no_absolute_path(tmp_path: Path) -> None:
    """F9: a run folder may be moved."""
    path = save_checkpoint(tmp_path, 4, {"w": torch.zeros(1)}, {"progress": {"best_step": 2}})
    content = "".join(file.read_text() for file in path.glob("*.json"))
    assert str(tmp_path) not in content and json.loads((path / "progress.json").read_text())["step"] == 4


def test_write_file_replaces_in_one_move(tmp_path: Path) -> None:
    write_file(tmp_path / "run.json", b"one")
    write_file(tmp_path / "run.json", b"two")
    assert (tmp_path / "run.json").read_bytes() == b"two" and names(tmp_path) == ["run.json"]
