"""Several processes share one device: never more than there is, and nothing that the dead still hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quatrain.errors import PlanError
from quatrain.memory.ledger import Entry, Ledger, process_start

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are told apart by /proc")

RESERVE = """
import sys
from pathlib import Path
from quatrain.errors import PlanError
from quatrain.memory.ledger import Ledger
try:
    Ledger(Path(sys.argv[1]), 1000).reserve(int(sys.argv[2]), "child")
except PlanError:
    print("refused", flush=True)
else:
    print("reserved", flush=True)
sys.stdin.read()
"""


def child(path: Path, nbytes: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RESERVE, str(path), str(nbytes)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("")


def entries(path: Path) -> dict[int, int]:
    return {entry["pid"]: entry["nbytes"] for entry in json.loads(path.read_text())}


def test_two_runs_of_one_process_each_have_their_own(tmp_path: Path) -> None:
    """The second is refused what the first holds, and the end of one does not free the other's."""
    ledger = Ledger(tmp_path / "gpu.json", 1000)
    first = ledger.reserve(400, "a")
    second = Ledger(ledger.path, 1000).reserve(500, "b")
    assert first != second and ledger.reserved() == 900 and ledger.reserved_by_others() == 0
    with pytest.raises(PlanError, match=rf"process {os.getpid()} 0 MB \(a\), process {os.getpid()} 0 MB \(b\)"):
        ledger.reserve(101)
    ledger.release(first)
    assert entries(ledger.path) == {os.getpid(): 500}
    ledger.release(first)
    third = ledger.reserve(500)
    assert third != second and ledger.reserved() == 1000
    ledger.release(second), ledger.release(third)
    assert entries(ledger.path) == {}


def test_what_others_hold_is_refused_by_name_and_comes_free_with_their_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gpu.json", 1000)
    other = child(ledger.path, 700)
    assert answer(other) == "reserved"
    assert ledger.reserved_by_others() == 700
    with pytest.raises(PlanError, match=rf"process {other.pid} 0 MB \(child\)"):
        ledger.reserve(301)
    assert entries(ledger.path) == {other.pid: 700}
    ledger.release(ledger.reserve(300))
    end(other)
    ledger.reserve(1000)
    assert entries(ledger.path) == {os.getpid(): 1000}


def test_a_process_number_that_was_given_again_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    parent = os.getppid()
    entry = Entry(parent, process_start(parent), 900, "parent")
    for started, held in ((entry.started, 900), (entry.started + "1", 0)):
        path.write_text(json.dumps([{**vars(entry), "started": started}]))
        assert Ledger(path, 1000).reserved_by_others() == held


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"pid": 1}]', '{"a": 1}'])
def test_a_file_that_is_no_ledger_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    Ledger(path, 10).reserve(10)
    assert entries(path) == {os.getpid(): 10}


def test_of_many_at_once_no_more_than_fit(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    children = [child(path, 300) for _ in range(6)]
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(answer, children))
        assert sorted(answers) == ["refused"] * 3 + ["reserved"] * 3
        assert sum(entries(path).values()) == 900
    finally:
        for process in children:
            end(process)
