"""Merged Hugging Face folders, against PEFT's own merge and as transformers loads them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracles import families
from safetensors.torch import load_file
from trained import CONFIG, job, oracle, write_adapter, write_base

from quatrain.checkpoint import hf_writer
from quatrain.checkpoint.merge import Merge
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import read_adapter
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError, ConfigError, PlanError
from quatrain.memory.process import peak_resident_bytes
from quatrain.model.from_config import spec_from_config
from quatrain.model.to_config import config_from_spec
from quatrain.train.export import PROBE_TEXT, export, probe_ids

RECIPES = {
    "nf4": CONFIG,
    "flat-nf4-rslora-norms": InstructConfig(
        lora_rank=3, lora_alpha=4.0, use_rslora=True, double_quant=False, train_norms=True
    ),
    "unquantised-some": InstructConfig(lora_rank=2, quantize="none", lora_targets=["q_proj", "down_proj"]),
}


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Path]:
    base = write_base(tmp_path / "base", families.BY_NAME["llama-bias"])
    return base, write_adapter(tmp_path / "adapter", base, families.BY_NAME["llama-bias"])


def load(folder: Path, dtype: torch.dtype) -> Any:
    """As a user loads it; a warning, a missing or an unexpected tensor is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    return model.eval()


def one_rounding(want: torch.Tensor) -> torch.Tensor:
    """The step of bf16 at each value: 8 bits of mantissa, and fp32 sums in another order may fall across a border."""
    return want.abs() * 2**-7 + 1e-7


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("variant", families.ONE_PER_FAMILY, ids=str)
def test_equals_peft_s_merge_to_one_rounding(tmp_path: Path, variant: families.Variant, recipe: InstructConfig) -> None:
    """I10: merged in fp32 into what the adapter was trained on, rounded once. I15: the keys are the base's."""
    base = write_base(tmp_path / "base", variant)
    adapter = write_adapter(tmp_path / "adapter", base, variant, recipe)
    done = export(job(base, adapter, tmp_path / "out", recipe))
    merged = oracle(variant, recipe).merge_and_unload().state_dict()
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in got.items():
        assert tensor.dtype == torch.bfloat16
        off = (tensor.float() - merged[name]).abs() / one_rounding(merged[name])
        assert off.max() <= 1, name
    assert done.base == ("source" if recipe.quantize == "none" else "dequantised")
    assert done.difference < 0.2 * done.effect


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_logits_are_those_of_the_adapter(tmp_path: Path, variant: families.Variant) -> None:
    """I10, L8: for every family, tied or not, with biases, norms and scaled rotation: what is printed is what
    transformers + PEFT see, and transformers loads it without a warning."""
    base = write_base(tmp_path / "base", variant)
    the_job = job(base, write_adapter(tmp_path / "adapter", base, variant), tmp_path / "out", type="f32")
    done = export(the_job)
    ids = torch.tensor([probe_ids(the_job)])
    want = oracle(variant)(ids).logits
    got = load(tmp_path / "out", torch.float32)(ids).logits
    assert (got - want).abs().max() < 1e-3 and done.difference < 1e-3 and done.effect > 0.1
    assert (load(base, torch.float32)(ids).logits - want).abs().max() > 0.1


def test_the_base_can_be_chosen(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    """I10: the model's own weights are the other choice, and the difference to training is told."""
    done = export(job(*llama, tmp_path / "out", type="f32", base="source"))
    merge = Merge(open_source(str(llama[0])), read_adapter(llama[1]), None)
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(got[name], merge.merged(name)) for name in merge.shapes)
    trained = export(job(*llama, tmp_path / "trained", type="f32"))
    assert done.difference > 100 * trained.difference
    assert any("trained on the other base (dequantised)" in notice for notice in done.notices)


@pytest.mark.parametrize("name", ["qwen2", "llama-tied-own-head-dim", "qwen3"])
def test_configuration_of_the_merged_model(tmp_path: Path, name: str) -> None:
    """L8: no quantisation, the right dtype and tie flag, all shards in the index; it loads without a warning. L6: no
    key of a quantised state."""
    variant = families.BY_NAME[name]
    base = write_base(tmp_path / "base", variant)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(tmp_path / "adapter", base, variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_writer.write_weights, "__kwdefaults__", {"shard_bytes": 60_000})
        export(job(base, adapter, tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written.get("dtype", written.get("torch_dtype")) == "bfloat16"
    assert written["tie_word_embeddings"] == bool(variant.options.get("tie_word_embeddings"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for s in shards for t in load_file(tmp_path / "out" / s).values()
    )
    assert not [key for key in index["weight_map"] if "absmax" in key or "quant" in key]
    assert load(tmp_path / "out", torch.bfloat16).dtype == torch.bfloat16


def test_biases_are_kept(tmp_path: Path) -> None:
    """I15: q, k and v of Qwen2 keep their biases."""
    base = write_base(tmp_path / "base", families.BY_NAME["qwen2"])
    export(job(base, write_adapter(tmp_path / "a", base, families.BY_NAME["qwen2"]), tmp_path / "out", type="f32"))
    want, got = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    biases = [name for name in want if name.endswith(".bias")]
    assert len(biases) == 9 and all(torch.equal(got[name], want[name]) for name in biases)


def test_tokenizer_and_template_travel(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    """B14: the merged folder renders as training did, from byte-identical tokenizer files."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (llama[1] / "chat_template.jinja").write_text(template)
    the_job = job(*llama, tmp_path / "out")
    export(the_job)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama[1] / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße 12"}], tokenize=True)["input_ids"]
    assert ids == the_job.renderer.prompt_ids("Grüße 12")
    assert tokenizer(PROBE_TEXT)["input_ids"] == the_job.tokenizer.encode(PROBE_TEXT, bos=True)


def test_generation_knows_every_end_token(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    (llama[1] / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    export(job(*llama, tmp_path / "out"))
    assert load(tmp_path / "out", torch.bfloat16).generation_config.eos_token_id == [258, 256]


def test_nothing_is_replaced_or_touched_unasked(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    """M3, P6: a folder of something else is never taken, an earlier export needs a word; the base stays as it was."""
    before = {path: path.read_bytes() for folder in llama for path in folder.iterdir()}
    for taken in llama:
        with pytest.raises(ConfigError, match="is not empty and holds no export"):
            export(job(*llama, taken, overwrite=True))
    export(job(*llama, tmp_path / "out"))
    with pytest.raises(ConfigError, match="already holds an export"):
        export(job(*llama, tmp_path / "out"))
    export(job(*llama, tmp_path / "out", overwrite=True, type="f16"))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    assert before == {path: path.read_bytes() for folder in llama for path in folder.iterdir()}


def test_what_is_wrong_never_appears(tmp_path: Path, llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: a lost or wrong adapter shows when the folder is read back, and there is no folder then."""
    monkeypatch.setattr(Merge, "merged", Merge.base)
    with pytest.raises(CheckpointError, match="other logits than the adapter"):
        export(job(*llama, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_what_does_not_fit_is_refused(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    base = write_base(tmp_path / "other", families.BY_NAME["qwen2"])
    with pytest.raises(CheckpointError, match=r"does not fit .*want \[4, 64\]"):
        export(job(base, llama[1], tmp_path / "out"))
    shutil.copytree(llama[0], tmp_path / "changed")
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(CheckpointError, match="trained on other base weights"):
        export(job(tmp_path / "changed", llama[1], tmp_path / "out"))
    with pytest.raises(ConfigError, match="q4_0 is for merged GGUF files"):
        export(job(*llama, tmp_path / "out", type="q4_0"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_one_tensor_at_a_time(
    tmp_path: Path, llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """M7: when the next tensor is merged, the one before is gone."""
    merged, last, alive = Merge.merged, [], []

    def watched(self: Merge, name: str) -> torch.Tensor:
        alive.append(any(tensor() is not None for tensor in last))
        tensor = merged(self, name)
        last[:] = [weakref.ref(tensor)]
        return tensor

    monkeypatch.setattr(Merge, "merged", watched)
    export(job(*llama, tmp_path / "out", format=form, type="f16"))
    assert len(alive) > 40 and not any(alive)


def test_what_half_precision_cannot_hold() -> None:
    with pytest.raises(CheckpointError, match="values up to 1e\\+05, which F16 cannot hold"):
        hf_writer.rounded("w", torch.tensor([1.0, 1e5]), torch.float16)


@pytest.mark.parametrize("variant", families.VARIANTS, ids=str)
def test_configuration_from_a_spec(variant: families.Variant) -> None:
    """What is written for a model that has no config.json reads back as the same model."""
    spec = spec_from_config(families.build(variant).config.to_dict())
    assert spec_from_config(config_from_spec(spec, "here")) == spec


MEASURED = """
import sys
from pathlib import Path

sys.path[:0] = {path!r}
from trained import job
from quatrain.memory.process import peak_resident_bytes
from quatrain.train.export import export

folder = Path(sys.argv[1])
for size in ("small", "large"):  # the small one brings in everything that an export imports
    before = peak_resident_bytes()
    for form, kind in (("hf", "bf16"), ("gguf", "q8_0")):
        export(job(folder / size, folder / (size + "-adapter"), folder / (size + form), format=form, type=kind))
print(peak_resident_bytes() - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """M7: a model of 100 MB is merged, written, read back and compared in less than a tenth of that."""
    if not peak_resident_bytes():
        pytest.skip("this system does not tell a process's peak memory")
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    for size, layers in (("small", 3), ("large", 21)):
        variant = families.Variant(size, "llama", {**shape, "num_hidden_layers": layers})
        base = write_base(tmp_path / size, variant)
        write_adapter(tmp_path / f"{size}-adapter", base, variant)
    large = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")) / 2  # fp32 there
    script = MEASURED.format(path=[str(Path(__file__).parents[1])])
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert large > 95e6 and int(done.stdout.split()[-1]) < large / 10


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
from trained import job
from quatrain.checkpoint.merge import Merge
from quatrain.train.export import export

merged, left = Merge.merged, [12]

def dying(self, name):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return merged(self, name)

Merge.merged = dying
base, adapter, out = map(Path, sys.argv[1:4])
export(job(base, adapter, out, overwrite=True, format=sys.argv[4]))
"""


def test_a_killed_export_leaves_no_half_folder(tmp_path: Path, llama: tuple[Path, Path]) -> None:
    """M2: killed half-way, an earlier export stays whole, and the next one clears what was left."""
    out = tmp_path / "out"
    done = export(job(*llama, out, format="gguf"))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    script = KILLED.format(path=[str(Path(__file__).parents[1])])
    killed = subprocess.run([sys.executable, "-c", script, *map(str, llama), str(out), "gguf"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / ".out.partial").is_dir()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert export(job(*llama, out, format="gguf", overwrite=True)).files == done.files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


@pytest.mark.parametrize("form", ["hf", "gguf", "ollama"])
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """M2: Ctrl-C and a full disk leave nothing, and an earlier export as it was."""
    out = tmp_path / "out"
    for earlier in (False, True):
        before = {path.name: path.read_bytes() for path in out.iterdir()} if earlier else {}
        for fault, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space"), CheckpointError)):
            with monkeypatch.context() as patch, pytest.raises(raised):
                patch.setattr(Merge, "merged", _raising(fault))
                export(job(*llama, out, format=form, overwrite=True))
            assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"][: 2 + earlier]
            assert not earlier or {path.name: path.read_bytes() for path in out.iterdir()} == before
        if not earlier:
            export(job(*llama, out, format=form))


def _raising(fault: BaseException) -> Any:
    def merged(self: Merge, name: str) -> torch.Tensor:
        raise fault

    return merged


@pytest.mark.parametrize(("form", "kind", "bits"), [("hf", "bf16", 16), ("gguf", "q8_0", 8.5)])
def test_a_full_disk_is_known_before_anything_is_written(
    tmp_path: Path, llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: str, kind: str, bits: float
) -> None:
    """M3, M7: the need is computed and compared with the free space; the error says both."""
    the_job = job(*llama, tmp_path / "out", format=form, type=kind)
    values = sum(tensor.shape.numel() for tensor in load_file(llama[0] / "model.safetensors").values())
    need = int(values * bits / 8)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 1))
    with pytest.raises(PlanError, match=r"the disk has .* MB left"):
        export(the_job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need))
    assert export(the_job).folder.is_dir()
