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
from quatrain.checkpoint.hf_writer import DTYPES, write_configuration, write_weights
from quatrain.checkpoint.merge import Merge, Nf4Base, source_logits
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import read_adapter
from quatrain.config import ExportOptions, InstructConfig
from quatrain.errors import CheckpointError, ConfigError, PlanError
from quatrain.ops.select import select_backend
from quatrain.train.preflight import check_writable

if TYPE_CHECKING:
    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.render import ChatRenderer
    from quatrain.data.tokenizer import Tokenizer

RECORD = "export.json"
PROBE_TEXT = (
    "Hello, it's 3.14 o'clock; WE'LL pay 1234567 in 2024!\n\n  two  spaces\tand a tab\r\n"
    "naïve façade, Привет, 日本語の文, 한국어, 👩‍💻 and {\"key\": [1, 2]} // done\n \n"
)  # fmt: skip
# What rounding may do to the logits, as a share of their spread (root mean square of the difference by the standard
# deviation). A weight's step relative to it is 2^-11 for F16, 2^-8 for BF16 and about the same for Q8_0, 1/31 and 1/15
# of a block's range for Q5 and Q4; deep models and random ones amplify it up to fifty times. A wrong tensor gives about 1.
LARGEST_SHARE = {"f32": 1e-3, "f16": 0.03, "bf16": 0.2, "q8_0": 0.2, "q5_1": 0.5, "q5_0": 0.5, "q4_1": 0.8, "q4_0": 0.8}


@dataclass(frozen=True)
class Job:
    """An adapter, its base, and how text becomes a prompt for it. `tokenizer` and `renderer` are those of training;
    None where the model has none."""

    options: ExportOptions
    source: ModelSource
    adapter: Path
    engine: InstructConfig
    tokenizer: Tokenizer | None
    renderer: ChatRenderer | None


@dataclass
class Exported:
    """`difference` is the largest |logit difference| between the export, as read back, and the adapter as it was
    trained, over a probe prompt; `effect` that between the adapter and its bare base. None for an adapter alone."""

    folder: Path
    base: str
    type: str
    files: dict[str, int] = field(default_factory=dict)
    difference: float | None = None
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
        write_hf(job, merge, kind, stage)
        report("reading back and comparing")
        _compare(job, merge, stage, done)
        (stage / RECORD).write_text(json.dumps(_record(job, done), indent=2) + "\n")
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
        if not (folder / RECORD).is_file():
            raise ConfigError(f"out: {folder} is not empty and holds no export", hint="choose a new folder for --out")
        if not options.overwrite:
            raise ConfigError(f"out: {folder} already holds an export", hint="--overwrite to replace it")
    check_writable(folder)
    return folder


def write_hf(job: Job, merge: Merge, kind: str, folder: Path) -> None:
    """The merged model as a Hugging Face folder."""
    write_weights(folder, merge.shapes, merge.merged, DTYPES[kind])
    write_configuration(folder, job.source, job.tokenizer, end_ids(job), DTYPES[kind])


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
    backend = select_backend("cpu", torch.float32, job.engine.kernels, torch.get_num_threads())
    return Nf4Base(job.engine.double_quant, backend.quantize)


def _type(options: ExportOptions, source: ModelSource) -> str:
    stored = {info.dtype.lower() for info in source.inventory().values()}
    if options.type != "auto":
        if options.format == "hf" and options.type not in DTYPES:
            raise ConfigError(
                f"type: {options.type} is a type of GGUF files; a Hugging Face folder takes {', '.join(DTYPES)}",
                hint="--type bf16, or --format gguf",
            )
        return options.type
    if options.format == "hf":
        return "f16" if "f16" in stored and "bf16" not in stored else "bf16"
    return "q8_0" if options.format == "ollama" else "f16"


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


def _compare(job: Job, merge: Merge, stage: Path, done: Exported) -> None:
    """Reads the export back: ids of a text and a prompt, logits of the prompt."""
    written = open_source(str(stage))
    ids = probe_ids(job)
    _compare_ids(job, written)
    want, got = merge.adapter_logits(ids), source_logits(written, ids)
    share = float((got - want).square().mean().sqrt() / want.std())
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
    done.difference = float((got - want).abs().max())
    done.effect = float((merge.base_logits(ids) - want).abs().max())
    if done.difference > done.effect / 2:
        done.notices.append(
            f"the export is off by {done.difference:.3g} where the adapter moved the logits by {done.effect:.3g}: a "
            "finer --type, or the base that it was trained on, keeps more of what was learned"
        )


def _compare_ids(job: Job, written: ModelSource) -> None:
    if job.tokenizer is None:
        return
    other = written.tokenizer()
    for special in (False, True):
        want = job.tokenizer.encode(PROBE_TEXT, bos=True, parse_special=special)
        got = other.encode(PROBE_TEXT, bos=True, parse_special=special) if other else []
        if want != got:
            at = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), len(got))
            raise CheckpointError(
                f"the tokenizer of the export differs: token {at} of a probe text is {got[at : at + 3]}, "
                f"want {want[at : at + 3]}",
                hint="nothing was written; please report this with the model's name",
            )


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
        "adapter_effect": done.effect,
    }
