"""The real model: SmolLM2-135M-Instruct from its GGUF file, against transformers reading the same file by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tolerances as tol
import torch
import transformers
from oracles import hf

from quatrain.config import GenerateConfig, InstructConfig
from quatrain.model.decoder import Decoder
from quatrain.ops.nf4.reference import dequantize
from quatrain.train.pipeline import InstructPipeline

NEW_TOKENS = 40
BOUND = tol.ENGINE_FP32 * 200**0.5
QUESTIONS = ("What is the capital of France?", "Name three colours and say which one you like best.")


def open_pipeline(path: Path, quantize: str) -> InstructPipeline:
    options = {"compute_dtype": "fp32", "lora_rank": 4, "max_seq_len": 128, "micro_batch_tokens": 256}
    return InstructPipeline.from_pretrained(path, InstructConfig(quantize=quantize, **options))


@pytest.fixture(scope="module")
def nf4(smollm2_path: Path) -> InstructPipeline:
    return open_pipeline(smollm2_path, "nf4")


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Any:
    """transformers' own reading of the GGUF file."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def nf4_oracle(oracle: Any) -> Any:
    """The same, its linears rounded to NF4 by bitsandbytes."""
    model = copy.deepcopy(oracle)
    hf.round_linears_to_nf4(model, double_quant=True)
    return model


def test_every_frozen_value_is_transformers_own(nf4: InstructPipeline, nf4_oracle: Any) -> None:
    """Names, the rotary permutation of q and k that GGUF stores, NF4: all weights, bit for bit."""
    params, state = nf4.engine.params, nf4_oracle.state_dict()
    assert torch.equal(params.embed, state["model.embed_tokens.weight"])
    assert torch.equal(params.final_norm, state["model.norm.weight"])
    for index, block in enumerate(params.blocks):
        layer = f"model.layers.{index}"
        assert torch.equal(block.input_norm, state[f"{layer}.input_layernorm.weight"])
        assert torch.equal(block.post_norm, state[f"{layer}.post_attention_layernorm.weight"])
        for name, linear in block.linears.items():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            want = state[f"{layer}.{part}.{name}.weight"]
            got = torch.empty_like(want)
            dequantize(got, linear.weight)
            assert torch.equal(got, want), (layer, name)


def test_greedy_with_cache_without_and_by_transformers(smollm2_path: Path, oracle: Any) -> None:
    pipeline = open_pipeline(smollm2_path, "none")
    prompts = [pipeline.chat_ids(None, question) for question in QUESTIONS]
    sampling = GenerateConfig(max_new_tokens=NEW_TOKENS)
    cached = pipeline.generate_ids(prompts, sampling)
    for prompt, got in zip(prompts, cached, strict=True):
        ids = torch.tensor([prompt])
        want = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        want = [token for token in want[0, len(prompt) :].tolist() if token not in pipeline.end_ids]
        assert got == want
    decoder, ids = Decoder(pipeline.engine.params, pipeline.layout.backend), list(prompts[0])
    for token in cached[0]:
        assert int(decoder.start([ids], len(ids))[0].argmax()) == token
        ids.append(token)


def test_gradients_of_thirty_layers(nf4: InstructPipeline, nf4_oracle: Any) -> None:
    """B random, three rows: loss and all 420 adapter gradients. Ten times the layers of the tiny models, ten times
    their longest sum, and both sides round: sqrt(10 * 10 * 2) times their bound."""
    wrapped = hf.with_adapters(nf4_oracle, nf4.config, seed=5)
    values = {name: parameter.detach() for name, parameter in hf.trainable(wrapped).items()}
    for name, master in nf4.adapters.named().items():
        master.copy_(values[name])
    nf4.adapters.refresh()
    rows = hf.make_rows([5, 23, 40], nf4.spec.vocab_size)
    want_loss, want = hf.loss_and_gradients(wrapped, rows)
    loss, got = nf4.loss_and_gradients(rows)
    errors = {name: hf.norm_error(got[name], want[name]) for name in want}
    worst = max(errors, key=lambda name: errors[name])
    print(f"\nSmolLM2 {loss:.7f} {want_loss:.7f} {errors[worst]:.1e} {worst} of {len(errors)}")
    assert loss == pytest.approx(want_loss, rel=BOUND)
    assert len(errors) == 420 and errors[worst] <= BOUND
