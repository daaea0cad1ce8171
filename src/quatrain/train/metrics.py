"""`metrics.jsonl`: one JSON object per optimizer step and per evaluation, appended as they happen."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from quatrain.checkpoint.atomic import write_file
from quatrain.errors import CheckpointError


class MetricsLog:
    """Appends lines; on resume drops those after the checkpoint's step, so that no step appears twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Write one line. JSON has no NaN: a number that is not finite is written as null, never as 0."""
        clean = {name: None if _not_finite(value) else value for name, value in record.items()}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}", hint="is the disk full?") from error

    def truncate(self, step: int) -> None:
        """Keep the lines up to optimizer step `step`. What a crash left of others, text or not, goes too."""
        if not self.path.exists():
            return
        kept = []
        try:
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line + b"\n")
            write_file(self.path, b"".join(kept))
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}", hint="move it away") from error


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
