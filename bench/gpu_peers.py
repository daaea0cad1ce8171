"""Steps of other software on a model of random weights: PEFT + bitsandbytes NF4 and, where it is installed, Unsloth.

    python bench/gpu_peers.py SIDE SHAPE TOKENS ROW DEVICE STEPS

SIDE is `peft`, `peft_checkpointing` (with gradient checkpointing) or `unsloth`; the last line printed is a JSON object.
r=16 on all seven linears, AdamW, clip 1.0, bf16, TOKENS / ROW rows of ROW tokens in one batch, the loss on all of them:
rows of one length, so that nothing is padded and packing would change nothing. `scripts/gpu_check.py` runs it, a fresh
process each; a package that is not there is reported as `absent`. The model is made in bf16 on the device, then every
linear but the head is quantised: the peak is measured from there on.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

RANK, LEARNING_RATE, CLIP, WARM_UP = 16, 2e-4, 1.0, 3
NEEDS = {"peft": ("transformers", "peft", "bitsandbytes"), "unsloth": ("unsloth",)}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> int:
    side, shape, tokens, row, device, steps = sys.argv[1:]
    absent = [name for name in NEEDS[side.split("_")[0]] if find_spec(name) is None]
    if absent:
        print(json.dumps({"absent": ", ".join(absent)}))
        return 0
    model = unsloth_model(shape, int(row)) if side == "unsloth" else peft_model(shape, device, "checkpointing" in side)
    print(json.dumps(measure(model, int(tokens), int(row), device, int(steps))))
    return 0


def measure(model: Any, tokens: int, row: int, device: str, steps: int) -> dict[str, Any]:
    """Median of `steps` optimizer steps after WARM_UP, and the most that torch had reserved meanwhile."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ids = torch.randint(model.config.vocab_size, (tokens // row, row), generator=torch.Generator().manual_seed(0))
    ids, seconds, loss = ids.to(device), [], math.nan
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        result = model(input_ids=ids, labels=ids).loss
        result.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        loss = result.item()  # waits for the step
        seconds.append(time.perf_counter() - start)
    assert math.isfinite(loss), f"the loss is {loss}: nothing was measured"
    ms = 1e3 * median(seconds[WARM_UP:])
    found = {"ms": ms, "tokens_per_second": 1e3 * tokens / ms, "loss": loss}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"measured_peak_bytes": total - free, "torch_peak_bytes": torch.cuda.max_memory_reserved()}
    return found


def peft_model(shape: str, device: str, checkpointing: bool) -> Any:
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from quatrain.model.shapes import SHAPES

    config = AutoConfig.for_model(**{**SHAPES[shape], "use_cache": False})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, linear in list(model.named_modules()):
        if name.rpartition(".")[2] in LINEARS:
            new = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=torch.bfloat16,
                compress_statistics=True, quant_type="nf4", device="meta",
            )  # fmt: skip
            new.weight = bnb.nn.Params4bit(
                linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=new
            )
            new.bias = linear.bias
            model.set_submodule(name, new.to(device))  # which quantises
    model.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LINEARS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def unsloth_model(shape: str, row: int) -> Any:
    """From a folder of random weights: Unsloth opens nothing else. It has no tokenizer, which Unsloth may refuse."""
    from unsloth import FastLanguageModel  # before transformers: it patches them

    from quatrain.bench.shapes import RandomWeights
    from quatrain.model.shapes import SHAPES

    classes = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file

        config = {**SHAPES[shape], "torch_dtype": "bfloat16", "hidden_act": "silu"}
        config["architectures"] = [classes[config["model_type"]]]
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(dict(RandomWeights(shape).tensors()), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=row, load_in_4bit=True)
    return FastLanguageModel.get_peft_model(model, r=RANK, lora_alpha=RANK, target_modules=LINEARS)


if __name__ == "__main__":
    sys.exit(main())
