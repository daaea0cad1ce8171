"""Greedy decoding of SmolLM2-135M-Instruct beside transformers' `generate` in bf16: new tokens a second.

Both sides compute in bf16 from the same weights: Quatrain holds the linears in NF4 and transformers holds the values
that they stand for (--quantize none: plain bf16 on both sides). Same prompt ids, same number of new tokens, one prompt
at a time; the sides take turns and each number is a median. `decode` leaves the prompt out: (n - 1) tokens over the
time of n less the time of one.

Tokens are compared first. Two bf16 computations may part where two tokens are nearly equally likely, and from there on
they continue different texts. So where they part, transformers' own logits of its token and of ours must be closer than
16 bf16 steps at their size (eps / 2 each, a random walk through some 60 roundings, doubled); anything else is an error.

    python bench/generate.py
    python bench/generate.py --quick     # a smoke run
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import MODEL, ROOT, export, record, write

PROMPTS = (
    "Write a long story about a lighthouse keeper and a storm.",
    "Explain in detail how bread is made, from the field to the table.",
    "Describe a walk through an old town, street by street.",
)
STEPS_APART = 16

Generate = Callable[[list[int], int], list[int]]
"""(prompt ids, how many) -> the new ids."""


def main() -> int:
    options = parse()
    import torch

    torch.set_num_threads(options.threads)
    new, rounds = (8, 1) if options.quick else (options.new_tokens, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        pipe, model = load(Path(folder), options.quantize)
    prompts = [pipe.chat_ids(None, prompt) for prompt in (PROMPTS[:1] if options.quick else PROMPTS)]
    equal = [compare(pipe, model, prompt, new) for prompt in prompts]
    print(f"equal tokens before the first near-tie, of {new}: {equal}")
    sides: dict[str, Generate] = {"quatrain": quatrain(pipe), "transformers": transformers(model)}
    found: dict[str, dict[str, list[float]]] = {side: {"whole": [], "decode": []} for side in sides}
    for _ in range(rounds):
        for prompt in prompts:
            for side, generate in sides.items():
                one, whole = (seconds(generate, prompt, count) for count in (1, new))
                found[side]["whole"].append(round(new / whole, 2))
                found[side]["decode"].append(round((new - 1) / (whole - one), 2))
    result = {
        **record(__file__),
        "threads": options.threads,
        "new_tokens": new,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "equal_tokens": equal,
        "tokens_per_second": {side: {name: median(all_) for name, all_ in it.items()} for side, it in found.items()},
        "all_tokens_per_second": found,
    }
    for side, rates in result["tokens_per_second"].items():
        print(f"{side:14}{rates['whole']:8.1f} tokens/s with the prompt, {rates['decode']:8.1f} without")
    name = f"generate_{options.quantize}{'_quick' if options.quick else ''}.json"
    write((ROOT / "build" if options.quick else options.out) / name, result)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", choices=["nf4", "none"], default="nf4", help="how Quatrain holds the linears")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="only to see that it works: the result goes to build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the result")
    return parser.parse_args()


def load(folder: Path, quantize: str) -> tuple[Any, Any]:
    """Both models in bf16, from the same weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from quatrain import InstructConfig, InstructPipeline
    from quatrain.checkpoint.open import open_source

    logging.disable_progress_bar()
    source = open_source(MODEL)
    export(source, folder / "base", "bf16")
    export(open_source(str(folder / "base")), folder / "peer", "bf16", through_nf4=quantize == "nf4")
    config = InstructConfig(quantize=quantize, compute_dtype="bf16", cache=False)
    pipe = InstructPipeline.from_pretrained(folder / "base", config)
    pipe.tokenizer = source.tokenizer()  # the exported folder has weights alone
    model = AutoModelForCausalLM.from_pretrained(folder / "peer", dtype=torch.bfloat16).eval()
    return pipe, model


def quatrain(pipe: Any) -> Generate:
    from quatrain import GenerateConfig

    def generate(prompt: list[int], count: int) -> list[int]:
        (ids,) = pipe.generate_ids([prompt], GenerateConfig(max_new_tokens=count))
        return list(ids)

    return generate


def transformers(model: Any) -> Generate:
    import torch

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return [int(token) for token in out[0, len(prompt) :]]

    return generate


def compare(pipe: Any, model: Any, prompt: list[int], count: int) -> int:
    """How many leading tokens are equal. AssertionError where the sides part without a near-tie, or end early: then the
    times would not be of the same work."""
    import torch

    ours, theirs = quatrain(pipe)(prompt, count), transformers(model)(prompt, count)
    for side, ids in (("quatrain", ours), ("transformers", theirs)):
        assert len(ids) == count, f"{side}: the answer ends after {len(ids)} of {count} tokens: ask for fewer"
    at = next((i for i in range(count) if ours[i] != theirs[i]), count)
    if at < count:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + theirs[:at]])).logits[0, -1].float()
        gap, size = float(logits[theirs[at]] - logits[ours[at]]), float(logits[theirs[at]].abs())
        bound = STEPS_APART * torch.finfo(torch.bfloat16).eps / 2 * size
        assert gap <= bound, f"token {at}: the logits are {gap:.3f} apart, a near-tie would be within {bound:.3f}"
    return at


def seconds(generate: Generate, prompt: list[int], count: int) -> float:
    time.sleep(0.05)  # the other side's threads go to sleep first
    began = time.perf_counter()
    generate(prompt, count)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
