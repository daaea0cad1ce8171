"""GGUF files of merged models and Ollama folders: read back by our own reader, compared with the adapter model."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import go_template as go
import pytest
import torch
import transformers
from chat_templates import FAMILIES, LLAMA31, MISTRAL3, QWEN3, QWEN25
from oracles import families
from trained import CONFIG, job, oracle, write_adapter, write_base, write_smollm2_adapter

from quatrain.checkpoint.gguf_file import GgufFile
from quatrain.checkpoint.gguf_source import gguf_name
from quatrain.checkpoint.gguf_vocab import gguf_vocabulary
from quatrain.checkpoint.merge import Merge, source_logits
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import read_adapter
from quatrain.data.modelfile import go_template, modelfile, render_go
from quatrain.data.render import ChatRenderer
from quatrain.data.templates import BUILT_INS, choose_template
from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import CheckpointError, ConfigError, DataError, ModelError
from quatrain.model.from_config import spec_from_config
from quatrain.model.from_gguf import spec_from_gguf
from quatrain.model.rope import inverse_frequencies
from quatrain.model.to_gguf import frequency_factors, metadata_from_spec
from quatrain.train.export import PROBE_TEXT, export, probe_ids

EXACT = {"f32": 1e-4, "f16": 1e-2}


def trained(folder: Path, name: str, **options: Any) -> tuple[Path, Path]:
    variant = families.BY_NAME[name]
    base = write_base(folder / "base", variant, **options)
    return base, write_adapter(folder / "adapter", base, variant)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_0"])
@pytest.mark.parametrize("name", ["llama-bias", "mistral", "qwen2", "qwen3", "llama-rope-llama3"])
def test_read_back_it_is_the_adapter_model(tmp_path: Path, name: str, kind: str) -> None:
    """L5: same logits as transformers + PEFT for every family, F16 within 1e-2 of their spread. L6: from a base in NF4,
    no part of a quantised state is in the file."""
    the_job = job(*trained(tmp_path, name), tmp_path / "out", format="gguf", type=kind)
    done = export(the_job)
    source = open_source(str(tmp_path / "out" / f"model-{kind}.gguf"))
    ids = probe_ids(the_job)
    with torch.no_grad():
        want = oracle(families.BY_NAME[name])(torch.tensor([ids])).logits[0]
    got = source_logits(source, ids)
    off = (got - want).square().mean().sqrt() / want.std()
    assert off < EXACT.get(kind, 0.5) and done.difference == pytest.approx(
        float((got - want).abs().max()), rel=0.05, abs=1e-4
    )
    stored = {name: tensor.type_name for name, tensor in GgufFile(source.path).tensors.items()}
    assert not [name for name in stored if "absmax" in name or "SCB" in name or "quant" in name]
    assert stored["output_norm.weight"] == "F32"
    fits = source.spec.hidden_size % 32 == 0 or not kind.startswith("q")
    assert stored["blk.0.attn_q.weight"] == (kind.upper() if fits else "F16")
    assert stored["token_embd.weight"] == ("F16" if not fits else "Q8_0" if kind.startswith("q") else kind.upper())
    assert any("no multiple of 32" in notice for notice in done.notices) == (not fits)


def test_a_lost_fine_tune_is_never_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: rows of q in the wrong order, or a base without its adapter, show when the file is read back."""
    base, adapter = trained(tmp_path, "llama")
    with monkeypatch.context() as patch:
        patch.setattr("quatrain.checkpoint.gguf_writer.neighbours_first", lambda tensor, heads: tensor)
        with pytest.raises(CheckpointError, match="other logits than the adapter"):
            export(job(base, adapter, tmp_path / "out", format="gguf"))
    monkeypatch.setattr(Merge, "merged", Merge.base)
    with pytest.raises(CheckpointError, match="other logits than the adapter"):
        export(job(base, adapter, tmp_path / "out", format="gguf"))
    assert not (tmp_path / "out").exists()


def test_tokens_have_their_types(tmp_path: Path) -> None:
    """L4: control and user-defined tokens, the special ids, the template; ids are those of training."""
    base, _ = trained(tmp_path, "llama")
    content = json.loads((base / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 264, "content": "<tool>", "special": False})
    (base / "tokenizer.json").write_text(json.dumps(content))
    adapter = write_adapter(tmp_path / "adapter", base, families.BY_NAME["llama"])
    the_job = job(base, adapter, tmp_path / "out", format="gguf")
    export(the_job)
    file = GgufFile(tmp_path / "out" / "model-f16.gguf")
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    assert (keys["model"], keys["pre"], keys["add_bos_token"]) == ("gpt2", "gpt-2", False)
    assert (keys["eos_token_id"], keys["padding_token_id"], "bos_token_id" in keys) == (258, 256, False)
    types = dict(zip(keys["tokens"], keys["token_type"], strict=True))
    assert [types[token] for token in ("<|im_start|>", "<|im_end|>", "<tool>", "the", "a")] == [3, 3, 4, 1, 1]
    assert keys["tokenizer.chat_template"] == the_job.tokenizer.chat_template
    read = open_source(str(file.path)).tokenizer()
    for text in (PROBE_TEXT, "the <tool> 12 <|im_end|> o'", " a the"):
        assert read.encode(text) == the_job.tokenizer.encode(text)
        assert read.encode(text, parse_special=True) == the_job.tokenizer.encode(text, parse_special=True)


def sentencepiece(*, prefix: bool = True) -> Tokenizer:
    """A small one as converted to tokenizer.json: byte fallback, merges in order."""
    letters = sorted({*"▁", *"the loan12"} - {" "})
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("h", "e"), ("a", "n"), ("▁", "a")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += dict.fromkeys("".join(pair) for pair in merges)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": token, **flags, "special": True} for i, token in enumerate(tokens[:3])]
    added.append({"id": len(tokens), "content": "[note]", **flags, "special": False})
    steps = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    model |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    content = {"version": "1.0", "added_tokens": added, "normalizer": {"type": "Sequence", "normalizers": steps}}
    content |= {"pre_tokenizer": None, "decoder": None, "model": model}
    return Tokenizer(json.dumps(content), bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos=True)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_by_scores(prefix: bool) -> None:
    """L4: the kind, byte tokens and the leading space are told; scores give the merges' order."""
    tokenizer = sentencepiece(prefix=prefix)
    keys = gguf_vocabulary(tokenizer, tokenizer.vocab_size, PROBE_TEXT + " the then a loan", bos_written=None)
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is prefix
    types = keys["tokenizer.ggml.token_type"]
    assert (types[0], types[1], types[2], types[3], types[258], types[-1]) == (2, 3, 3, 6, 6, 4)
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.bos_token_id"] == 1


def tokenizer_like(folder: Path, change: Any) -> Tokenizer:
    base = write_base(folder, families.BY_NAME["llama"])
    content = json.loads((base / "tokenizer.json").read_text())
    change(content)
    (base / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(base)
    assert tokenizer is not None
    return tokenizer


def _digits(content: dict[str, Any]) -> None:
    steps = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def _foreign(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def test_the_word_rule_is_found_or_refused(tmp_path: Path) -> None:
    """L1: by what the tokenizer does, with an added token as well; a rule without a name is refused with advice."""
    keys = gguf_vocabulary(tokenizer_like(tmp_path / "a", _digits), 266, PROBE_TEXT, bos_written=None)
    assert keys["tokenizer.ggml.pre"] == "smollm"
    tokenizer = tokenizer_like(tmp_path / "b", lambda content: content["added_tokens"].append(
        {**content["added_tokens"][0], "id": 264, "content": "<new>"}))  # fmt: skip
    assert gguf_vocabulary(tokenizer, 266, PROBE_TEXT, bos_written=None)["tokenizer.ggml.pre"] == "gpt-2"
    with pytest.raises(ModelError, match="a rule for cutting words that GGUF files have no name for") as caught:
        gguf_vocabulary(tokenizer_like(tmp_path / "c", _foreign), 266, PROBE_TEXT, bos_written=None)
    assert "--format hf" in (caught.value.hint or "")


def test_rows_and_tokens(tmp_path: Path) -> None:
    """L3: rows without a token are named as unused, tokens without a row are refused."""
    tokenizer = tokenizer_like(tmp_path, lambda content: None)
    keys = gguf_vocabulary(tokenizer, 270, PROBE_TEXT, bos_written=None)
    assert len(keys["tokenizer.ggml.tokens"]) == 270 == len(set(keys["tokenizer.ggml.tokens"]))
    assert keys["tokenizer.ggml.token_type"][264:] == [5] * 6
    with pytest.raises(ModelError, match="ids up to 263, the embedding 260 rows"):
        gguf_vocabulary(tokenizer, 260, PROBE_TEXT, bos_written=None)


@pytest.mark.parametrize(("written", "want"), [(True, True), (False, False), (None, True)])
def test_one_bos_in_the_file(written: bool | None, want: bool) -> None:
    """B1: llama.cpp puts BOS before a prompt only where the prompts of training had one."""
    tokenizer = sentencepiece()
    keys = gguf_vocabulary(tokenizer, tokenizer.vocab_size, PROBE_TEXT, bos_written=written)
    assert keys["tokenizer.ggml.add_bos_token"] is want


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_metadata_from_a_spec(variant: families.Variant) -> None:
    """What is written reads back as the same model; what llama.cpp cannot compute is refused."""
    spec = spec_from_config(families.build(variant).config.to_dict())
    own_scale = spec.rope.attention_factor or spec.rope.mscale
    if variant.name == "qwen3-bias" or len(set(spec.windows)) > 1 or spec.rope.kind == "dynamic" or own_scale:
        with pytest.raises(ModelError, match=r"llama\.cpp has no"):
            metadata_from_spec(spec, "here")
        return
    shapes = {"token_embd.weight": (spec.vocab_size, spec.hidden_size)}
    shapes |= {} if spec.tie_word_embeddings else {"output.weight": shapes["token_embd.weight"]}
    shapes |= {f"{gguf_name(f'model.layers.0.{part}.{name}.bias')}": (1,) for name in spec.biased
               for part in ["self_attn" if name[0] in "qkvo" else "mlp"]}  # fmt: skip
    factors = frequency_factors(spec)
    architecture = "llama" if spec.family == "mistral" else spec.family
    metadata = {"general.architecture": architecture, **metadata_from_spec(spec, "here")}
    got = spec_from_gguf(metadata, shapes, tuple(factors) if factors else None, "there")
    want = spec if spec.windows[0] else dataclasses.replace(spec, family=architecture)
    assert dataclasses.replace(got, rope=want.rope) == want
    torch.testing.assert_close(inverse_frequencies(got.rope, 1)[0], inverse_frequencies(spec.rope, 1)[0])


# Ollama

LLAMA3 = BUILT_INS["llama3"].text.replace("<|start_header_id|>", "<|im_start|>").replace("<|eot_id|>", "<|im_end|>")
TEMPLATES = {
    "chatml": BUILT_INS["chatml"].text,
    "smollm2": FAMILIES["smollm2"],
    "llama3": LLAMA3.replace("<|end_header_id|>", "<|endoftext|>"),
    "mistral": BUILT_INS["mistral"].text,
    "alpaca": BUILT_INS["alpaca"].text,
    "no-system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "braces": "{% for m in messages %}{{ '{{' }} {{ m.role }} }}{{ m.content }}<|im_end|>{% endfor %}",
}  # fmt: skip


def renderer_of(folder: Path, template: str, bos: str | None = "<|endoftext|>") -> ChatRenderer:
    tokenizer = Tokenizer.from_folder(write_base(folder, families.BY_NAME["llama"], template=template))
    assert tokenizer is not None
    tokenizer.bos_token = bos
    return ChatRenderer(tokenizer, choose_template(tokenizer))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_go_template_renders_what_training_rendered(tmp_path: Path, name: str) -> None:
    """L7, B1: the same text with and without a system text and over several turns, BOS once."""
    renderer = renderer_of(tmp_path, TEMPLATES[name])
    writes_bos = renderer.prompt_text([_user("x")]).startswith("<|endoftext|>")
    made = go_template(renderer, bos_added=writes_bos)
    template = made.text
    assert made.takes_system == (name != "no-system") and ("<|endoftext|>" not in template[:60])
    for system in [None, "Be {{kind}}."] if made.takes_system else [None]:
        turns = [*([("system", system)] if system else []), ("user", "a\n"), ("assistant", "b "), ("user", " c")]
        want = renderer.prompt_text([_message(*turn) for turn in turns])
        assert ("<|endoftext|>" if writes_bos else "") + render_go(template, turns) == want
        messages = [{"role": role, "content": text} for role, text in turns]
        assert go.render(template, messages) == render_go(template, turns)
    text, notices = modelfile("m.gguf", renderer, bos_added=writes_bos)
    assert text.startswith('FROM ./m.gguf\nTEMPLATE """') and 'PARAMETER stop "<|im_end|>"\n' in text
    assert bool(notices) == (not made.takes_system)


def _message(role: str, content: str) -> Any:
    from quatrain.data.records import Message

    return Message(role, content)


def _user(text: str) -> Any:
    return _message("user", text)


def plain(template: str) -> str:
    """A family's template with the tokens of the tiny model."""
    for token in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        template = template.replace(token, "<|im_end|>")
    return template


@pytest.mark.parametrize(
    ("template", "date", "said"),
    [
        (FAMILIES["smollm2"], None, []),
        (QWEN25, None, ["Ollama offers no tools"]),
        (QWEN3, None, ["takes <think> out of earlier answers"]),
        (plain(LLAMA31), None, ["strips white space around texts (user, assistant, system)", "today's date"]),
        (plain(LLAMA31), "2001-02-03", ["strips white space"]),
        (MISTRAL3, None, ["moves its system text about"]),
    ],
    ids=["smollm2", "qwen2.5", "qwen3", "llama3.1", "llama3.1-dated", "mistral-v3"],
)  # fmt: skip
def test_what_a_go_template_cannot_do_is_told(tmp_path: Path, template: str, date: str | None, said: list[str]) -> None:
    """L7: by name, and nothing else is told."""
    tokenizer = renderer_of(tmp_path, template).tokenizer
    renderer = ChatRenderer(tokenizer, choose_template(tokenizer), date=date)
    bos_added = renderer.prompt_text([_user("x")]).startswith("<|endoftext|>")
    notices = go_template(renderer, bos_added=bos_added).notices
    assert len(notices) == len(said)
    for notice, part in zip(notices, said, strict=True):
        assert part in notice


def test_a_system_text_that_has_no_place_is_refused(tmp_path: Path) -> None:
    """L7: where the training has a system text for all prompts, a template without a place for it will not do."""
    renderer = renderer_of(tmp_path, MISTRAL3)
    with pytest.raises(DataError, match="for 4 turns it renders"):
        modelfile("m.gguf", renderer, bos_added=True, system="Be kind.")
    renderer = renderer_of(tmp_path / "other", TEMPLATES["chatml"])
    text, _ = modelfile("m.gguf", renderer, bos_added=False, system="Be {{x}}.")
    assert dict(go.modelfile_commands(text))["SYSTEM"] == "Be {{x}}."


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}", "renders|does not write"),
        ("{% for m in messages %}{{ m.role }}{{ m.content.lstrip() }}<|im_end|>{% endfor %}", "for . turns it renders"),
        ("{{ messages[-1].content }}<|im_end|>", "it does not write every text"),
        ('{% for m in messages %}"""{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}', "ends a text in a Modelfile"),
    ],
)
def test_a_template_without_a_go_form_is_refused(tmp_path: Path, template: str, said: str) -> None:
    """L7: no guess; the error says what to fill in."""
    with pytest.raises(DataError, match=said) as caught:
        go_template(renderer_of(tmp_path, template), bos_added=False)
    assert "PARAMETER stop" in (caught.value.hint or "")


def test_an_ollama_folder(tmp_path: Path) -> None:
    """L7: model and Modelfile together; every end token of model and template is a stop."""
    base, adapter = trained(tmp_path, "qwen2")
    (adapter / "chat_template.jinja").write_text(TEMPLATES["chatml"].replace("<|im_end|>", "<|endoftext|>"))
    export(job(base, adapter, tmp_path / "out", format="ollama"))
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.splitlines()[0] == "FROM ./model-q8_0.gguf"
    assert {line for line in text.splitlines() if line.startswith("PARAMETER")} == {
        'PARAMETER stop "<|endoftext|>"',
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    }
    assert open_source(str(tmp_path / "out")).eos_token_ids == (258, 256)


def test_the_adapter_alone(tmp_path: Path) -> None:
    """Names, row order and scale as llama.cpp wants them."""
    base, adapter = trained(tmp_path, "llama")
    export(job(base, adapter, tmp_path / "out", format="gguf-adapter"))
    file = GgufFile(tmp_path / "out" / "adapter.gguf")
    assert (file.metadata["general.type"], file.metadata["adapter.type"]) == ("adapter", "lora")
    assert file.metadata["adapter.lora.alpha"] == CONFIG.lora_alpha
    merge = Merge(open_source(str(base)), read_adapter(adapter), None)
    a, b = merge.lora("model.layers.1.self_attn.q_proj.weight")  # type: ignore[misc]
    assert torch.equal(file.read("blk.1.attn_q.weight.lora_a"), a)
    got = file.read("blk.1.attn_q.weight.lora_b")
    assert torch.equal(got[:4], b[[0, 8, 1, 9]]) and len(file.tensors) == 2 * 7 * 3
    with pytest.raises(ConfigError, match="q8_0 is for merged GGUF files"):
        export(job(base, adapter, tmp_path / "no", format="gguf-adapter", type="q8_0"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> tuple[Path, Path]:
    """(the GGUF file of SmolLM2, an adapter on its first and last layers)."""
    return smollm2_path, write_smollm2_adapter(tmp_path_factory.mktemp("smollm2") / "adapter", smollm2_path)


def test_a_gguf_base_becomes_a_folder_for_transformers(tmp_path: Path, smollm2: tuple[Path, Path]) -> None:
    """L8, B14: config.json and tokenizer.json are made from metadata; no warning, the same ids and logits."""
    the_job = job(*smollm2, tmp_path / "out")
    export(the_job)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, output_loading_info=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not any(info.values()), info
    ids = probe_ids(the_job)
    assert tokenizer(PROBE_TEXT)["input_ids"] == the_job.tokenizer.encode(PROBE_TEXT, bos=True)
    chat = [{"role": "user", "content": PROBE_TEXT}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    want = source_logits(open_source(str(tmp_path / "out")), ids)
    assert (logits - want).abs().max() < 1e-3 * want.std() * len(ids) ** 0.5


def test_a_gguf_base_keeps_its_tokenizer_metadata(tmp_path: Path, smollm2: tuple[Path, Path]) -> None:
    """L1, L4: what the base's file says about its tokenizer is carried over as it is."""
    export(job(*smollm2, tmp_path / "out", format="ollama"))
    got, want = (GgufFile(path).metadata for path in (tmp_path / "out" / "model-q8_0.gguf", smollm2[0]))
    tokenizer = [key for key in want if key.startswith("tokenizer.")]
    assert len(tokenizer) == 12 and {key: got[key] for key in tokenizer} == {key: want[key] for key in tokenizer}
    assert "You are a helpful AI assistant named SmolLM" in (tmp_path / "out" / "Modelfile").read_text()
