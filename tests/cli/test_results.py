"""Whatever Quatrain writes, `chat` and `eval` open, with the prompts of the training and the loss of the adapter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from oracles import families
from tiny_model import write_rows
from trained import write_base

from quatrain.checkpoint.gguf_file import GgufFile
from quatrain.checkpoint.gguf_writer import _add
from quatrain.cli.main import main
from quatrain.data.tokenizer import Tokenizer
from quatrain.train.pipeline import InstructPipeline

SYSTEM = "By {{x}}."
# Prints the date and the system text, as Llama 3.1's does.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>on {{ strftime_now('%d %b %Y') }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a system text, its own date and a template of its own; and everything it can become."""
    folder = tmp_path_factory.mktemp("world")
    write_base(folder / "model", families.BY_NAME["llama"])
    (folder / "mine.jinja").write_text(TEMPLATE)
    words = ["train", "--model", str(folder / "model"), "--data", str(write_rows(folder / "rows.jsonl", 16))]
    words += ["--out", str(folder / "run"), "--chat-template", str(folder / "mine.jinja"), "--system", SYSTEM]
    words += ["--template-date", "2001-02-03", "--compute-dtype", "fp32", "--max-steps", "6", "--lr", "2e-2"]
    assert main([*words, "--lora-rank", "4"]) == 0
    for form in ("hf", "gguf", "ollama", "gguf-adapter"):
        words = ["export", "--adapter", str(folder / "run"), "--format", form, "--type", "f32"]
        assert main([*words, "--out", str(folder / form)]) == 0
    (folder / "mine.jinja").unlink()
    return folder


def place(world: Path, form: str) -> list[str]:
    """The words that open a result."""
    if form == "base+adapter":
        # Out of its run folder, an adapter knows its template; the rest of the prompt was the run's.
        shutil.copytree(world / "run" / "adapter", world / "moved", dirs_exist_ok=True)
        return ["--model", str(world / "model"), "--adapter", str(world / "moved"), "--system", SYSTEM]
    return ["--model", str(world / form)]


def prompt_and_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> tuple[list[int], str]:
    prompts: list[list[int]] = []
    stream = InstructPipeline.stream

    def watched(self: InstructPipeline, ids: list[int], config: object) -> object:
        prompts.append(list(ids))
        return stream(self, ids, config)  # type: ignore[arg-type]

    monkeypatch.setattr(InstructPipeline, "stream", watched)
    capsys.readouterr()
    assert main(["chat", *words, "--max-new-tokens", "8", "--compute-dtype", "fp32", "Paint room 3"]) == 0
    return prompts[0], capsys.readouterr().out


def loss(capsys: pytest.CaptureFixture[str], world: Path, words: list[str]) -> float:
    capsys.readouterr()
    assert main(["eval", *words, "--compute-dtype", "fp32", "--json", str(world / "rows.jsonl")]) == 0
    return float(json.loads(capsys.readouterr().out)["eval_loss"])


RESULTS = ["run/adapter", "base+adapter", "hf", "gguf", "gguf/model-f32.gguf", "ollama", "ollama/Modelfile"]


@pytest.mark.parametrize("form", RESULTS)
def test_every_result_opens_and_prompts_as_the_run_did(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """L5, B14: the prompt of the training, its system text and its date included; the same answer, the same loss."""
    want, want_answer = prompt_and_answer(monkeypatch, capsys, place(world, "run"))
    tokenizer = Tokenizer.from_folder(world / "run" / "adapter")
    assert tokenizer is not None and tokenizer.decode(want).startswith(f"<|im_start|>system {SYSTEM}<|im_end|>")
    got, answer = prompt_and_answer(monkeypatch, capsys, place(world, form))
    assert (got, answer) == (want, want_answer)
    words = place(world, form)
    assert loss(capsys, world, words) == pytest.approx(loss(capsys, world, place(world, "run")), rel=1e-4)
    base = loss(capsys, world, ["--model", str(world / "model"), "--system", SYSTEM])
    assert abs(base - loss(capsys, world, words)) > 0.1


def test_the_date_of_the_training_goes_along(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L5: a template that prints the date prints that of the training, also in a merged model."""
    for form in ("run", "hf", "gguf"):
        ids, _ = prompt_and_answer(monkeypatch, capsys, [*place(world, form), "--system", ""])
        tokenizer = Tokenizer.from_folder(world / "run" / "adapter")
        assert tokenizer is not None and tokenizer.decode(ids).startswith("<|im_start|>on 03 Feb 2001<|im_end|>")


def test_a_file_of_options_may_name_the_model_and_the_data(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does for a training; a flag or an argument beats it."""
    file, rows = tmp_path / "options.yaml", world / "rows.jsonl"
    file.write_text(f"model: {world / 'run'}\ndata: {rows}\ncompute_dtype: fp32\n")
    assert main(["eval", "--config", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == loss(capsys, world, ["--model", str(world / "run")])
    (tmp_path / "one.jsonl").write_text(rows.read_text().splitlines()[0] + "\n")
    words = ["eval", "--config", str(file), "--model", str(world / "model"), "--json", str(tmp_path / "one.jsonl")]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    file.write_text(f"adapter: {world / 'run'}\nformat: gguf\nout: {tmp_path / 'out'}\n")
    assert main(["export", "--config", str(file)]) == 0 and (tmp_path / "out").is_dir()
    file.write_text("model: [1]\n")
    assert main(["chat", "--config", str(file), "hi"]) == 2
    assert "model: want text, got ['1']" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["hf", "gguf", "ollama"])
def test_what_other_programs_cannot_know_is_told(world: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """L5: a system text and a date that only the run knows; a Modelfile has both."""
    words = ["export", "--adapter", str(world / "run"), "--format", form, "--out", str(world / form), "--overwrite"]
    capsys.readouterr()
    assert main([*words, "--type", "f32"]) == 0
    said = capsys.readouterr().out
    for text in (f"the system text '{SYSTEM}'", "the date 2001-02-03"):
        assert (text in said) == (form != "ollama")
    if form == "ollama":
        assert f'SYSTEM """{SYSTEM}"""' in (world / form / "Modelfile").read_text()


def test_an_export_is_used_as_it_is_stored(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I10: a merged model is not quantised again, unless asked to."""
    want = loss(capsys, world, ["--model", str(world / "hf"), "--quantize", "none"])
    assert loss(capsys, world, ["--model", str(world / "hf")]) == want
    assert loss(capsys, world, ["--model", str(world / "hf"), "--quantize", "nf4"]) != want


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gguf-adapter"], "an adapter alone, not a model"),
        (["--model", "gguf-adapter/adapter.gguf"], "an adapter alone, not a model"),
        (["--model", "model", "--adapter", "gguf-adapter/adapter.gguf"], "an adapter as GGUF is for llama.cpp"),
    ],
)
def test_an_adapter_as_gguf_is_named(
    world: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["chat", *(w if w.startswith("--") else str(world / w) for w in words), "hello"]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said and re.search(r"try: .*adapter folder", said)


def edited(world: Path, folder: Path, change: str, to: str) -> Path:
    shutil.copytree(world / "ollama", folder)
    text = (folder / "Modelfile").read_text()
    assert change in text
    (folder / "Modelfile").write_text("# mine\n" + text.replace(change, to))
    return folder


def test_an_edited_modelfile(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L7: its system text and parameters are taken; what has no counterpart, or does not fit the template, is told."""
    folder = edited(world, tmp_path / "a", "PARAMETER temperature 0", "PARAMETER num_predict 1\nPARAMETER num_ctx 9")
    (folder / "Modelfile").write_text((folder / "Modelfile").read_text().replace(SYSTEM, "B\n# b."))
    ids, _ = prompt_and_answer(monkeypatch, capsys, ["--model", str(folder), "--top-k", "3"])
    tokenizer = Tokenizer.from_folder(world / "run" / "adapter")
    assert tokenizer is not None and tokenizer.decode(ids).startswith("<|im_start|>system B\n# b.<|im_end|>")
    assert main(["chat", "--model", str(folder), "Paint room 3"]) == 0
    said = capsys.readouterr().err
    assert "PARAMETER num_ctx 9 has no counterpart" in said and "stopped after 1 tokens" in said
    assert "TEMPLATE is not" not in said
    folder = edited(world, tmp_path / "b", "{{ range $i", "Hear! {{ range $i")
    assert main(["chat", "--model", str(folder), "Paint room 3", "--max-new-tokens", "2"]) == 0
    assert "TEMPLATE is not the model's own chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM llama3.2\n", "FROM llama3.2: no such file"),
        ("FROM ./model-f32.gguf\nADAPTER ./a.gguf\n", "a base with an adapter as GGUF is not supported"),
        ("# FROM ./model-f32.gguf\n", "no FROM line"),
        ("FROM ./model-f32.gguf\nPARAMETER temperature hot\n", "PARAMETER temperature: want a number, got 'hot'"),
        ("FROM ./model-f32.gguf\nPARAMETER top_k 4.5\n", "PARAMETER top_k: want a whole number, got '4.5'"),
        ("FROM ./model-f32.gguf\nPARAMETER min_p\n", "PARAMETER min_p: want a number, got ''"),
    ],
)
def test_modelfiles_that_cannot_be_opened(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "Modelfile").write_text(text)
    (tmp_path / "model-f32.gguf").symlink_to(world / "gguf" / "model-f32.gguf")
    assert main(["chat", "--model", str(tmp_path), "hello"]) == 1
    assert message in capsys.readouterr().err


def test_a_gguf_of_foreign_quantisation(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L6: types that Quatrain never writes are read as far as the gguf library expands them; the same numbers in fp32
    have the same loss. A type without an expansion is named."""
    source = GgufFile(world / "gguf" / "model-f32.gguf")
    generator = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.IQ4_NL
    scale = np.frombuffer(np.float16(0.002).tobytes(), dtype=np.uint8)
    raw = {}
    for name, tensor in source.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            blocks = generator.integers(0, 256, (tensor.shape[0], tensor.shape[1] // 32, 18), dtype=np.uint8)
            blocks[:, :, :2] = scale
            raw[name] = blocks.reshape(tensor.shape[0], -1)
    plain = {name: gguf.dequantize(blocks, kind) for name, blocks in raw.items()}
    _rewrite(source, tmp_path / "iq4.gguf", raw, kind)
    _rewrite(source, tmp_path / "f32.gguf", plain, gguf.GGMLQuantizationType.F32)
    got, want = (loss(capsys, world, ["--model", str(tmp_path / f"{name}.gguf")]) for name in ("iq4", "f32"))
    assert got == want
    assert main(["chat", "--model", str(tmp_path / "iq4.gguf"), "hello", "--max-new-tokens", "2"]) == 0
    _rewrite(source, tmp_path / "i8.gguf", {"output_norm.weight": np.ones(64, np.int8)}, gguf.GGMLQuantizationType.I8)
    assert main(["chat", "--model", str(tmp_path / "i8.gguf"), "hello"]) == 1
    assert "output_norm.weight is I8: not supported; supported: F32, F16" in capsys.readouterr().err


def _rewrite(source: GgufFile, path: Path, tensors: dict[str, Any], kind: gguf.GGMLQuantizationType) -> None:
    """The file with some tensors in another type."""
    writer = gguf.GGUFWriter(path, source.metadata["general.architecture"])
    for key, value in source.metadata.items():
        if key not in ("general.architecture", "GGUF.version"):
            _add(writer, key, value)
    for name in source.tensors:
        if name in tensors:
            writer.add_tensor(name, tensors[name], raw_dtype=kind)
        else:
            writer.add_tensor(name, source.read(name).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
