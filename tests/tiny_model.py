"""A tiny random Llama with a byte-level tokenizer and ChatML, written as a Hugging Face folder: real enough for every
command, small enough for milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 32, 48, 2, 4, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0, max_positions: int = 256, template: str | None = CHATML) -> Path:
    """The folder, with config.json, model.safetensors and tokenizer files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": max_positions}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    vocab = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": vocab - 1,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab, seed), folder / "model.safetensors")
    return folder


def write_rows(path: Path, number: int = 24) -> Path:
    """`number` instruction rows that a tiny model can learn a little from."""
    colours = ["red", "green", "blue", "white"]
    rows = [{"instruction": f"Paint room {i}", "response": f"{colours[i % 4]} it is"} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _weights(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.08

    head = HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": random(vocab, HIDDEN), "model.norm.weight": 1 + random(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": random(HEADS * head, HIDDEN),
            at + "self_attn.k_proj.weight": random(KV_HEADS * head, HIDDEN),
            at + "self_attn.v_proj.weight": random(KV_HEADS * head, HIDDEN),
            at + "self_attn.o_proj.weight": random(HIDDEN, HEADS * head),
            at + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            at + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            at + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            at + "input_layernorm.weight": 1 + random(HIDDEN),
            at + "post_attention_layernorm.weight": 1 + random(HIDDEN),
        }
    return weights
