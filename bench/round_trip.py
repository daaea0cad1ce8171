"""What is left of a fine-tune after its export: the demo's adapter, merged and read by others, on held-out requests.

Exports the adapter as a Hugging Face folder (bf16), as GGUF (F16) and as an Ollama folder (GGUF in Q8_0 and a
Modelfile), asks each for greedy answers to the same requests, and counts those that are the expected text, character
for character. Quatrain answers with the adapter and, unquantised, from the Hugging Face folder; llama.cpp answers from
the GGUF files through its Python binding (pip install "quatrain[llamacpp]"). It gets text: what the chat template
renders for the file alone, what the Modelfile's TEMPLATE renders for the Ollama folder; its ids must be training's.

    python examples/demo.py          # trains build/smart_home
    python bench/round_trip.py       # --only SIDE asks one side; what --out has of this adapter is not asked again
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import ROOT, record, write

import quatrain as qt
from quatrain.checkpoint.atomic import sha256_of
from quatrain.cli.main import main as quatrain
from quatrain.cli.use import open_for_use
from quatrain.data.modelfile import render_go
from quatrain.data.modelfile_reader import read_modelfile
from quatrain.data.records import Message

LONGEST_ANSWER = 32  # tokens; the commands have about 20
MOST_LOST = 0.02  # of the adapter's own exact-match rate
THREADS = 2


@dataclass(frozen=True)
class Request:
    """A system text, what a person says, and the only answer that counts."""

    system: str
    text: str
    command: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "build" / "smart_home", help="the run of the demo")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "smart_home" / "held_out.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "round_trip", help="exports and answers")
    parser.add_argument("--only", choices=SIDES, action="append", help="ask this side only (repeatable)")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    requests = [Request(row["system"], row["instruction"], row["response"]) for row in rows]
    found = options.out / "answers.json"
    trained = sha256_of(options.run / "adapter" / "adapter_model.safetensors")
    kept = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
    answers: dict[str, list[str]] = kept["answers"] if kept.get("adapter") == trained else {}
    for side in options.only or SIDES:
        if side not in answers:
            answers[side] = SIDES[side](options.run, options.out, requests)
            found.parent.mkdir(parents=True, exist_ok=True)
            found.write_text(json.dumps({"adapter": trained, "answers": answers}, indent=1), encoding="utf-8")
    if set(answers) != set(SIDES):
        return 0
    matched = {side: exact_match(texts, requests) for side, texts in answers.items()}
    same = {side: share_equal(texts, answers["adapter"]) for side, texts in answers.items()}
    if options.json:
        result = {**record(__file__), "xllamacpp": version("xllamacpp"), "threads": THREADS, "requests": len(requests)}
        write(options.json, {**result, "exact_match": matched, "same_answer_as_adapter": same})
    lost = {side: matched["adapter"] - share for side, share in matched.items()}
    for side in SIDES:
        print(f"{side:8}  exact match {matched[side]:.1%}, the adapter's own answer {same[side]:.1%}")
    if bad := [side for side, share in lost.items() if abs(share) > MOST_LOST]:
        print(f"error: {', '.join(bad)}: off by more than {MOST_LOST:.0%}")
    return bool(bad)


def exact_match(texts: list[str], requests: list[Request]) -> float:
    return share_equal(texts, [request.command for request in requests])


def share_equal(texts: list[str], others: list[str]) -> float:
    return sum(text == other for text, other in zip(texts, others, strict=True)) / len(others)


# The sides.


def adapter(run: Path, out: Path, requests: list[Request]) -> list[str]:
    """As trained: the NF4 base with the adapter beside it."""
    return ours(str(run), requests)


def hf(run: Path, out: Path, requests: list[Request]) -> list[str]:
    return ours(str(exported(run, out / "hf", "hf", "bf16")), requests)


def gguf(run: Path, out: Path, requests: list[Request]) -> list[str]:
    """The file in llama.cpp, with the text of the chat template in it."""
    folder = exported(run, out / "gguf", "gguf", "f16")
    _, renderer = open_for_use(str(folder), None).text_tools()
    assert renderer is not None

    def prompt(turns: list[tuple[str, str]]) -> str:
        return renderer.prompt_text([Message(role, content) for role, content in turns])

    return llama_cpp(next(folder.glob("*.gguf")), run, requests, prompt)


def ollama(run: Path, out: Path, requests: list[Request]) -> list[str]:
    """The file that FROM names in llama.cpp, with the text that TEMPLATE renders."""
    file = read_modelfile(exported(run, out / "ollama", "ollama", "q8_0") / "Modelfile")
    assert file.template is not None
    template: str = file.template
    return llama_cpp(file.model, run, requests, lambda turns: render_go(template, turns))


SIDES: dict[str, Callable[[Path, Path, list[Request]], list[str]]] = {
    "adapter": adapter, "hf": hf, "gguf": gguf, "ollama": ollama,
}  # fmt: skip


def exported(run: Path, folder: Path, form: str, kind: str) -> Path:
    words = ["export", "--adapter", str(run), "--format", form, "--type", kind, "--out", str(folder), "--overwrite"]
    if quatrain(words):
        raise SystemExit(f"error: export to {folder} failed")
    return folder


def ours(model: str, requests: list[Request]) -> list[str]:
    """Greedy answers of a result, opened as `quatrain chat` opens it."""
    it = open_for_use(model, None)
    pipe, _ = it.load({"max_seq_len": 128, "micro_batch_tokens": 128})
    rows = pipe.generate_ids(prompts(model, requests), qt.GenerateConfig(max_new_tokens=LONGEST_ANSWER))
    return [it.tokenizer().decode(ids) for ids in rows]


def prompts(model: str, requests: list[Request]) -> list[list[int]]:
    _, renderer = open_for_use(model, None).text_tools()
    assert renderer is not None
    return [renderer.prompt_ids(request.text, request.system) for request in requests]


def llama_cpp(
    model: Path, run: Path, requests: list[Request], prompt: Callable[[list[tuple[str, str]]], str]
) -> list[str]:
    """llama.cpp's greedy answers. Raises SystemExit where its ids of a prompt are not those of training."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 512, 1, False
    params.verbosity = 1  # errors only
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)

    def post(path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(asked, timeout=120))

    answers = []
    for request, want in zip(requests, prompts(str(run), requests), strict=True):
        text = prompt([("system", request.system), ("user", request.text)])
        ids = post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        if ids != want:
            raise SystemExit(f"error: {model}: llama.cpp reads another prompt than training had: {ids} for {want}")
        answers.append(post("/completion", prompt=text, n_predict=LONGEST_ANSWER, temperature=0)["content"])
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
