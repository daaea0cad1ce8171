"""How long `quatrain train` takes from its start to the end of its first step, with the quantised base in the cache.

The command runs as a user's would, in a process of its own; the clock stops when the line of step 1 is in
metrics.jsonl, and the process is ended then. The first start fills the cache and is printed but not counted.

    python bench/startup.py                        # smollm2-135m on the smart home rows, median of 5 starts
    python bench/startup.py --model <folder> --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = Path(__file__).parent.parent / "examples" / "smart_home" / "train.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default=str(ROWS))
    parser.add_argument("--threads", default="2")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, "-m", "quatrain.cli", "train", "--model", options.model, "--data", options.data]
        command += ["--threads", options.threads, "--cache-dir", str(place / "cache"), "--out"]
        total, step = start([*command, str(place / "first")], place / "first")
        print(f"{total:6.2f} s to the end of step 1, {step:.2f} s of it the step: first start, nothing in the cache")
        runs = [start([*command, str(place / str(i))], place / str(i)) for i in range(options.rounds)]
    for total, step in runs:
        print(f"{total:6.2f} s to the end of step 1, {step:.2f} s of it the step")
    median = statistics.median(total for total, _ in runs)
    begun = statistics.median(total - step for total, step in runs)
    print(f"{median:6.2f} s to the end of step 1 and {begun:.2f} s to its beginning: medians of {options.rounds}")


def start(command: list[str], run: Path) -> tuple[float, float]:
    """Seconds until step 1 is written down, and the seconds that the step took. Raises where the command fails."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not (line := first_line(run / "metrics.jsonl")):
            if process.poll() is not None:
                assert process.stderr is not None
                raise SystemExit(process.stderr.read())
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        process.kill()
    metrics = json.loads(line)
    return seconds, metrics["tokens"] / metrics["tokens_per_s"]


def first_line(path: Path) -> str | None:
    """The first line of a file once it is complete."""
    try:
        line = path.open(encoding="utf-8").readline()
    except FileNotFoundError:
        return None
    return line if line.endswith("\n") else None


if __name__ == "__main__":
    main()
