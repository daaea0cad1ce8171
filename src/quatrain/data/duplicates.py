"""Findings that need all rows of a set, or two sets: copies, near copies, overlap, contradictions, outliers.

Rows are compared by their tokens. Each is kept as three 64-bit hashes and a MinHash signature, about 120 bytes with its
place in the files: the share of equal entries in two signatures estimates the share of token runs that the two rows
have in common. Rows that agree in a whole band of their signatures are the candidates (locality-sensitive hashing), so
time grows with the number of rows, not with its square.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quatrain.data.findings import PLACES_SHOWN, Finding, finding
from quatrain.data.order import generator
from quatrain.data.row import IGNORE, Row
from quatrain.data.tokenizer import Tokenizer

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]  # places of rows in a set

_SIZE, _BAND = 32, 4  # entries of a signature, of 16 bits; four of them, a band, are one 64-bit number
_RUN = 5  # tokens
_NEAR = 0.85  # estimated share of common runs from which two rows are nearly the same
_FEWEST_RUNS = 4  # a row with fewer runs of its own says too little
_MOST_TOKENS = 8192  # of a row that its signature looks at
_BLOCK, _SAMPLED = 1000, 200
_SHARED = 0.2  # what a fifth of the sampled rows of a block share is an instruction, not a copy
_ENOUGH = 20  # rows from which shares say something
_NO_LINE = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Fingerprints:
    """Of the rows of one set, in the order they were added. With `near` False no signatures are made. Sets that are to
    be compared take their `shared` runs from one another."""

    tokenizer: Tokenizer
    near: bool = True
    shared: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))  # sorted

    def __post_init__(self) -> None:
        self._files: dict[str, int] = {}
        self._file, self._line = array("I"), array("q")
        self._hashes = array("Q")
        self._sizes = array("I")
        self._signatures: list[NDArray[np.uint16]] = []
        self._block: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        return len(self._line)

    def add(self, row: Row) -> None:
        """Take in one row."""
        file, _, line = row.source.rpartition(":")
        file, number = (file, int(line)) if line.isdecimal() else (row.source, _NO_LINE)
        self._file.append(self._files.setdefault(file, len(self._files)))
        self._line.append(number)
        ids, learned = np.array(row.input_ids, dtype=np.int64), np.array(row.labels) != IGNORE
        begin = _begin_of_answer(learned)
        self._hashes.extend(_hash(part.tobytes()) for part in (ids, ids[:begin], ids[begin:]))
        self._sizes.extend((len(row), int(learned[1:].sum())))
        if self.near:
            self._block.append(ids[:_MOST_TOKENS])
            if len(self._block) == _BLOCK:
                self._sign()

    def extend(self, rows: Iterable[Row]) -> Fingerprints:
        """Take in several rows, and return itself."""
        for row in rows:
            self.add(row)
        return self

    @property
    def whole(self) -> Hashes:
        """Hashes of the whole rows, uint64 [n]."""
        return self._parts[:, 0]

    @property
    def prompt(self) -> Hashes:
        """Hashes of what stands before the last answer, uint64 [n]."""
        return self._parts[:, 1]

    @property
    def answer(self) -> Hashes:
        """Hashes of the last answer and what follows it, uint64 [n]."""
        return self._parts[:, 2]

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """(tokens, supervised tokens) of each row, uint32 [n, 2]."""
        return np.array(self._sizes, dtype=np.uint32).reshape(-1, 2)

    @property
    def signatures(self) -> NDArray[np.uint16]:
        """MinHash signatures, uint16 [n, 32]; zeros where a row says too little."""
        if self._block:
            self._sign()
        return np.concatenate([np.zeros((0, _SIZE), np.uint16), *self._signatures])

    def sources(self, places: Places) -> list[str]:
        """The "file:line" of the first few of `places`."""
        return [self.source(int(place)) for place in places[:PLACES_SHOWN]]

    def source(self, place: int) -> str:
        """The "file:line" of a row."""
        file, line = list(self._files)[self._file[place]], self._line[place]
        return file if line == _NO_LINE else f"{file}:{line}"

    @property
    def _parts(self) -> Hashes:
        return np.array(self._hashes, dtype=np.uint64).reshape(-1, 3)

    def _sign(self) -> None:
        """Signatures of the rows in `_block`."""
        words = [_without_zeros(self._words[ids]) for ids in self._block]
        runs = [_runs(of_row) for of_row in words]
        self._block = []
        some = [np.unique(of_row) for of_row in runs[:: max(1, len(runs) // _SAMPLED)]]
        counted, counts = np.unique(np.concatenate(some), return_counts=True)
        if len(some) > 2:  # in a small set what all rows share, else what many do
            self.shared = np.union1d(self.shared, counted[counts > max(min(10, len(some) - 1), _SHARED * len(some))])
        self._signatures.append(_signatures([_without(of_row, self.shared) for of_row in runs]))

    @cached_property
    def _words(self) -> Hashes:
        """A hash for each token id; 0 for tokens that do not count. Tokens that differ in case or white space have one
        hash; punctuation and control tokens have none."""
        words = np.zeros(self.tokenizer.vocab_size, dtype=np.uint64)
        for token, index in self.tokenizer.vocabulary.items():
            plain = token.translate(_SPACES).strip().lower()
            if token not in self.tokenizer.added_tokens and (not plain.isascii() or any(map(str.isalnum, plain))):
                words[index] = zlib.crc32(plain.encode("utf-8", "replace")) or 1
        return words


def within(prints: Fingerprints) -> list[Finding]:
    """Copies, near copies, contradictions, a dominating answer and outliers of a set."""
    n, found = len(prints), []
    if n < 2:
        return []
    here = np.arange(n)
    earlier, near, asked = (
        _earliest(prints.whole),
        _near(prints.signatures, prints.signatures),
        _earliest(prints.prompt),
    )
    is_copy = earlier < here
    is_near = (near >= 0) & (near < here) & ~is_copy
    contradicts = (asked < here) & (prints.answer[asked] != prints.answer) & ~is_near
    for kind, which, like in (
        ("duplicates", is_copy, earlier),
        ("near-duplicates", is_near, near),
        ("same-prompt", contradicts, asked),
    ):
        if which.any():
            found.append(finding(kind, int(which.sum()), n, _pairs(prints, prints, which, like)))
    if n < _ENOUGH:
        return found
    first, counts = np.unique(prints.answer, return_index=True, return_counts=True)[1:]
    most = int(counts.max())
    if most >= 0.2 * n:
        places = np.flatnonzero(prints.answer == prints.answer[first[counts.argmax()]])
        found.append(finding("identical-answers", most, n, prints.sources(places)))
    lengths, answers = prints.lengths.T
    for kind, which in (
        ("long-rows", lengths > 8 * np.median(lengths)),
        ("short-answers", answers < np.median(answers) / 20),
    ):
        if which.any():
            found.append(finding(kind, int(which.sum()), n, prints.sources(np.flatnonzero(which))))
    return found


def between(train: Fingerprints, validation: Fingerprints) -> list[Finding]:
    """What validation rows have in common with training rows."""
    if not (len(train) and len(validation)):
        return []
    same, asked = _place_in(validation.whole, train.whole), _place_in(validation.prompt, train.prompt)
    is_asked = (asked >= 0) & (same < 0)
    found = [("overlap", same >= 0, same), ("prompt-overlap", is_asked, asked)]
    if train.near and validation.near:
        near = _near(validation.signatures, train.signatures)
        found.append(("near-overlap", (near >= 0) & (same < 0) & ~is_asked, near))
    return [
        finding(kind, int(which.sum()), len(validation), _pairs(validation, train, which, like))
        for kind, which, like in found
        if which.any()
    ]


def _pairs(prints: Fingerprints, others: Fingerprints, which: NDArray[np.bool_], like: Places) -> list[str]:
    places = np.flatnonzero(which)[:PLACES_SHOWN]
    return [f"{prints.source(int(place))}: see {others.source(int(like[place]))}" for place in places]


def _earliest(hashes: Hashes) -> Places:
    """The first place of each value, at each of its places."""
    first, inverse = np.unique(hashes, return_index=True, return_inverse=True)[1:]
    return np.asarray(first[inverse])


def _place_in(wanted: Hashes, there: Hashes) -> Places:
    """The first place of each wanted value in `there`, or -1."""
    order = np.argsort(there, kind="stable")
    at = np.searchsorted(there, wanted, sorter=order).clip(max=len(there) - 1)
    return np.where(there[order[at]] == wanted, order[at], -1)


def _begin_of_answer(learned: NDArray[np.bool_]) -> int:
    """Where the last run of learned tokens begins."""
    end = len(learned) - int(learned[::-1].argmax())
    before = ~learned[:end]
    return end - int(before[::-1].argmax()) if before.any() else 0


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


# Near copies

_SPACES = str.maketrans("Ġ▁Ċĉ", "    ")  # how vocabularies spell white space
_FACTORS = generator(0, "minhash").bit_generator.random_raw(2 * _SIZE).reshape(2, _SIZE) | np.uint64(1)


def _without_zeros(words: Hashes) -> Hashes:
    return np.asarray(words[words != 0])


def _runs(words: Hashes) -> Hashes:
    """A hash of each run of words."""
    runs = np.zeros(max(0, len(words) - _RUN + 1), dtype=np.uint64)
    for offset in range(_RUN):
        runs = runs * _MIX + words[offset : offset + len(runs)]
    return np.asarray(runs ^ (runs >> np.uint64(29)))


def _without(runs: Hashes, shared: Hashes) -> Hashes:
    """The runs that are not in `shared`, which is sorted."""
    if not len(shared):
        return runs
    at = np.searchsorted(shared, runs).clip(max=len(shared) - 1)
    return np.asarray(runs[shared[at] != runs])


def _signatures(runs: Sequence[Hashes]) -> NDArray[np.uint16]:
    """For each row, and each of 32 orders of all possible runs, 16 bits of the first one that the row has."""
    signatures = np.zeros((len(runs), _SIZE), dtype=np.uint16)
    usable = np.array([len(of_row) >= _FEWEST_RUNS for of_row in runs])
    told = [of_row for of_row in runs if len(of_row) >= _FEWEST_RUNS]
    if told:
        joined, begins = np.concatenate(told), np.cumsum([0, *map(len, told[:-1])])
        for entry, (factor, offset) in enumerate(_FACTORS.T):
            least = np.minimum.reduceat(joined * factor + offset, begins)
            signatures[usable, entry] = (least * _MIX) >> np.uint64(48)
    return signatures


def _near(signatures: NDArray[np.uint16], others: NDArray[np.uint16]) -> Places:
    """For each signature a place in `others` with nearly the same one, or -1. Compared with itself, it finds itself
    where there is none before it."""
    best = np.full(len(signatures), -1, dtype=np.int64)
    told = signatures.any(axis=1)
    for band in range(0, _SIZE, _BAND):
        bands = (np.ascontiguousarray(some[:, band : band + _BAND]) for some in (signatures, others))
        place = _place_in(*(entries.view(np.uint64)[:, 0] for entries in bands))
        rows = np.flatnonzero((place >= 0) & told)
        like = place[rows]
        alike = (signatures[rows] == others[like]).mean(axis=1) >= _NEAR
        rows, like = rows[alike], like[alike]
        best[rows] = np.where((best[rows] < 0) | (like < best[rows]), like, best[rows])
    return best
