"""The oracle at the greatest distance: transformers + PEFT + bitsandbytes, under torch autograd.

Nothing here calls the engine. `strict_fp64` replaces the two places where transformers rounds to fp32 whatever the
model's dtype is (RMSNorm and softmax), so that the fp64 oracle is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import bitsandbytes.backends.default.ops as generic
import bitsandbytes.functional as bnb
import peft
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quatrain.config import InstructConfig
from quatrain.data.row import IGNORE, Row

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"]


def nf4_values(weight: torch.Tensor, *, double_quant: bool) -> torch.Tensor:
    """What bitsandbytes makes of a weight: quantised to NF4 and back.

    Where a row is no multiple of 64, values come from its generic kernel, run without the compiler it asks for: its
    AVX-512 kernel takes the wrong block scale there (a round trip is off by 28 percent, not 9).
    """
    with torch.compiler.set_stance("force_eager"):
        codes, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=64, compress_statistics=double_quant, quant_type="nf4"
        )
        if weight.shape[1] % 64 == 0:
            return bnb.dequantize_4bit(codes, state)
        absmax = state.absmax
        if state.nested:
            absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
        return generic._dequantize_4bit_compute(codes.view(-1), absmax, state.code, 64, state.shape, state.dtype)


@torch.no_grad()
def round_linears_to_nf4(model: torch.nn.Module, *, double_quant: bool) -> None:
    """Give the model's linears (never the head) the values that an NF4 engine computes with."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            module.weight.copy_(nf4_values(module.weight, double_quant=double_quant))


def with_adapters(model: Any, config: InstructConfig, seed: int = 0) -> Any:
    """The model under PEFT with `config`'s adapters, every A and B random (B = 0 would hide most gradients)."""
    targets = list(LINEARS) if config.lora_targets == "all-linear" else config.lora_targets
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=targets,
            use_rslora=config.use_rslora,
            modules_to_save=NORMS if config.train_norms else None,
            task_type="CAUSAL_LM",
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_A." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif ".modules_to_save." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped.eval()


def file_name(parameter_name: str) -> str:
    """The key of `adapter_model.safetensors` that belongs to a parameter of a PEFT model."""
    return parameter_name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def trainable(wrapped: Any) -> dict[str, torch.nn.Parameter]:
    """{key in the adapter file: parameter}."""
    return {file_name(name): p for name, p in wrapped.named_parameters() if p.requires_grad}


def strict_fp64(wrapped: Any) -> Any:
    """The same model with every value and every intermediate in fp64, but for the rotary table.

    Its angles are fp32 in every implementation, so the fp32 table is part of what the model computes, not a rounding.
    """
    wrapped.double()
    for module in wrapped.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)
    ALL_ATTENTION_FUNCTIONS.register("strict_fp64", _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("strict_fp64", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    wrapped.config._attn_implementation = "strict_fp64"
    return wrapped


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)


def _attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    probabilities = (scores + mask).softmax(-1) if mask is not None else scores.softmax(-1)
    return (probabilities @ v).transpose(1, 2).contiguous(), probabilities


def make_rows(lengths: Sequence[int], vocab: int, seed: int = 0, prompt: float = 0.4) -> list[Row]:
    """Random rows of the given lengths; about `prompt` of each is unsupervised, and a hole in the response as well."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        labels = [IGNORE if i < int(length * prompt) else token for i, token in enumerate(ids)]
        if length > 6:
            labels[-2] = IGNORE
        rows.append(Row(tuple(ids), tuple(labels), f"random:{number + 1}"))
    return rows


def row_loss(wrapped: Any, row: Row) -> torch.Tensor:
    """Sum of the cross-entropies of a row's supervised tokens, the row alone in the batch."""
    logits = wrapped(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:]), ignore_index=IGNORE, reduction="sum")


def loss_and_gradients(wrapped: Any, rows: Iterable[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all supervised tokens and its gradient, row by row without padding."""
    rows = list(rows)
    count = sum(row.num_supervised for row in rows)
    wrapped.zero_grad()
    total = 0.0
    for row in rows:
        loss = row_loss(wrapped, row) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.detach().clone() for name, p in trainable(wrapped).items()}


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||, in fp64."""
    return float((got.double() - want.double()).norm() / want.double().norm())
