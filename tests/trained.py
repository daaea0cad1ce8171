"""Tiny models of every family with a tokenizer and a trained adapter (random, B not zero), ready to export; and the
same thing under transformers + PEFT."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from oracles import families, hf
from tiny_model import CHATML, write_tiny_model

from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import save_adapter
from quatrain.config import ExportOptions, InstructConfig
from quatrain.data.render import ChatRenderer
from quatrain.data.templates import choose_template
from quatrain.data.tokenizer import Tokenizer
from quatrain.model.adapters import AdapterSet
from quatrain.train.export import Job

VOCAB = 266  # the tokenizer's 264 and rows without a token
CONFIG = InstructConfig(lora_rank=4, lora_alpha=6.0)


def with_vocab(variant: families.Variant) -> families.Variant:
    return dataclasses.replace(variant, options={**variant.options, "vocab_size": VOCAB, "eos_token_id": 258})


def give_merges(path: Path, merges: list[tuple[str, str]]) -> None:
    """Merges, with their tokens behind the 259 there are."""
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab |= {left + right: 259 + rank for rank, (left, right) in enumerate(merges)}
    content["model"]["merges"] = merges
    path.write_text(json.dumps(content))


def write_base(folder: Path, variant: families.Variant, *, template: str | None = CHATML, **options: Any) -> Path:
    write_tiny_model(folder, template=template)
    give_merges(folder / "tokenizer.json", [("t", "h"), ("th", "e"), ("Ġ", "a"), ("1", "2"), ("o", "'")])
    families.save(with_vocab(variant), folder, **options)
    return folder


def write_adapter(folder: Path, base: Path, variant: families.Variant, config: InstructConfig = CONFIG) -> Path:
    model = hf.with_adapters(families.build(with_vocab(variant)), config, seed=3)
    source = open_source(str(base))
    tokenizer = source.tokenizer()
    save_adapter(
        folder, {name: p.detach() for name, p in hf.trainable(model).items()}, config, num_layers=3,
        base_name=str(base), base_fingerprint=source.fingerprint(),
        files=tokenizer.files_to_save() if tokenizer else None,
    )  # fmt: skip
    return folder


def write_smollm2_adapter(folder: Path, base: Path) -> Path:
    """A random adapter on the first and last layers of the GGUF file of SmolLM2."""
    source = open_source(str(base))
    config = InstructConfig(lora_rank=4, lora_alpha=8.0, lora_targets=r"model\.layers\.(0|29)\..*")
    adapters, generator = AdapterSet(source.spec, config, torch.float32), torch.Generator().manual_seed(0)
    adapters.initialise(0)
    for name, tensor in adapters.named().items():
        if name.endswith("lora_B.weight"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    save_adapter(
        folder, adapters.named(), config, num_layers=30, base_name=str(base), base_fingerprint=source.fingerprint(),
        files=tokenizer.files_to_save(),
    )  # fmt: skip
    return folder


def job(model: Path, adapter: Path, out: Path, config: InstructConfig = CONFIG, **options: Any) -> Job:
    source, tokenizer = open_source(str(model)), Tokenizer.from_folder(adapter)
    renderer = ChatRenderer(tokenizer, choose_template(tokenizer)) if tokenizer else None
    tokenizer = renderer.tokenizer if renderer else None
    return Job(ExportOptions(out=str(out), **options), source, adapter, config, tokenizer, renderer)


def oracle(variant: families.Variant, config: InstructConfig = CONFIG) -> Any:
    """transformers + PEFT with the same weights and adapter, on the values that the engine computes with."""
    model = families.build(with_vocab(variant))
    if config.quantize == "nf4":
        hf.round_linears_to_nf4(model, double_quant=config.double_quant)
    return hf.with_adapters(model, config, seed=3)
