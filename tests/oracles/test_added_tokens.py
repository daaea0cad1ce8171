"""Class I12 of docs/cases.md: adapters of PEFT that bring rows for added tokens, and tokens that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from oracles import families
from trained import VOCAB, with_vocab, write_base

from quatrain.checkpoint.gguf_file import GgufFile
from quatrain.checkpoint.open import open_source
from quatrain.cli.main import main
from quatrain.cli.use import open_for_use
from quatrain.config import ExportOptions, InstructConfig
from quatrain.errors import CheckpointError, ModelError
from quatrain.train.export import Job, export
from quatrain.train.pipeline import InstructPipeline

ADDED = ["<call>", "</call>"]
PLAIN = InstructConfig(quantize="none", compute_dtype="fp32")


def with_added_tokens(
    folder: Path, name: str, modules: list[str] | None = None, *, add: bool = True, **more: Any
) -> tuple[Path, Path, Any]:
    """(base, adapter, PEFT's model): two tokens added behind the base's rows, everything that is trained random."""
    variant = families.BY_NAME[name]
    base = write_base(folder / "base", variant)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = families.build(with_vocab(variant))
    if add:
        filler = [f"<unused{i}>" for i in range(VOCAB - len(tokenizer))]  # rows that had no token
        tokenizer.add_tokens(filler)
        tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
        model.resize_token_embeddings(VOCAB + 2, mean_resizing=False)
    model.config._name_or_path = model.name_or_path = str(base)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=modules, **more)
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, wrapped.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    wrapped.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    return base, folder / "adapter", wrapped.eval()


WHOLE: dict[str, Any] = {"modules": ["embed_tokens", "lm_head"]}
ONLY_NEW: dict[str, Any] = {"trainable_token_indices": [VOCAB, VOCAB + 1]}
CASES = {
    "llama-whole": ("llama", WHOLE),
    "qwen2-whole": ("qwen2", WHOLE),
    "tied-whole": ("llama-tied-own-head-dim", WHOLE),
    "llama-rows": ("llama", ONLY_NEW),
    "tied-rows": ("llama-tied-own-head-dim", ONLY_NEW),
    "qwen3-untrained": ("qwen3", {}),  # resized and not trained: PEFT saves the rows nevertheless
}


@pytest.mark.parametrize(("name", "trained"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_added_rows_are_used_and_exported(tmp_path: Path, name: str, trained: dict[str, Any], form: str) -> None:
    """I12: the model has as many rows as the adapter holds, with PEFT's logits, in the adapter and in its export."""
    _, adapter, wrapped = with_added_tokens(tmp_path, name, **trained)
    it = open_for_use(str(adapter), None)
    tokenizer, renderer = it.text_tools()
    assert tokenizer is not None and it.source.spec.vocab_size == VOCAB + 2
    assert any("2 more rows" in note for note in it.source.notes)
    ids = [*tokenizer.encode("the <call>x</call>", parse_special=True), VOCAB, 5]
    assert {VOCAB, VOCAB + 1} <= set(ids)
    with torch.no_grad():
        logits = wrapped(torch.tensor([ids])).logits[0]
    pipeline, _ = it.load({"quantize": "none", "compute_dtype": "fp32"})
    losses = pipeline.token_losses([(ids[:3], ids[3:])])
    want = torch.nn.functional.cross_entropy(logits[2:-1].double(), torch.tensor(ids[3:]), reduction="none")
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-4)

    options = ExportOptions(out=str(tmp_path / "out"), format=form, type="f32")
    export(Job(options, it.source, adapter, PLAIN, tokenizer, renderer))
    if form == "hf":
        merged, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            assert (merged(torch.tensor([ids])).logits[0] - logits).abs().max() < 1e-3
    else:
        file = GgufFile(tmp_path / "out" / "model-f32.gguf")
        assert file.metadata["tokenizer.ggml.tokens"][-2:] == ADDED
        assert file.tensors["token_embd.weight"].shape[0] == VOCAB + 2
    again = open_for_use(str(tmp_path / "out"), None)
    assert again.tokenizer().encode("<call>", parse_special=True) == [VOCAB]
    assert again.load({"compute_dtype": "fp32"})[0].token_losses([(ids[:3], ids[3:])]) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "llama-tied-own-head-dim"])
def test_rows_that_were_there_and_are_trained(tmp_path: Path, name: str) -> None:
    """I12: reserved tokens that got a meaning: two rows of the base replaced, in the head as well where it is tied."""
    _, adapter, wrapped = with_added_tokens(tmp_path, name, add=False, trainable_token_indices=[3, VOCAB - 1])
    pipeline, notices = open_for_use(str(adapter), None).load({"quantize": "none", "compute_dtype": "fp32"})
    assert "the adapter brings its own embedding" in notices
    ids = [5, 3, VOCAB - 1, 8, VOCAB - 1, 3]
    with torch.no_grad():
        logits = wrapped(torch.tensor([ids])).logits[0]
        base = wrapped.unload()(torch.tensor([ids])).logits[0]
    want, plain = (
        torch.nn.functional.cross_entropy(each[:-1].double(), torch.tensor(ids[1:]), reduction="none")
        for each in (logits, base)
    )
    got = pipeline.token_losses([(ids[:1], ids[1:])])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - plain).abs().max() > 0.01


def test_chat_and_eval_open_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I12: from a new process's point of view: the adapter folder alone."""
    _, adapter, _ = with_added_tokens(tmp_path, "llama", ["embed_tokens", "lm_head"])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a", "response": "<call>b</call>"}) + "\n")
    words = ["--model", str(adapter), "--compute-dtype", "fp32"]
    assert main(["eval", *words, "--allow-special", "--json", str(tmp_path / "rows.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["response_tokens"] == 4
    assert main(["chat", *words, "hello", "--max-new-tokens", "3"]) == 0
    assert "the adapter brings its own embedding and head, with 2 more rows" in capsys.readouterr().err


def test_it_is_not_trained_on(tmp_path: Path) -> None:
    """I12: the engine trains no rows, so it does not take such an adapter to go on with, nor save one without them."""
    base, adapter, _ = with_added_tokens(tmp_path, "llama", ["embed_tokens", "lm_head"])
    config = InstructConfig(lora_rank=4, lora_alpha=6, lora_targets=["q_proj", "down_proj"], compute_dtype="fp32")
    pipeline = InstructPipeline.from_source(open_source(str(base)), config)
    with pytest.raises(CheckpointError, match=r"brings its own model\.embed_tokens\.weight and lm_head\.weight"):
        pipeline.load_adapter(adapter)
    used, _ = open_for_use(str(adapter), None).load({})
    with pytest.raises(CheckpointError, match="would not be saved"):
        used.save_adapter(tmp_path / "again")


def test_tokens_without_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I12, B17: a tokenizer with added tokens beside an adapter without rows for them is refused, with their names."""
    with_added_tokens(tmp_path / "more", "llama", ["embed_tokens", "lm_head"])
    _, adapter, _ = with_added_tokens(tmp_path / "less", "llama", add=False)
    for path in (tmp_path / "more" / "adapter").glob("tokenizer*"):
        (adapter / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match=r"the model 266 embedding rows; without a row: <call>, </call>"):
        open_for_use(str(adapter), None).tokenizer()
    assert main(["chat", "--model", str(adapter), "hello"]) == 1
    assert "modules_to_save=[embed_tokens, lm_head]" in capsys.readouterr().err


def test_rows_without_ids_are_refused(tmp_path: Path) -> None:
    """I12: as many ids as rows, and rows where ids are named."""
    _, adapter, _ = with_added_tokens(tmp_path, "llama", add=False, trainable_token_indices=[3, 7])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": [3]}))
    with pytest.raises(CheckpointError, match=r"trainable_token_indices: want 2 ids .* got \[3\]"):
        open_for_use(str(adapter), None)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": [3, 999]}))
    with pytest.raises(CheckpointError, match=r"row 999 of model\.embed_tokens\.weight"):
        open_for_use(str(adapter), None)


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    """I12: one tensor with more rows than the base, and no counterpart for the other."""
    _, adapter, _ = with_added_tokens(tmp_path, "llama", ["embed_tokens", "lm_head"])
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight \[268, 64\]; want embedding and head"):
        open_for_use(str(adapter), None)
