"""A row of data as the engine sees it: token ids, and which of them are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IGNORE = -100


@dataclass(frozen=True)
class Row:
    """One tokenised example. `labels` has `input_ids`' length, unshifted: `labels[i]` is `input_ids[i]` where token i
    is supervised (predicted from i-1 and counted in the loss) and -100 elsewhere. `source` is "file:line" for
    messages."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    source: str = ""

    @classmethod
    def from_pair(cls, prompt_ids: Sequence[int], response_ids: Sequence[int], source: str = "") -> Row:
        """A row whose response is supervised and whose prompt is not."""
        prompt, response = tuple(prompt_ids), tuple(response_ids)
        return cls(prompt + response, (IGNORE,) * len(prompt) + response, source)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        """Tokens that enter the loss. The first token of a row has no predecessor to be predicted from."""
        return sum(label != IGNORE for label in self.labels[1:])
