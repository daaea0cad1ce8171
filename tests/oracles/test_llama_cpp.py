"""What we export, as llama.cpp itself reads it (the optional test extra `llamacpp`)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import families
from trained import VOCAB, job, write_adapter, write_base, write_smollm2_adapter

from quatrain.checkpoint.gguf_vocab import gguf_vocabulary
from quatrain.checkpoint.gguf_writer import write_gguf
from quatrain.checkpoint.merge import Merge, source_logits
from quatrain.checkpoint.open import open_source
from quatrain.checkpoint.peft import read_adapter
from quatrain.data.records import Message
from quatrain.errors import ModelError
from quatrain.train.export import PROBE_TEXT, Job, export, probe_ids

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's Python binding: pip install quatrain[llamacpp]")


class Bare(Merge):
    """The base as if nothing had been trained."""

    merged = Merge.base


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """(base, adapter, folder for exports)."""
    folder = tmp_path_factory.mktemp("llamacpp")
    yield smollm2_path, write_smollm2_adapter(folder / "adapter", smollm2_path), folder


class LlamaCpp:
    def __init__(self, model: Path, lora: Path | None = None) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 512, 1, False
        params.verbosity = 1  # errors only
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        if lora is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
        self.server = xllamacpp.Server(params)

    def post(self, path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request, timeout=120))

    def tokens(self, text: str) -> list[int]:
        return list(self.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"])

    def likeliest(self, ids: list[int]) -> dict[int, float]:
        # Half a character or an end token would be held back, and what it was chosen from with it: "a" is forced.
        sampling = {"n_predict": 1, "temperature": 0, "n_probs": 8, "post_sampling_probs": False}
        answer = self.post("/completion", prompt=ids, logit_bias=[["a", 1000.0]], **sampling)
        return {each["id"]: each["logprob"] for each in answer["completion_probabilities"][0]["top_logprobs"]}


def distance(got: dict[int, float], logits: torch.Tensor) -> float:
    """The largest difference between llama.cpp's log-probabilities and ours."""
    want = logits[-1].log_softmax(-1)
    assert len(got) == 8
    return max(abs(logprob - float(want[token])) for token, logprob in got.items())


def exported(smollm2: tuple[Path, Path, Path], **options: Any) -> tuple[Job, Path]:
    base, adapter, folder = smollm2
    the_job = job(base, adapter, folder / f"{options['format']}-{options.get('type', 'auto')}", **options)
    return the_job, next(export(the_job).folder.glob("*.gguf"))


def test_a_merged_model(smollm2: tuple[Path, Path, Path]) -> None:
    """L1, L5, B1: the ids of training, BOS included, and the adapter model's logits within the rounding of F16."""
    the_job, model = exported(smollm2, format="gguf")
    llama, ids = LlamaCpp(model), probe_ids(the_job)
    assert llama.tokens(PROBE_TEXT) == the_job.tokenizer.encode(PROBE_TEXT, bos=True)
    assert llama.tokens(the_job.renderer.prompt_text([Message("user", PROBE_TEXT)])) == ids
    # The same weights, here in fp32, there with activations in 16 bits: ten roundings of F16 at logits of 20.
    assert distance(llama.likeliest(ids), source_logits(open_source(str(model)), ids)) < 0.1


def test_an_adapter_alone(smollm2: tuple[Path, Path, Path]) -> None:
    """On the base's own file, llama.cpp computes what the adapter on that base computes."""
    the_job, adapter = exported(smollm2, format="gguf-adapter")
    ids = probe_ids(the_job)
    merge = Merge(the_job.source, read_adapter(the_job.adapter), None)
    want = merge.adapter_logits(ids)
    # llama.cpp multiplies Q4_1 weights with activations in 8 bits: about 1 % of the logits' spread, here 6.
    assert distance(LlamaCpp(smollm2[0], adapter).likeliest(ids), want) < 0.5
    assert distance(LlamaCpp(smollm2[0]).likeliest(ids), want) > 1


# Tiny models of all families, but for what llama.cpp cannot compute and export refuses.
REFUSED = {
    "llama-rope-dynamic", "llama-rope-yarn", "qwen2-tied-mixed-windows", "qwen2-yarn-mscale", "qwen3-bias",
    "qwen3-mixed-windows",
}  # fmt: skip
VARIANTS = [variant for variant in families.VARIANTS if variant.name not in REFUSED]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_family(tmp_path: Path, variant: families.Variant) -> None:
    """L5: the merged model, and the adapter alone on a file of the bare base, are the adapter model."""
    base = write_base(tmp_path / "base", variant)
    adapter = write_adapter(tmp_path / "adapter", base, variant)
    the_job = job(base, adapter, tmp_path / "merged", format="gguf", type="f32")
    export(the_job)
    ids = probe_ids(the_job)[: the_job.source.spec.windows[0] or 60]  # llama.cpp knows no window; of 64 positions
    merge = Merge(the_job.source, read_adapter(adapter), None)
    trained = source_logits(open_source(str(tmp_path / "merged")), ids)
    got = LlamaCpp(tmp_path / "merged" / "model-f32.gguf").likeliest(ids)
    assert distance(got, trained) < 0.02

    export(job(base, adapter, tmp_path / "alone", format="gguf-adapter"))
    bare = Bare(the_job.source, read_adapter(adapter), None)
    vocabulary = gguf_vocabulary(the_job.tokenizer, VOCAB, PROBE_TEXT, bos_written=False)
    write_gguf(tmp_path / "bare.gguf", bare, "f32", vocabulary, "bare")
    got = LlamaCpp(tmp_path / "bare.gguf", tmp_path / "alone" / "adapter.gguf").likeliest(ids)
    assert distance(got, merge.adapter_logits(ids)) < 0.02
    assert distance(got, merge.base_logits(ids)) > 0.1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_llama_cpp_cannot_compute_is_refused(tmp_path: Path, name: str) -> None:
    """L5: no file is written that llama.cpp would not load, or would compute otherwise."""
    base = write_base(tmp_path / "base", families.BY_NAME[name])
    adapter = write_adapter(tmp_path / "adapter", base, families.BY_NAME[name])
    with pytest.raises(ModelError, match=r"llama\.cpp has no"):
        export(job(base, adapter, tmp_path / "out", format="gguf"))
