"""What `quatrain export` does: merge, write, read back, compare, and only then let the folder appear."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quatrain.checkpoint.atomic import staged_folder
from quatrain.checkpoint.gguf_file import GgufFile
from quatrain.checkpoint.gguf_source import GgufSource, gguf_name
from quatrain.checkpoint.gguf_vocab import gguf_vocabulary
from quatrain.checkpoint.gguf_writer import reordered, write_gguf, write_gguf_adapter
from quatrain.checkpoint.hf_writer import DTYPES, write_configuration, write_weights
from quatrain.checkpoint.merge import Merge, Nf4Base, source_logits
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import read_adapter
from quatrain.config import ExportOptions, InstructConfig
from quatrain.data.modelfile import modelfile
from quatrain.data.records import Message
from quatrain.errors import CheckpointError, ConfigError, PlanError
from quatrain.ops.select import select_backend
from quatrain.train.preflight import EXPORT_FILE, check_writable

if TYPE_CHECKING:
    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.render import ChatRenderer
    from quatrain.data.tokenizer import Tokenizer

ADAPTER_FILE = "adapter.gguf"
PROBE_TEXT = (
    "Hello, it's 3.14 o'clock; WE'LL pay 1234567 in 2024!\n\n  two  spaces\tand a tab\r\n"
    "naïve façade, Привет, 日本語の文, 한국어, 👩‍💻 and {\"key\": [1, 2]} // done\n \n"
)  # fmt: skip
# What rounding may do to the logits, as a share of their spread (root mean square of the difference by the standard
# deviation). A weight's step relative to it is 2^-11 for F16, 2^-8 for BF16 and about the same for Q8_0, 1/31 and 1/15
# of a block's range for Q5 and Q4; deep or random models amplify it
# up to fifty times. A wrong tensor gives about 1.
LARGEST_SHARE = {"f32": 1e-3, "f16": 0.03, "bf16": 0.2, "q8_0": 0.2, "q5_1": 0.5, "q5_0": 0.5, "q4_1": 0.8, "q4_0": 0.8}


@dataclass(frozen=True)
class Job:
    """An adapter, its base, and how text becomes a prompt for it. `tokenizer` and `renderer` are those of training;
    None where the model has none. `prompt` are the data options of training that say how prompts are made."""

    options: ExportOptions
    source: ModelSource
    adapter: Path
    engine: InstructConfig
    tokenizer: Tokenizer | None
    renderer: ChatRenderer | None
    prompt: dict[str, Any] = field(default_factory=dict)


@dataclass
class Exported:
    """How far the export, as read back, is from the adapter as it was trained, in the logits of a probe prompt:
    `difference` is the largest, `share` the root mean square as a share of the logits' spread. `effect` is the largest
    difference between the adapter and its bare base. None for an adapter alone."""

    folder: Path
    base: str
    type: str
    files: dict[str, int] = field(default_factory=dict)
    difference: float | None = None
    share: float | None = None
    effect: float | None = None
    notices: list[str] = field(default_factory=list)


def export(job: Job, report: Callable[[str], None] = lambda text: None) -> Exported:
    """Write the export of `job` and return what it is. The base and the adapter are only read.

    Raises ConfigError for options that do not fit, ModelError or CheckpointError for what cannot be merged or written,
    or does not read back as it should; nothing appears at `out` then.
    """
    options = job.options
    folder = check_target(options)
    base = _trained_on(job) if options.base == "auto" else options.base
    merge = Merge(job.source, read_adapter(job.adapter), _nf4(job, base))
    kind = _type(options, job.source)
    done = Exported(folder, base, kind, notices=list(merge.notices))
    _check_disk(folder, merge, kind)
    with staged_folder(folder) as stage:
        report("merging and writing")
        done.notices += WRITERS[options.format](job, merge, kind, stage) + _left_out(job)
        report("reading back and comparing")
        if options.format == "gguf-adapter":
            _compare_adapter(merge, kind, stage)
        else:
            _compare(job, merge, open_source(str(stage)), done)
        (stage / EXPORT_FILE).write_text(json.dumps(_record(job, done), indent=2) + "\n")
    done.files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return done


def check_target(options: ExportOptions) -> Path:
    """The folder to write. Raises ConfigError unless it is new, empty, or an earlier export that may be replaced."""
    if not options.out:
        raise ConfigError("nothing given for out", hint="give --out FOLDER")
    folder = Path(options.out).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out: {folder} is a file, want a folder", hint="choose another --out")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / EXPORT_FILE).is_file():
            raise ConfigError(f"out: {folder} is not empty and holds no export", hint="choose a new folder for --out")
        if not options.overwrite:
            raise ConfigError(f"out: {folder} already holds an export", hint="--overwrite to replace it")
    check_writable(folder)
    return folder


def write_hf(job: Job, merge: Merge, kind: str, folder: Path) -> list[str]:
    """The merged model as a Hugging Face folder."""
    write_weights(folder, merge.shapes, merge.merged, DTYPES[kind])
    write_configuration(folder, job.source, job.tokenizer, end_ids(job), DTYPES[kind])
    return []


def write_gguf_model(job: Job, merge: Merge, kind: str, folder: Path) -> list[str]:
    """The merged model as one GGUF file."""
    return write_gguf(folder / f"model-{kind}.gguf", merge, kind, _vocabulary(job), folder_name(job))


def write_ollama(job: Job, merge: Merge, kind: str, folder: Path) -> list[str]:
    """The GGUF file and a Modelfile; the template first, since it may be one that Ollama cannot have."""
    if job.renderer is None:
        raise ConfigError(f"{job.source.name} has no tokenizer, and Ollama needs one", hint="use --format gguf")
    bos_added = bool(_vocabulary(job).get("tokenizer.ggml.add_bos_token"))
    text, notices = modelfile(f"model-{kind}.gguf", job.renderer, bos_added=bos_added, system=job.prompt.get("system"))
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    return [*notices, *write_gguf_model(job, merge, kind, folder)]


def write_adapter(job: Job, merge: Merge, kind: str, folder: Path) -> list[str]:
    """The adapter alone as GGUF."""
    write_gguf_adapter(folder / ADAPTER_FILE, merge, kind, folder_name(job))
    if _trained_on(job) == "source":
        return []
    return ["it was trained on the base in NF4: on a base in another type its answers differ; --format gguf has both"]


def _left_out(job: Job) -> list[str]:
    """What prompts of the training have and other programs cannot know from the files."""
    notices = []
    dated = job.renderer is not None and "strftime_now" in job.renderer.template.text  # the only way to the date
    if job.options.format != "ollama" and (system := job.prompt.get("system")):
        notices.append(f"prompts of the training have the system text {system!r}: other programs must be given it")
    if dated and job.options.format != "ollama" and (date := job.prompt.get("template_date")):
        notices.append(f"prompts of the training have the date {date}: other programs print today's")
    return notices


WRITERS = {"hf": write_hf, "gguf": write_gguf_model, "ollama": write_ollama, "gguf-adapter": write_adapter}


def folder_name(job: Job) -> str:
    return Path(job.options.out).name


def _vocabulary(job: Job) -> dict[str, Any]:
    """The tokenizer's keys: those of the base where that is a GGUF file, with the template of training."""
    if job.tokenizer is None or job.renderer is None:
        return {"tokenizer.ggml.model": "none"}
    bos = job.tokenizer.bos_token
    written = bos is not None and job.renderer.prompt_text([Message("user", PROBE_TEXT)]).startswith(bos)
    if isinstance(job.source, GgufSource):
        keys = {**job.source.tokenizer_metadata, "tokenizer.chat_template": job.tokenizer.chat_template or ""}
        keys["tokenizer.ggml.add_bos_token"] = job.tokenizer.add_bos and written
    else:
        rows = job.source.spec.vocab_size
        keys = gguf_vocabulary(job.tokenizer, rows, PROBE_TEXT, bos_written=written)
    others = [index for index in end_ids(job) if index != job.tokenizer.eos_id]
    return keys | ({"tokenizer.ggml.eot_token_id": others[0]} if others else {})


def end_ids(job: Job) -> tuple[int, ...]:
    """Every token that ends an answer: the model's, and what the template writes behind one."""
    ids = list(job.source.eos_token_ids)
    if job.renderer is not None:
        found = (job.renderer.tokenizer.token_id(token) for token in job.renderer.traits.end_tokens)
        ids += [index for index in found if index is not None]
    return tuple(dict.fromkeys(ids))


def probe_ids(job: Job) -> list[int]:
    """The prompt that models are compared on: a chat with a system text if the template takes it, else plain text."""
    if job.tokenizer is None:
        ids = list(range(min(job.source.spec.vocab_size, 32)))
    elif job.renderer is None:
        ids = job.tokenizer.encode(PROBE_TEXT, bos=True)
    else:
        ids = job.renderer.prompt_ids(PROBE_TEXT)
    return ids[: job.source.spec.max_position_embeddings]


def _trained_on(job: Job) -> str:
    return "dequantised" if job.engine.quantize == "nf4" else "source"


def _nf4(job: Job, base: str) -> Nf4Base | None:
    if base == "source":
        return None
    backend = select_backend("cpu", torch.float32, "auto", torch.get_num_threads())
    return Nf4Base(job.engine.double_quant, backend.quantize)


def _type(options: ExportOptions, source: ModelSource) -> str:
    if options.format in ("hf", "gguf-adapter") and options.type not in ("auto", *DTYPES):
        raise ConfigError(
            f"type: {options.type} is for merged GGUF files; --format {options.format} takes {', '.join(DTYPES)}",
            hint="--type bf16, or --format gguf",
        )
    stored = {info.dtype.lower() for info in source.inventory().values()}
    if options.type != "auto":
        return options.type
    if options.format == "hf":
        return "f16" if "f16" in stored and "bf16" not in stored else "bf16"
    return {"ollama": "q8_0", "gguf": "f16", "gguf-adapter": "f32"}[options.format]


def _check_disk(folder: Path, merge: Merge, kind: str) -> None:
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}[kind]
    values = sum(torch.Size(shape).numel() for shape in merge.shapes.values())
    need = int(values * bits / 8)
    free = shutil.disk_usage(next(path for path in folder.parents if path.exists())).free
    if free < need:
        raise PlanError(
            f"{folder} needs {need / 1e6:,.0f} MB; the disk has {free / 1e6:,.0f} MB left",
            hint="free some space, choose another --out, or a smaller --type",
        )


def _compare(job: Job, merge: Merge, written: ModelSource, done: Exported) -> None:
    """What was written, read back: ids of a text and a prompt, logits of the prompt."""
    ids = probe_ids(job)
    _compare_ids(job, written)
    want, got = merge.adapter_logits(ids), source_logits(written, ids)
    share = _share(got, want)
    if not share <= LARGEST_SHARE[done.type]:
        raise CheckpointError(
            f"the export read back has other logits than the adapter: they differ by {share:.3g} of their spread, "
            f"want at most {LARGEST_SHARE[done.type]:g}",
            hint="nothing was written; please report this with the model's name",
        )
    trained = _nf4(job, _trained_on(job))
    if (trained is None) != (merge.nf4 is None):
        done.notices.append(f"the adapter was trained on the other base ({_trained_on(job)}), so logits differ by more")
        merge = merge.onto(trained)
        want = merge.adapter_logits(ids)
    done.share = _share(got, want)
    done.difference = float((got - want).abs().max())
    done.effect = float((merge.base_logits(ids) - want).abs().max())
    if done.difference > done.effect / 2:
        done.notices.append(
            f"the export is off by {done.difference:.3g} where the adapter moved the logits by {done.effect:.3g}: a "
            "finer --type, or the base that it was trained on, keeps more of what was learned"
        )


def _share(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.std())


def _compare_ids(job: Job, written: ModelSource) -> None:
    """A text by itself, and a prompt as other programs make it: rendered, then encoded with control tokens."""
    if job.tokenizer is None or job.renderer is None:
        return
    other = written.tokenizer()
    assert other is not None
    prompt = job.renderer.prompt_text([Message("user", PROBE_TEXT)])
    bos = job.options.format == "hf"  # a GGUF file's flag is about prompts
    pairs = [(job.tokenizer.encode(PROBE_TEXT, bos=bos), other.encode(PROBE_TEXT, bos=bos))]
    pairs.append((job.renderer.prompt_ids(PROBE_TEXT), other.encode(prompt, bos=True, parse_special=True)))
    for want, got in pairs:
        if want != got:
            at = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), len(got))
            raise CheckpointError(
                f"the tokenizer of the export differs: token {at} of a probe text is {got[at : at + 3]}, "
                f"want {want[at : at + 3]}",
                hint="nothing was written; --format hf keeps the tokenizer's own files, GGUF has its own rules",
            )


def _compare_adapter(merge: Merge, kind: str, stage: Path) -> None:
    """The adapter read back: every pair, in llama.cpp's row order, to one rounding."""
    file = GgufFile(stage / ADAPTER_FILE)
    for name in merge.shapes:
        for part, tensor in zip("ab", merge.lora(name) or (), strict=False):
            want = reordered(merge.spec, name, tensor) if part == "b" else tensor
            stored = f"{gguf_name(name)}.lora_{part}"
            if stored not in file.tensors or not torch.equal(file.read(stored), want.to(DTYPES[kind]).float()):
                raise CheckpointError(f"{stored} does not read back as it was", hint="nothing was written")


def _record(job: Job, done: Exported) -> dict[str, Any]:
    """Where the export comes from; also what marks its folder as one."""
    from importlib.metadata import version

    return {
        "quatrain": version("quatrain"),
        "format": job.options.format,
        "type": done.type,
        "model": job.source.name,
        "model_fingerprint": job.source.fingerprint(),
        "merged_into": done.base,
        "max_logit_difference": done.difference,
        "share_of_spread": done.share,
        "adapter_effect": done.effect,
        # The template itself is in the tokenizer's files.
        "prompt": {name: value for name, value in job.prompt.items() if name != "chat_template"},
    }
