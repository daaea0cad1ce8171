"""What a run folder must be before anything is read, and what resume does with options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quatrain.config import DataOptions, InstructConfig, RunOptions, TrainOptions
from quatrain.errors import CheckpointError, ConfigError, PlanError
from quatrain.train import preflight
from quatrain.train.preflight import check_disk, check_run_folder, claimed, remove_run
from quatrain.train.settings import FREE_ON_RESUME, OPTION_SETS, Settings, settings_for_resume


def check(out: Path | str, **more: Any) -> Path:
    return check_run_folder(RunOptions(out=str(out), **more))


def an_earlier_run(folder: Path) -> Path:
    (folder / "adapter").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"versions": {"quatrain": "0.1.0"}}))
    (folder / "metrics.jsonl").write_text("")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_good_place_is_probed_and_left_as_it_was(tmp_path: Path) -> None:
    """M3: writing is tried before anything is read, and nothing of the trial stays."""
    assert check(tmp_path / "a" / "b c") == tmp_path / "a" / "b c"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check("~/run") == tmp_path / "run"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc on this system")
def test_an_impossible_place() -> None:
    """M3: a place where nobody can write."""
    with pytest.raises(CheckpointError, match="cannot write in /proc/x"):
        check("/proc/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place(tmp_path: Path) -> None:
    """M3: a folder without write permission."""
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match="Permission denied"):
        check(tmp_path / "x")
    tmp_path.chmod(0o755)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    """M3: a file of that name."""
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check(tmp_path / "x")


def test_a_folder_of_something_else_is_never_taken(tmp_path: Path) -> None:
    """M3: a folder with other things in it."""
    (tmp_path / "thesis.txt").write_text("")
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match="holds no Quatrain run"):
            check(tmp_path, **more)


def test_an_earlier_run_needs_a_word(tmp_path: Path) -> None:
    """M3, P6: a folder with an earlier run needs --resume or --overwrite, which spares foreign files."""
    an_earlier_run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        check(tmp_path)
    assert "--resume" in str(caught.value.hint) and "--overwrite" in str(caught.value.hint)
    check(tmp_path, resume=True)
    check(tmp_path, overwrite=True)
    remove_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    """M3: neither --resume nor --overwrite touches the folder of a run that is going on; later they may."""
    folder = an_earlier_run(tmp_path / "run")
    holder = "import sys; from pathlib import Path; from quatrain.train.preflight import claimed\n"
    holder += "with claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        for more in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match="another process is training in"):
                check(folder, **more)
        process.kill()
    check(folder, resume=True)
    with claimed(folder), pytest.raises(ConfigError, match="another process"):
        check(folder, overwrite=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        check(tmp_path / "new", resume=True)


def test_a_lost_record_costs_no_checkpoint(tmp_path: Path) -> None:
    """M2: without run.json, or with a cut one, a run can still be resumed; without both it is no run."""
    folder = an_earlier_run(tmp_path / "run")
    (folder / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="holds no Quatrain run"):
        check(folder, resume=True)
    (folder / "checkpoints" / "step-000004").mkdir(parents=True)
    check(folder, resume=True)
    with pytest.raises(ConfigError, match="holds no Quatrain run"):
        check(folder, overwrite=True)


def test_a_full_disk_is_known_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: the disk space of the checkpoints is compared with what is free."""
    check_disk(tmp_path / "new", 1000, keep=2)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000))
    with pytest.raises(PlanError, match="the disk has 0 MB left"):
        check_disk(tmp_path / "new", 1_000_000, keep=2)


GIVEN = {"model": "m", "data": ["d.jsonl"], "out": "o", "epochs": "2", "weight_decay": "0.1"}


def saved() -> dict[str, Any]:
    settings = Settings.resolve(GIVEN)
    return json.loads(json.dumps({"given": settings.given, "options": settings.resolved()}))


def test_resume_needs_no_option_again() -> None:
    settings, notes = settings_for_resume({"out": "moved", "resume": True}, saved())
    assert settings.train.epochs == 2 and settings.engine.weight_decay == 0.1 and settings.run.out == "moved"
    assert notes == ["all options come from the checkpoint"]


def test_the_same_option_again_is_no_conflict() -> None:
    again = {"out": "o", "resume": "yes", "weight_decay": "1e-1", "data": ["elsewhere/d.jsonl"]}
    settings, _ = settings_for_resume(again, saved())
    assert settings.engine.weight_decay == 0.1 and settings.run.data == ["elsewhere/d.jsonl"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("epochs", "3", "epochs: 2 in the checkpoint, 3 now"),
        ("learning_rate", "5e-5", "learning_rate: 0.0002 in the checkpoint, 5e-05 now"),
    ],
)
def test_another_value_is_refused_unless_overridden(name: str, value: str, text: str) -> None:
    """F6: other epochs or another learning rate on resume are refused with both values; --override applies them. F4:
    which rule was taken is said."""
    given = {"out": "o", "resume": True, name: value}
    with pytest.raises(ConfigError, match=text) as caught:
        settings_for_resume(given, saved())
    assert "--override" in str(caught.value.hint)
    settings, notes = settings_for_resume({**given, "override": True}, saved())
    assert settings.resolved()[name] == float(value)
    assert notes == [f"overridden from the next step on: {text}"]


def test_override_can_switch_between_options_that_exclude_each_other() -> None:
    settings, _ = settings_for_resume({"out": "o", "resume": True, "override": True, "max_steps": 7}, saved())
    assert settings.train.max_steps == 7 and settings.train.epochs is None


def test_names_are_unique_over_all_option_sets_and_free_ones_exist() -> None:
    names = [name for options in OPTION_SETS for name in options.model_fields]
    assert len(names) == len(set(names)) and set(names) >= FREE_ON_RESUME
    assert set(OPTION_SETS) == {RunOptions, TrainOptions, InstructConfig, DataOptions}


def test_all_problems_at_once_with_near_names() -> None:
    """P4: no epochs, no rows a batch, dropout 1, all held out: refused together, with near names for typos."""
    with pytest.raises(ConfigError) as caught:
        Settings.resolve(
            {
                "lerning_rate": "1",
                "epochs": "0",
                "lora_dropout": "1.0",
                "batch_size": "0",
                "val_split": "1.0",
                "lr": "1",
            }
        )
    text = str(caught.value)
    for part in (
        "'lerning_rate', did you mean 'learning_rate'",
        "epochs:",
        "lora_dropout:",
        "batch_size:",
        "val_split:",
    ):
        assert part in text
    assert "'lr', did you mean 'learning_rate'" in text


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 1, "max_steps": 1},
        {"warmup_steps": 1, "warmup_ratio": 0.1},
        {"batch_tokens": 100, "batch_size": 2},
        {"batch_tokens": 100, "accumulation": 2},
        {"resume": True, "overwrite": True},
        {"override": True},
        {"learning_rate": -1},
        {"threads": 1025},  # torch would start them all, and the native kernels take 1024
        {"learning_rate": "nan"},
        {"eval_every": 0},
        {"save_every": "-3"},
        {"warmup_ratio": 1},
    ],
)
def test_contradictions_and_impossible_values(given: dict[str, Any]) -> None:
    """P4: two ways to say one thing, and values out of range."""
    with pytest.raises(ConfigError):
        Settings.resolve(given)


@pytest.mark.parametrize("value", ["0.1", 0.1])
def test_a_ratio_in_warmup_steps_is_recognised(value: Any) -> None:
    """F2: 0.1 steps of warm-up was meant as a ratio."""
    with pytest.raises(ConfigError, match="did you mean warmup_ratio"):
        Settings.resolve({"warmup_steps": value})


def test_another_adapter_to_start_from_is_refused_on_resume() -> None:
    """F6: a run starts only once, so that --override has nothing to apply."""
    for more in ({}, {"override": True}):
        with pytest.raises(ConfigError, match="adapter: not set in the checkpoint, other now, and a run starts once"):
            settings_for_resume({"resume": True, "adapter": "other", **more}, saved())
