"""Every command on a tiny real model: what it says, what it leaves behind, how it fails."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CHATML, write_rows, write_tiny_model

from quatrain.cli.main import main

QUICK = ["--compute-dtype", "fp32", "--lora-rank", "4", "--max-seq-len", "64"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", 16)
    return folder


@pytest.fixture(scope="module")
def run_folder(world: Path) -> Path:
    out = world / "first run"
    assert main(train_words(world, out, "--epochs", "2", "--val-split", "0.25", "--lr", "5e-3")) == 0
    return out


def train_words(world: Path, out: Path, *more: str) -> list[str]:
    data = ["--model", str(world / "model"), "--data", str(world / "rows.jsonl")]
    return ["train", *data, "--out", str(out), *QUICK, *more]


def test_train_says_what_it_does_and_leaves_a_complete_run(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: the resolved options are saved. M3: nothing is written to the working folder. M5: why it runs on the CPU.
    I5: the matched modules are listed."""
    out = tmp_path / "a run"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(train_words(world, out, "--max-steps", "3", "--eval-every", "2", "--val-split", "0.25")) == 0
    said = capsys.readouterr().out
    for part in (
        "llama, 23,808 parameters, 2 layers",
        "CPU because torch",
        "q_proj      2 modules",
        "16 rows read, 16 used, 0 skipped",
        "12 rows to train on, 4 held out",
        "3 optimizer steps, 1 of them warm-up",
        "planned peak",
        "max_steps = 3, eval_every = 2",
        "step 3/3",
        "step 2: loss",
        "best evaluation: loss",
        f"quatrain chat --model '{out}'",
    ):
        assert part in said, part
    record = json.loads((out / "run.json").read_text())
    assert record["result"]["ending"] == "finished" and record["result"]["step"] == 3
    assert record["options"]["max_steps"] == 3 and record["options"]["batch_size"] == 8
    assert record["plan"]["total_bytes"] > 0 and record["result"]["peak_memory_bytes"] > 0
    assert record["versions"]["quatrain"] and len(record["model_sha256"]) == len(record["data_sha256"]) == 64
    assert list((tmp_path / "here").iterdir()) == []  # nothing is written where the user happens to be
    left = ["adapter", "checkpoints", "metrics.jsonl", "report.html", "run.json"]
    assert sorted(path.name for path in out.iterdir()) == left
    assert (out / "adapter" / "tokenizer.json").read_bytes() == (world / "model" / "tokenizer.json").read_bytes()


def test_report_is_built_again_from_the_run_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / run_folder.name
    shutil.copytree(run_folder, moved)
    (moved / "report.html").unlink()
    assert main(["report", str(moved)]) == 0
    assert str(moved / "report.html") in capsys.readouterr().out
    again, live = (folder / "report.html" for folder in (moved, run_folder))
    assert again.read_text() == live.read_text()
    assert "4 of 4" in live.read_text() and ">finished</span>" in live.read_text()
    assert main(["report", str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err
    (moved / "run.json").write_text("{")
    assert main(["report", str(moved)]) == 1
    assert "the page could not be written" in capsys.readouterr().err


def test_training_learns(run_folder: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for model in (run_folder, world / "model"):
        assert (
            main(["eval", "--model", str(model), str(world / "rows.jsonl"), "--json", "--compute-dtype", "fp32"]) == 0
        )
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert losses[0] < losses[1] - 0.1


def test_eval_of_run_adapter_and_base_with_adapter_agree(
    run_folder: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for words in (
        ["--model", str(run_folder)],
        ["--model", str(run_folder / "adapter")],
        ["--model", str(world / "model"), "--adapter", str(run_folder)],
    ):
        assert main(["eval", *words, "--data", str(world / "rows.jsonl"), "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] == said[2] and said[0]["rows"] == 16


def test_eval_for_people(run_folder: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--model", str(run_folder), str(world / "rows.jsonl")]) == 0
    assert "supervised tokens in 16 rows" in capsys.readouterr().out


def test_check_shows_marked_samples(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(world / "model"), str(world / "rows.jsonl")]) == 0
    said = capsys.readouterr().out
    assert (
        "16 rows read, 16 used, 0 skipped" in said
        and " it is<|im_end|>]]" in said
        and "<|im_start|>user\nPaint" in said
    )


def test_check_json_and_dump(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((world / "rows.jsonl").read_text() + '{"instruction": "Say nothing", "response": ""}\n')
    dump = tmp_path / "dump.jsonl"
    assert main(["check", "--model", str(world / "model"), str(rows), "--json", "--dump", str(dump)]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert (totals["read"], totals["used"], sum(totals["skipped"].values())) == (17, 16, 1)
    lines = [json.loads(line) for line in dump.read_text().splitlines()]
    assert len(lines) == 17 and lines[0]["source"].endswith("rows.jsonl:1") and "skipped" in lines[16]
    assert len(lines[0]["input_ids"]) == len(lines[0]["labels"]) and set(lines[0]["labels"]) != {-100}


def test_check_of_rows_that_cannot_be_used(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "response": "b"}\n{"instruction": "a"\n')
    assert main(["check", "--model", str(world / "model"), str(rows)]) == 3
    said = capsys.readouterr()
    assert "rows.jsonl:2" in said.out and said.err.startswith("error: 1 of 2 rows cannot be used")
    assert len(said.err.splitlines()) == 2


def test_a_zero_stops_train_before_the_weights(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: a limit that leaves nothing to learn from ends the run before the weights are read."""
    monkeypatch.setattr("quatrain.checkpoint.load.load_params", lambda *_, **__: pytest.fail("weights were read"))
    assert main(train_words(world, tmp_path / "out", "--max-seq-len", "10")) == 3
    assert "error: 100% of the rows have no supervised token left" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ('{"instruction": "Fill the card", "output": {"name": "Ada"}}', CHATML, "1 x output is an object"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            None,
            "no chat template",
        ),
    ],
    ids=["A11", "B13"],
)
def test_data_of_no_use_stops_train_before_the_weights(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    template: str | None,
    said: str,
) -> None:
    """A11: an object for an answer. B13: chats for a model without a template. Exit code 3, and no weight is read."""
    monkeypatch.setattr("quatrain.checkpoint.load.load_params", lambda *_, **__: pytest.fail("weights were read"))
    write_tiny_model(tmp_path / "model", template=template)
    control = tmp_path / "model" / "tokenizer.json"
    control.write_text(control.read_text().replace("im_start", "begin"))  # else ChatML's tokens say it is ChatML
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    assert main(train_words(tmp_path, tmp_path / "out")) == 3
    assert said in capsys.readouterr().err


def test_plan_reads_no_weight(world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: the need is known from the configuration alone."""
    monkeypatch.setattr("quatrain.checkpoint.hf_folder.HfFolder.tensor", lambda *_: pytest.fail("weights were read"))
    words = ["plan", "--model", str(world / "model"), *QUICK]
    assert main([*words, "--names"]) == 0
    assert "2048 tokens a micro-batch" in (said := capsys.readouterr().out) and "block inputs: hidden.0" in said
    assert main([*words, "--data", str(world / "rows.jsonl"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["total_steps"] == 6 and facts["largest_micro_batch"] < 400
    assert facts["total_bytes"] == sum(entry["bytes"] for entry in facts["entries"])


def test_rows_without_a_supervised_token_are_said_before_step_1(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C3: three of ten rows are longer than the limit: their number and share are shown, and the rest is trained on."""
    (tmp_path / "model").symlink_to(world / "model")
    rows = write_rows(tmp_path / "rows.jsonl", 7)
    long = {"instruction": "x" * 99, "response": "y"}
    rows.write_text(rows.read_text() + (json.dumps(long) + "\n") * 3)
    assert main(train_words(tmp_path, tmp_path / "out", "--max-steps", "1")) == 0
    said = capsys.readouterr().out
    assert "skipped 3 (30%): longer than max_seq_len" in said and said.index("skipped 3") < said.index("step 1/1")


def test_a_run_that_does_not_fit_is_refused(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """M7: a budget below the need is refused with the need, exit code 4."""
    assert main(train_words(world, tmp_path / "out", "--memory-budget", "1MB")) == 4
    assert "error: the run needs" in capsys.readouterr().err


def test_the_same_out_twice_is_refused_and_a_finished_run_is_not_trained_again(
    run_folder: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P6: the same --out a second time."""
    assert main(train_words(world, run_folder)) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(run_folder)]) == 0
    assert "this run is finished: all of its 4 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (["--patience", "2"], 2, "patience 2 can never stop this run: it has 0 evaluations"),
        (["--val-split", "0.25", "--patience", "3"], 2, "it has 3 evaluations in 6 steps"),
        (["--clip", "layer", "--accumulation", "2"], 2, "a step must be one micro-batch"),
        (
            ["--micro-batch-tokens", "70", "--max-seq-len", "80"],
            2,
            "micro_batch_tokens (70) is less than max_seq_len (80)",
        ),
        (["--lora-targets", "q_porj,v_proj"], 2, "'q_porj' names no linear"),
        (["--device", "cuda"], 2, "torch "),
        (["--out", ""], 2, "nothing given for out"),
        (["--data", "no such.jsonl"], 3, "no such.jsonl"),
        (["--model", "./nowhere"], 1, "./nowhere: no such file or folder"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, text: str
) -> None:
    """P4, P5, M3, M5, F10, I5: refused with the reason and an exit code, before anything is written."""
    assert main(train_words(world, tmp_path / "out", *more)) == code
    said = capsys.readouterr().err
    assert text in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "no evaluation will happen in this run"),
        (
            ["--val-split", "0.25", "--eval-every", "99"],
            "eval_every is 99 and the run has 2 steps: one evaluation, at the end",
        ),
        (["--save-every", "1000"], "save_every is 1000 and the run has 2 steps: one checkpoint, at the end"),
        (["--batch-tokens", "400", "--micro-batch-tokens", "100"], "a step of up to 400 tokens is computed in up to"),
        (["--lora-rank", "100"], "rank 100 is larger than"),
    ],
)
def test_what_will_not_happen_is_said(
    world: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    """P4: no evaluation, or a save at the end only. E6: a step cut into micro-batches. I7: a rank that is too large."""
    words = ["plan", "--model", str(world / "model"), "--data", str(world / "rows.jsonl"), *QUICK, "--max-steps", "2"]
    assert main([*words, *more]) == 0
    assert text in capsys.readouterr().out


def test_yaml_and_flags_together(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    options = {
        "model": str(world / "model"),
        "data": str(world / "rows.jsonl"),
        "max_steps": 9,
        "compute_dtype": "fp32",
    }
    config.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
    assert main(["plan", "--config", str(config), "--max-steps", "2"]) == 0
    assert "2 optimizer steps" in capsys.readouterr().out


def test_a_missing_best_adapter_is_said_and_the_run_ends_well(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F9: the best adapter is gone: a warning, and the run still ends well."""
    import shutil

    out = tmp_path / "out"
    assert main(train_words(world, out, "--max-steps", "2", "--val-split", "0.25")) == 0
    shutil.rmtree(out / "adapter")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert "the best adapter (step 2) is no longer in" in capsys.readouterr().out
    assert (out / "adapter" / "adapter_model.safetensors").is_file()


def test_overwrite_replaces_the_run(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(train_words(world, out, "--max-steps", "3")) == 0
    assert main(train_words(world, out, "--max-steps", "1", "--overwrite")) == 0
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000001"]


def test_without_kernels_and_compiler_the_reference_ops_run(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: nothing is compiled at run time. Without the native library the reference ops give the same losses, and the
    reason is said once, before the first step."""
    words = ["--max-steps", "3"]
    assert main(train_words(world, tmp_path / "native", *words)) == 0
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("quatrain.ops.library.available", lambda: (False, "the native library is not installed"))
    capsys.readouterr()
    assert main(train_words(world, tmp_path / "reference", *words)) == 0
    said = capsys.readouterr().out
    notice = "reference: the native library is not installed"
    assert said.count(notice) == 1 and said.index(notice) < said.index("step 1/3")
    native, reference = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("native", "reference")
    )
    assert reference == pytest.approx(native, rel=1e-5) and len(native) == 3


def edit_model(world: Path, tmp_path: Path) -> list[str]:
    return ["--model", str(write_tiny_model(tmp_path / "other", seed=5))]


def test_resume_with_another_model_other_rows_or_other_targets(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F6, F7: what differs from the checkpoint is named; --override applies it."""
    out = tmp_path / "out"
    assert main(train_words(world, out, "--max-steps", "1", "--lora-targets", "q_proj,v_proj")) == 0
    resume: list[Any] = ["train", "--resume", "--out", str(out)]
    other_rows = str(write_rows(tmp_path / "rows.jsonl", 12))
    for more, text in (
        (edit_model(world, tmp_path), "is not the model of this run"),
        (["--data", other_rows], "rows are not those of step-000001"),
        (["--lora-targets", "q_proj,v_proj,o_proj"], "lora_targets: ['q_proj', 'v_proj'] in the checkpoint"),
        (
            ["--lora-targets", "q_proj,v_proj,o_proj", "--max-steps", "2", "--override"],
            "the checkpoint has none for o_proj",
        ),
    ):
        assert main([*resume, *more]) != 0
        assert text in capsys.readouterr().err
    assert main([*resume, "--data", other_rows, "--max-steps", "2", "--lr", "5e-5", "--override"]) == 0
    said = capsys.readouterr().out
    assert "overridden from the next step on: learning_rate: 0.0002 in the checkpoint, 5e-05 now" in said
    assert "going on with the new ones" in said and "step 2/2" in said


def test_the_template_that_was_trained_on_goes_with_the_adapter(world: Path, tmp_path: Path) -> None:
    """B14: the adapter folder holds the template it was trained with; the file that it came from may go."""
    from quatrain.cli.use import open_for_use

    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    out = tmp_path / "out"
    assert main(train_words(world, out, "--max-steps", "1", "--chat-template", str(template))) == 0
    text = template.read_text()
    template.unlink()  # the run must not need it any more
    it = open_for_use(str(out), None)
    assert it.tokenizer().chat_template == text
    assert (out / "adapter" / "tokenizer.json").read_bytes() == (world / "model" / "tokenizer.json").read_bytes()
    assert main(["chat", "--model", str(out), "hello", "--max-new-tokens", "2"]) == 0


def test_ctrl_c_in_a_real_process(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = train_words(world, out, "--max-steps", "100000", "--batch-size", "2")
    command = [sys.executable, "-m", "quatrain.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGINT)
        said, complained = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, complained
    assert f"quatrain train --resume --out {out}" in said and "interrupted" in complained
    steps = len((out / "metrics.jsonl").read_text().splitlines())
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert json.loads((out / "run.json").read_text())["result"]["ending"] == "interrupted"
