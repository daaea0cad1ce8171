"""The elements of a JSON array, parsed one by one out of a window over the file, which may be larger than memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quatrain.data.outcome import RowError
from quatrain.errors import DataError

SPACE = " \t\r\n"  # what JSON takes for white space; str.strip() takes more
_PIECE = 1 << 20  # bytes
_LONGEST_LITERAL = 10  # "-Infinity" and one more


class ArrayReader:
    """Reads the array in `file` (UTF-8 without BOM), or the one object; `path` is for messages.

    Holds an element and a piece of the file in memory.
    """

    def __init__(self, file: IO[bytes], path: Path, decoder: json.JSONDecoder) -> None:
        self._file, self._path, self._decoder = file, path, decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self._mark, self._line, self._column = 0, 1, 1  # a place in the window and its line and column in the file
        self._bytes = file.tell()  # read so far

    def elements(self) -> Iterator[tuple[int, Any]]:
        """(line that it starts on, value) of each element in order. Raises DataError with line and column at the first
        fault, since where the next element begins is then unknown."""
        begin = self._peek()
        if begin == "{":
            yield self._value()
        elif begin == "[":
            yield from self._between_brackets()
        else:
            raise self._fail(self._at, "want a JSON array of objects, or one object on each line")
        if self._peek():
            raise self._fail(self._at, f"text after the end of the {'array' if begin == '[' else 'object'}")

    def _between_brackets(self) -> Iterator[tuple[int, Any]]:
        self._at += 1
        first = True
        while self._peek() != "]":
            if not first:
                self._comma()
            first = False
            yield self._value()
        self._at += 1

    def _comma(self) -> None:
        found = self._peek()
        if found != ",":
            raise self._fail(self._at, "want a comma or the end of the array" if found else "the array is cut short")
        self._set_mark()
        self._at += 1
        if self._peek() == "]":
            raise self._fail(self._mark, "trailing comma before the end of the array")

    def _value(self) -> tuple[int, Any]:
        """(line, value) of the value at the place, which moves behind it."""
        self._set_mark()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_cut(error) and self._more():
                    continue
                raise self._fail(error.pos, self._problem(error)) from error
            except RecursionError as error:
                raise self._fail(self._at, "nested too deeply") from error
            except RowError as error:  # the decoder's own checks
                raise DataError(f"{self._path}:{self._line}: {error}") from None
            except ValueError as error:  # an integer with thousands of digits
                raise self._fail(self._at, f"not JSON: {error}") from error
            if end == len(self._text) and self._more():  # a number may go on
                continue
            self._at = end
            return self._line, value

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the window's end can be the reason: a string that does not end, or a fault within a literal of it."""
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LONGEST_LITERAL

    def _problem(self, error: json.JSONDecodeError) -> str:
        """What is wrong, once the window's end is the file's."""
        if error.msg.startswith("Unterminated string") or not self._text[error.pos :].strip(SPACE):
            return "cut short: the file ends within a row"
        comma = self._text[self._mark : error.pos].rstrip().endswith(",")
        return "trailing comma" if comma else f"not JSON: {error.msg}"

    def _peek(self) -> str:
        """The next character that is not white space, or "" at the end; the place moves to it."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read on and let go of what lies before the mark. Reads at least as much as it keeps: a long element is then
        tried a few times, not once a piece."""
        if self._ended:
            return False
        raw = self._file.read(max(_PIECE, len(self._text) - self._mark))
        self._ended = not raw
        try:
            text = self._utf8.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:  # of what was left of the piece before, and this one
            at = self._bytes - (len(error.object) - len(raw)) + error.start
            line = self._line_of(len(self._text)) + error.object.count(b"\n", 0, error.start)
            raise DataError(f"{self._path}:{line}: not UTF-8 at byte {at + 1} of the file") from error
        if self._ended:
            return False
        self._bytes += len(raw)
        self._text, self._at, self._mark = self._text[self._mark :] + text, self._at - self._mark, 0
        return True

    def _set_mark(self) -> None:
        """At the place: nothing before it is needed again."""
        self._line, self._column = self._line_of(self._at), self._column_of(self._at)
        self._mark = self._at

    def _line_of(self, at: int) -> int:
        return self._line + self._text.count("\n", self._mark, at)

    def _column_of(self, at: int) -> int:
        newline = self._text.rfind("\n", self._mark, at)
        return at - newline if newline >= 0 else self._column + at - self._mark

    def _fail(self, at: int, problem: str) -> DataError:
        return DataError(f"{self._path}:{self._line_of(at)}: column {self._column_of(at)}: {problem}")
