"""The one home of options and their defaults.

Every option is a typed, range-checked field with a description: flags, YAML keys, `docs/cli.md` and error messages all
come from here. `build` reports all problems of a configuration at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from datetime import date
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quatrain.errors import ConfigError

ClipMode = Literal["global", "layer", "none"]
CheckpointMode = Literal["auto", "block", "none"]
Kernels = Literal["auto", "reference", "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
ComputeDtype = Literal["auto", "bf16", "fp16", "fp32", "fp64"]
CudaGraph = Literal["auto", "on", "off"]
Fault = Literal["template-twice", "two-bos"]  # findings in rows that stop a run

MOST_WEIGHT = 1000  # of a data source

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


# For editors: what is accepted besides the declared type, and bounds that a validator holds.
_EVERY_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "epoch"}]}
_SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([kKmMgG]?[iI]?[bB])?\s*$"},
        {"type": "null"},
    ]
}
_MOMENT_SCHEMA: dict[str, Any] = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}


def parse_bytes(text: str | int) -> int:
    """Bytes from `1500000000`, `"1.5GB"` or `"1400 MiB"`. Raises ValueError with the accepted forms."""
    if isinstance(text, int):
        return text
    compact = text.replace(" ", "").lower()
    number = compact.rstrip("bgikm")
    unit = compact[len(number) :]
    if unit not in _UNITS or not number:
        raise ValueError(f"want a size such as 1500MB, 1.5GB or 1400MiB, got {text!r}")
    return int(float(number) * _UNITS[unit])


class Options(BaseModel):
    """Base of all option sets: unknown keys are errors, values are checked, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class InstructConfig(Options):
    """How the engine is set up: adapters, optimizer, memory, numerics."""

    lora_rank: int = Field(16, ge=1, description="rank r of every adapter")
    lora_alpha: float = Field(32.0, gt=0, description="adapter scale is alpha / r (rsLoRA: alpha / sqrt(r))")
    lora_targets: str | list[str] = Field(
        "all-linear",
        description="'all-linear' (never the output head), a list of exact last names, or one full-match regex",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(r)")
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        description="AdamW's moment decay rates",
        json_schema_extra={"items": _MOMENT_SCHEMA},
    )
    adam_eps: float = Field(1e-8, gt=0, description="AdamW's denominator term")
    max_seq_len: int = Field(512, ge=2, description="longest row in tokens")
    max_grad_norm: float = Field(1.0, gt=0, description="clip the gradient norm to this")
    clip: ClipMode = Field("global", description="what the norm spans: all adapters, one layer, or no clipping")
    quantize: Literal["nf4", "none"] = Field("nf4", description="how the frozen linears are held")
    double_quant: bool = Field(True, description="quantise NF4's block statistics to 8 bits")
    compute_dtype: ComputeDtype = Field(
        "auto", description="bf16 where the hardware multiplies it, else fp32 (fp16 on a GPU)"
    )
    checkpoint: CheckpointMode = Field(
        "auto", description="recompute each block (block), keep all (none), or keep what fits"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to run; auto is the CPU")
    kernels: Kernels = Field("auto", description="CPU kernels: the strongest there are, the reference ops, or an ISA")
    cuda_graph: CudaGraph = Field(
        "auto", description="replay each step on a GPU as one captured graph; on: fail where that is impossible"
    )
    cache: bool = Field(
        True, description="keep the quantised base and the tokenised data on disk, for the next start to map"
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="where they are kept; default: $QUATRAIN_CACHE_DIR, else quatrain in the user's cache folder",
    )
    train_norms: bool = Field(False, description="train the RMSNorm weights too")
    seed: int = Field(42, ge=0, lt=2**31, description="one seed for init, split, order and dropout")
    micro_batch_tokens: int | None = Field(
        None, ge=2, description="tokens of one packed micro-batch; default: max(max_seq_len, 2048)"
    )
    memory_budget: int | None = Field(
        None,
        gt=0,
        description="bytes the whole process may take, e.g. 1.5GB; default: 80 percent of what is available",
        json_schema_extra=_SIZE_SCHEMA,
    )

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _budget_in_bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"want two numbers in [0, 1), got {value}")
        return value

    @field_validator("lora_targets")
    @classmethod
    def _targets_not_empty(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("want 'all-linear', names such as q_proj, or a regular expression; got nothing")
        return value

    @model_validator(mode="after")
    def _capacity_holds_a_row(self) -> InstructConfig:
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < self.max_seq_len:
            raise ValueError(
                f"micro_batch_tokens ({self.micro_batch_tokens}) is less than max_seq_len ({self.max_seq_len}): "
                "a row of full length would not fit"
            )
        return self

    @property
    def capacity(self) -> int:
        """Tokens that one micro-batch can hold."""
        return self.micro_batch_tokens or max(self.max_seq_len, 2048)

    @property
    def lora_scale(self) -> float:
        return self.lora_alpha / (self.lora_rank**0.5 if self.use_rslora else self.lora_rank)


class GenerateConfig(Options):
    """How text is sampled. Temperature 0 is greedy."""

    max_new_tokens: int = Field(256, ge=1, description="stop after this many tokens")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the smallest set with this probability mass")
    seed: int = Field(42, ge=0, lt=2**31, description="seed of the sampler")
    stop: list[str] = Field(default_factory=list, description="texts that end the answer (not shown)")


class DataOptions(Options):
    """Which rows are read, how they become tokens, and which tokens are learned."""

    format: Literal["auto", "jsonl", "json", "csv", "parquet"] = Field(
        "auto", description="file format; auto looks at the content, not at the name"
    )
    row_schema: Literal["auto", "instruction", "alpaca", "messages", "sharegpt", "prompt"] = Field(
        "auto", description="what a row holds; auto decides for each row and refuses ambiguous ones"
    )
    prompt_field: str | None = Field(None, min_length=1, description="column that holds the prompt")
    response_field: str | None = Field(None, min_length=1, description="column that holds the response")
    system_field: str | None = Field(None, min_length=1, description="column that holds the system text")
    system: str | None = Field(None, description="system text for rows that have none")
    json_fields: list[str] = Field(
        default_factory=list, description="columns whose objects are written as JSON text (one line, keys as they come)"
    )
    chat_template: str | None = Field(
        None, min_length=1, description="a built-in template's name or a Jinja file; default: the model's own"
    )
    template_date: str | None = Field(
        None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="today, YYYY-MM-DD, for templates that print the date; default: the day of the run",
    )
    system_policy: Literal["template", "fold"] = Field(
        "template",
        description="what becomes of system texts: the template decides, or they are put in front of the first user "
        "message with a blank line between, for templates that refuse or ignore them",
    )
    truncation: Literal["drop", "truncate"] = Field(
        "drop", description="a row longer than max_seq_len is dropped and counted, or loses its end"
    )
    train_on_eos: Literal["all", "last", "none"] = Field(
        "all", description="assistant turns whose end token is learned"
    )
    last_turn_only: bool = Field(False, description="learn the last assistant turn only")
    keep_empty: bool = Field(False, description="keep rows with an empty answer: they train the end token alone")
    allow_special: bool = Field(
        False, description="let special-token text inside the data become control tokens (unsafe with foreign text)"
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop", description="a row that cannot be used stops the run, or is counted"
    )
    max_unsupervised: float = Field(
        0.5, ge=0, le=1, description="stop if more than this share of the rows has no supervised token left"
    )
    allow: list[Fault] = Field(
        default_factory=list,
        description="faults of whole sets that do not stop the run: template-twice, two-bos",
    )
    val_split: float = Field(0.0, ge=0, lt=1, description="share of the rows held out for validation")
    validation: str | None = Field(None, min_length=1, description="a file of validation rows")

    @field_validator("template_date")
    @classmethod
    def _day_exists(cls, value: str | None) -> str | None:
        if value is not None:
            date.fromisoformat(value)
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> DataOptions:
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError("prompt_field and response_field go together; set both")
        if self.prompt_field is not None and self.row_schema not in ("auto", "prompt"):
            raise ValueError(f"prompt_field and row_schema={self.row_schema} contradict each other; leave one out")
        if self.val_split and self.validation:
            raise ValueError("val_split and validation contradict each other; leave one out")
        return self


class TrainOptions(Options):
    """How long to train, what one optimizer step holds, and what is kept on the way."""

    epochs: int | None = Field(
        None, ge=1, description="passes over the training rows; default: 3 unless max_steps is given"
    )
    max_steps: int | None = Field(None, ge=1, description="stop after this many optimizer steps (instead of epochs)")
    batch_size: int = Field(8, ge=1, description="rows of one micro-batch")
    accumulation: int = Field(1, ge=1, description="micro-batches of one optimizer step")
    batch_tokens: int | None = Field(
        None, ge=2, description="fill each optimizer step with rows up to this many tokens (instead of counting rows)"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="learning rate after warm-up")
    warmup_steps: int | None = Field(None, ge=0, description="optimizer steps of warm-up (instead of warmup_ratio)")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of all optimizer steps spent warming up")
    lr_floor: float = Field(0.0, ge=0, le=1, description="lowest learning rate, as a fraction of the peak")
    eval_every: int | Literal["epoch"] = Field(
        "epoch",
        description="evaluate every N optimizer steps or every epoch; always at the end as well",
        json_schema_extra=_EVERY_SCHEMA,
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="stop when this many evaluations in a row are no better than the best (NaN is no better)",
    )
    save_every: int | Literal["epoch"] = Field(
        "epoch",
        description="write a checkpoint every N optimizer steps or every epoch; always at the end as well",
        json_schema_extra=_EVERY_SCHEMA,
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="checkpoints to keep: the newest, the best, then the newest of the others"
    )
    max_skipped_steps: int = Field(
        5, ge=1, description="stop when this many steps in a row have non-finite gradients and are skipped"
    )
    track: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="also log to these: tensorboard, wandb, mlflow (repeatable)"
    )
    samples: int = Field(
        3, ge=0, description="validation prompts that are answered at each evaluation, for report.html; 0: none"
    )

    @field_validator("track", mode="before")
    @classmethod
    def _one_tracker_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("eval_every", "save_every", mode="before")
    @classmethod
    def _every_is_positive(cls, value: Any) -> Any:
        if value != "epoch" and not (str(value).isdigit() and int(value) > 0):
            raise ValueError("want 'epoch' or a number of optimizer steps of at least 1")
        return value

    @field_validator("warmup_steps", mode="before")
    @classmethod
    def _warmup_is_whole(cls, value: Any) -> Any:
        try:
            fraction = 0 < float(value) < 1
        except (TypeError, ValueError):
            return value
        if fraction:
            raise ValueError("want a whole number of optimizer steps; did you mean warmup_ratio?")
        return value

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> TrainOptions:
        both = [
            f"{first} and {second} contradict each other: give one of them"
            for first, second in EXCLUSIVE
            if {first, second} <= self.model_fields_set
            and getattr(self, first) is not None
            and getattr(self, second) is not None
        ]
        if both:
            raise ValueError("; ".join(both))
        return self

    @property
    def num_epochs(self) -> int:
        """Epochs of a run that is measured in epochs."""
        return self.epochs or 3


class DataSource(Options):
    """One entry of `data` with its weight, as YAML may spell it."""

    path: str = Field(min_length=1, description="a file, a folder, a glob or a data set of the hub")
    weight: float = Field(1.0, gt=0, le=MOST_WEIGHT, description="how many times an epoch takes its rows")


def _data_source(entry: Any) -> Any:
    """A mapping as a `DataSource`, with one message for whatever is wrong with it."""
    if not isinstance(entry, dict):
        return entry
    try:
        return DataSource(**entry)
    except (ValidationError, TypeError) as error:
        form = "{path: FILE, weight: NUMBER}"
        raise ValueError(f"want {form}, weight above 0 and at most {MOST_WEIGHT}, got {entry}") from error


class RunOptions(Options):
    """What to train on what, where the run folder is, and what to do with one that exists."""

    model: str = Field("", description="a model folder, a GGUF file, a hub id, or the alias smollm2-135m")
    data: list[str | DataSource] = Field(
        default_factory=list,
        description="a data file (JSONL, JSON, CSV or Parquet, also gzipped), a folder of them, or hf:owner/name of "
        "the hub; FILE@0.5 takes half of its rows each epoch, FILE@2 takes each twice (repeatable)",
    )
    out: str = Field("", description="the run folder of train: checkpoints, metrics and the adapter go there")
    adapter: str | None = Field(
        None,
        min_length=1,
        description="an adapter folder (ours or PEFT's) or a run folder to go on from; its rank, alpha, targets and "
        "dropout hold, the optimizer starts afresh",
    )
    resume: bool = Field(False, description="go on from the newest complete checkpoint in the run folder")
    override: bool = Field(False, description="on resume, let options given now replace those of the checkpoint")
    overwrite: bool = Field(False, description="replace an earlier run in the same folder")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; default: what torch finds")

    @field_validator("data", mode="before")
    @classmethod
    def _one_source_is_a_list(cls, value: Any) -> Any:
        entries = [value] if isinstance(value, str | dict) else value
        return [_data_source(entry) for entry in entries] if isinstance(entries, list) else entries

    @model_validator(mode="after")
    def _resume_or_start_over(self) -> RunOptions:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite contradict each other: give one of them")
        if self.override and not self.resume:
            raise ValueError("override only has a meaning together with resume")
        return self


class ExportOptions(Options):
    """What a trained adapter becomes, and where."""

    format: Literal["hf", "gguf", "ollama", "gguf-adapter"] = Field(
        "hf",
        description="a merged Hugging Face folder, a merged GGUF file, a folder for `ollama create`, or the adapter "
        "alone as GGUF",
    )
    out: str = Field("", description="the folder to write; it appears when everything in it is written and compared")
    type: Literal["auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"] = Field(
        "auto",
        description="how weights are stored; auto: the model's own 16 bits (bf16 if it has none) for hf, f16 for gguf, "
        "q8_0 for ollama; hf takes f32, f16 and bf16 only",
    )
    base: Literal["auto", "dequantised", "source"] = Field(
        "auto",
        description="what the adapter is merged into: the dequantised NF4 weights (they give the logits of training) "
        "or the model's own; auto: what it was trained on",
    )
    overwrite: bool = Field(False, description="replace an earlier export in the same folder")


EXCLUSIVE = (
    ("epochs", "max_steps"),
    ("warmup_steps", "warmup_ratio"),
    ("batch_tokens", "batch_size"),
    ("batch_tokens", "accumulation"),
)

# Names that other trainers use for these options: only for the "did you mean" of an unknown name.
_SYNONYMS = {
    "lr": "learning_rate",
    "r": "lora_rank",
    "rank": "lora_rank",
    "lora_r": "lora_rank",
    "alpha": "lora_alpha",
    "target_modules": "lora_targets",
    "quant": "quantize",
    "dropout": "lora_dropout",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulation",
    "gradient_checkpointing": "checkpoint",
    "lr_scheduler_type": "schedule",
    "early_stopping_patience": "patience",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "output_dir": "out",
    "model_name_or_path": "model",
    "bf16": "compute_dtype",
}

OptionsT = TypeVar("OptionsT", bound=Options)


def build(cls: type[OptionsT], values: dict[str, Any], *, where: str = "options") -> OptionsT:
    """`cls(**values)`, or one ConfigError that lists every problem, with the near name for an unknown key."""
    built: OptionsT = build_all((cls,), values, where=where)[cls]
    return built


def build_all(classes: Sequence[type[Any]], values: dict[str, Any], *, where: str = "options") -> dict[type[Any], Any]:
    """Several option sets from one flat mapping. Raises one ConfigError that lists every problem of all of them."""
    known = {name for cls in classes for name in cls.model_fields}
    problems = [_unknown(name, value, known) for name, value in values.items() if name not in known]
    built = {}
    for cls in classes:
        try:
            built[cls] = cls(**{name: value for name, value in values.items() if name in cls.model_fields})
        except ValidationError as error:
            problems += _problems(error)
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    return built


def _unknown(name: str, value: Any, known: Collection[str]) -> str:
    if isinstance(value, dict) and value:
        inside = [str(key) if key in known else _near(str(key), known) or str(key) for key in value]
        return f"unknown option {name!r}: options are not nested; write {', '.join(inside)} at the top level"
    near = _near(name, known)
    return f"unknown option {name!r}" + (f", did you mean {near!r}?" if near else "")


def _near(name: str, known: Collection[str]) -> str | None:
    """The known option that a name most likely stands for."""
    plain = name.replace("-", "_")
    if (synonym := _SYNONYMS.get(plain)) in known:
        return synonym
    return next(iter(difflib.get_close_matches(plain, known, n=1)), None)


def _problems(error: ValidationError) -> list[str]:
    """One line for each option, or item of a list, that is wrong."""
    wants: dict[str, list[str]] = {}
    got: dict[str, Any] = {}
    for problem in error.errors():
        # An option that takes one of several kinds has a problem with each of them, at the same place.
        name, *inside = problem["loc"] or ("",)
        where = str(name) + "".join(f"[{part}]" for part in inside if isinstance(part, int))
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "want")
        if problem["type"] == "missing":
            message = "nothing given, and there is no default"
        elif name and not (problem["type"] == "value_error" and ", got " in message):  # ours may have said it
            got[where] = problem["input"]
        found = wants.setdefault(where, [])
        found.append(message.removeprefix("want ") if found else message)
    return [
        (f"{where}: " if where else "") + " or ".join(texts) + (f" (got {got[where]!r})" if where in got else "")
        for where, texts in wants.items()
    ]
