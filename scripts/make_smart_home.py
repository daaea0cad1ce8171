"""Writes the smart home data set of the demo: plain requests and the strict JSON command each of them means.

`examples/smart_home/phrasings.json` holds the sentences, written by hand, apart for training and for the held-out rows.
This script fills in rooms and values from one seed, so the files are the same bytes on every machine. Held-out rows are
new twice over: none of their sentences and none of their (device, room, action, value) combinations occurs in training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "smart_home"
SEED = 7
TRAIN_PER_INTENT = 32
UNSEEN_ROOMS = 3  # for commands without a value: rooms in which training never gives this command


@dataclass(frozen=True)
class Example:
    """One row, and what it was made from."""

    phrasing: str
    device: str
    room: str
    action: str
    value: int | str | None

    @property
    def combination(self) -> tuple[str, str, str, int | str | None]:
        return self.device, self.room, self.action, self.value

    @property
    def request(self) -> str:
        text = self.phrasing.format(room=self.room, value=self.value)
        return text[0].upper() + text[1:]

    @property
    def command(self) -> str:
        """Strict JSON: these four keys in this order, no spaces, null where the action takes no value."""
        fields = {"device": self.device, "room": self.room, "action": self.action, "value": self.value}
        return json.dumps(fields, separators=(",", ":"))


def make(seed: int = SEED) -> tuple[list[Example], list[Example]]:
    """(training examples, held-out examples), both in a shuffled order that `seed` fixes."""
    phrasings = json.loads((FOLDER / "phrasings.json").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    train: list[Example] = []
    held_out: list[Example] = []
    for number, intent in enumerate(phrasings["intents"]):
        seen, unseen = _combinations(phrasings["rooms"], intent, number, rng)
        train += _fill(intent, "train", seen, TRAIN_PER_INTENT, rng)
        held_out += _fill(intent, "held_out", unseen, len(intent["held_out"]), rng)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def _combinations(
    rooms: list[str], intent: dict[str, Any], number: int, rng: random.Random
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The (room, value) pairs that training may use, and those that only held-out rows use."""
    if "values" not in intent:
        first = UNSEEN_ROOMS * number
        unseen = [rooms[(first + i) % len(rooms)] for i in range(UNSEEN_ROOMS)]
        return [(room, None) for room in rooms if room not in unseen], [(room, None) for room in unseen]
    pairs = list(itertools.product(rooms, intent["values"]))
    rng.shuffle(pairs)
    count = len(intent["held_out"])
    return pairs[count:], pairs[:count]


def _fill(
    intent: dict[str, Any], part: str, pairs: list[tuple[str, Any]], count: int, rng: random.Random
) -> list[Example]:
    """`count` different examples that use every sentence of `part` equally often, give or take one."""
    sentences, examples = list(intent[part]), set()
    rng.shuffle(sentences)
    rng.shuffle(pairs)
    pair = itertools.cycle(pairs)
    for sentence in itertools.islice(itertools.cycle(sentences), count):
        for room, value in pair:
            example = Example(sentence, intent["device"], room, intent["action"], value)
            if example not in examples:
                examples.add(example)
                break
    return sorted(examples, key=lambda example: (example.phrasing, example.combination[1], str(example.value)))


def jsonl(examples: list[Example]) -> str:
    """The rows as a file's text: one JSON object a line."""
    system = json.loads((FOLDER / "phrasings.json").read_text(encoding="utf-8"))["system"]
    rows = [{"system": system, "instruction": example.request, "response": example.command} for example in examples]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="write train.jsonl and held_out.jsonl of the smart home data set")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write into")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in zip(("train.jsonl", "held_out.jsonl"), make(), strict=True):
        (folder / name).write_text(jsonl(examples), encoding="utf-8", newline="\n")
        print(f"{folder / name}: {len(examples)} rows")


if __name__ == "__main__":
    main()
