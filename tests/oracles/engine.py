"""The engine and the oracle side by side, on one tiny model with the same weights and the same adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from oracles import families, hf

from quatrain.config import InstructConfig
from quatrain.ops import library
from quatrain.train.pipeline import InstructPipeline

SETTINGS = {"lora_rank": 4, "lora_alpha": 6.0, "compute_dtype": "fp32", "max_seq_len": 64, "micro_batch_tokens": 64}


def every_kernels() -> list[str]:
    """The reference ops, and each instruction set that this build and this machine have."""
    return ["reference", *(library.supported_isas() if library.available()[0] else [])]


def chosen_kernels() -> list[str]:
    """Of those, what stands for all where a test is long: reference, portable and the strongest."""
    return list(dict.fromkeys(name for name in (*every_kernels()[:2], every_kernels()[-1])))


def make_config(**options: Any) -> InstructConfig:
    return InstructConfig(**{**SETTINGS, **options})


def open_pipeline(variant: families.Variant, folder: Path, config: InstructConfig, seed: int = 3) -> InstructPipeline:
    """Our engine on the variant's saved folder, its adapters set to random values (B not zero)."""
    families.save(variant, folder)
    pipeline = InstructPipeline.from_pretrained(folder, config)
    give_adapters(pipeline, adapter_values(variant, config, seed))
    return pipeline


def adapter_values(variant: families.Variant, config: InstructConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    """Random trained values by PEFT parameter name."""
    model = hf.with_adapters(families.build(variant), config, seed)
    return {name: parameter.detach().clone() for name, parameter in hf.trainable(model).items()}


def give_adapters(pipeline: InstructPipeline, values: dict[str, torch.Tensor]) -> None:
    """Sets every trainable parameter; names must be exactly the engine's."""
    masters = pipeline.adapters.named()
    assert masters.keys() == values.keys()
    for name, master in masters.items():
        master.copy_(values[name])
    pipeline.adapters.refresh()


def open_oracle(variant: families.Variant, config: InstructConfig, seed: int = 3, *, fp64: bool = True) -> Any:
    """transformers + PEFT with the values that the engine computes with: linears through bitsandbytes' NF4."""
    model = families.build(variant)
    if config.quantize == "nf4":
        hf.round_linears_to_nf4(model, double_quant=config.double_quant)
    wrapped = hf.with_adapters(model, config, seed)
    return hf.strict_fp64(wrapped) if fp64 else wrapped
