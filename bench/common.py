"""What the scripts of this folder share: equal models, adapters and rows for both sides, PEFT's side, and the record of
where numbers were taken."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"
LEARNING_RATE, CLIP, RANK, ALPHA = 2e-4, 1.0, 16, 32
LONGEST_ROW = 1024

Rows = list[tuple[list[int], list[int]]]
"""(input ids, labels): labels unshifted, -100 where a token is not supervised."""


def gsm8k_rows(tokenizer: Any, file: Path, count: int) -> Rows:
    """The first `count` rows in file order, the answer supervised."""
    from quatrain.config import DataOptions
    from quatrain.data.pipeline import prepare

    options = DataOptions(prompt_field="question", response_field="answer")
    rows = prepare([file], options, tokenizer, max_seq_len=LONGEST_ROW).train[:count]
    return [(list(row.input_ids), list(row.labels)) for row in rows]


def export(source: Any, folder: Path, dtype: str = "fp32", *, through_nf4: bool = False) -> None:
    """The source's weights as a Hugging Face folder, for a Llama without rope scaling. `through_nf4`: every linear is
    quantised and dequantised once, so that the plain weights are those that an NF4 model computes with."""
    import torch
    from safetensors.torch import save_file

    from quatrain.checkpoint.names import is_linear_weight

    spec = source.spec
    assert spec.family == "llama" and spec.rope.kind == "default", "this bench is about SmolLM2"
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "hidden_act": "silu",
        "torch_dtype": str(kind).removeprefix("torch."),
        "eos_token_id": list(source.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.to(kind).contiguous() for name, tensor in source.tensors()}
    if through_nf4:
        tensors |= {name: _round_trip(tensor) for name, tensor in tensors.items() if is_linear_weight(name)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _round_trip(weight: torch.Tensor) -> torch.Tensor:
    import torch

    from quatrain.ops.nf4.reference import dequantize, quantize

    out = torch.empty_like(weight)
    dequantize(out, quantize(weight, double_quant=True))
    return out


# PEFT's side.


def peft_model(base: Path, adapter: Path, dtype: torch.dtype, *, nf4: bool = True, checkpointing: bool = False) -> Any:
    """`base` with `adapter` to be trained; NF4 through bitsandbytes, or plain.

    It is in training mode and must stay there, which without dropout is the same function: in eval mode bitsandbytes
    0.50 repacks the weights for AVX512-BF16 CPUs for good, and a later backward through them has no gradient for x."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantization if nf4 else None, dtype=dtype, device_map={"": "cpu"}
    )
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).train()


def padded(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids, labels and the attention mask of one batch, padded on the right; no mask where nothing is padded."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows])
    return ids, labels, None if bool(mask.all()) else mask


def peft_loss(model: Any, rows: Rows) -> tuple[torch.Tensor, int]:
    """The summed loss and the number of supervised tokens of one padded batch."""
    import torch

    ids, labels, mask = padded(rows)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    targets = labels[:, 1:]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, int((targets != -100).sum())


# Processes and the record.


def run_apart(script: str, words: Sequence[object], result: Path) -> dict[str, Any]:
    """`script` in a fresh process; what it wrote to `result`."""
    subprocess.run([sys.executable, script, *map(str, words)], check=True)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def record(script: str) -> dict[str, Any]:
    """The command, with the names of paths alone, and what the numbers were measured on and with."""
    from quatrain.cli.doctor import examine

    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    packages = ("quatrain", "torch", "transformers", "peft", "bitsandbytes")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = examine()
    return {
        "command": " ".join(["python", f"bench/{Path(script).name}", *words]),
        "machine": {
            "cpu": found["cpu"]["name"],
            "cores": found["cpu"]["usable"],
            "features": found["cpu"]["features"],
            "memory_gb": round(found["memory"]["total_bytes"] / 1e9, 1),
            "system": platform.platform(),
            "kernels": found["kernels"]["reason"],
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "commit": commit.stdout.strip(),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {os.path.relpath(path)}")
