"""The one home of options and their defaults.

Every option is a typed, range-checked field with a description: flags, YAML keys, `docs/cli.md` and error messages all
come from here. `build` reports all problems of a configuration at once.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quatrain.errors import ConfigError

ClipMode = Literal["global", "layer", "none"]
CheckpointMode = Literal["auto", "block", "none"]
ComputeDtype = Literal["auto", "bf16", "fp32", "fp64"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


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
        description="'all-linear' (never the output head), a list of exact last names, or one full-match regular expression",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(r)")
    learning_rate: float = Field(2e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW's denominator term")
    max_seq_len: int = Field(512, ge=2, description="longest row in tokens")
    max_grad_norm: float = Field(1.0, gt=0, description="clip the gradient norm to this")
    clip: ClipMode = Field("global", description="what the norm spans: all adapters, one layer, or no clipping")
    quantize: Literal["nf4", "none"] = Field("nf4", description="how the frozen linears are held")
    double_quant: bool = Field(True, description="quantise NF4's block statistics to 8 bits")
    compute_dtype: ComputeDtype = Field("auto", description="bf16 where the hardware multiplies it, else fp32")
    checkpoint: CheckpointMode = Field("auto", description="recompute each block (block), keep all (none), or keep what fits")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to run")
    train_norms: bool = Field(False, description="train the RMSNorm weights too")
    seed: int = Field(42, ge=0, lt=2**31, description="one seed for init, split, order and dropout")
    micro_batch_tokens: int | None = Field(
        None, ge=2, description="tokens of one packed micro-batch; default: max(max_seq_len, 2048)"
    )
    memory_budget: int | None = Field(
        None, gt=0, description="bytes the whole process may take, e.g. 1.5GB; default: 80 percent of what is available"
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


OptionsT = TypeVar("OptionsT", bound=Options)


def build(cls: type[OptionsT], values: dict[str, Any], *, where: str = "options") -> OptionsT:
    """`cls(**values)`, or one ConfigError that lists every problem, with the near name for an unknown key."""
    try:
        return cls(**values)
    except ValidationError as error:
        lines = [_problem(cls, problem) for problem in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _problem(cls: type[Options], problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"]) or "options"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f"unknown option {name!r}" + (f", did you mean {near[0]!r}?" if near else "")
    return f"{name}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"
