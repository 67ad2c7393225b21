"""Where the elements of a JSON array begin and end, found without parsing them.

One pass of numpy over the bytes: which quotes are real (not escaped), what lies outside strings, how
deep it is nested. The text starts just after the array's ``[`` or after a comma between two of its
elements, so every block of a long array can be scanned by itself. Stray closing braces belong to the
element they stand in, which is then malformed by itself; an opening brace or quote that is never
closed swallows the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_QUOTE, _OPEN, _CLOSE_BRACE, _CLOSE_BRACKET, _COMMA = 1, 2, 3, 4, 5
_BACKSLASH = ord("\\")

_CLASSES = np.zeros(256, dtype=np.uint8)
for _characters, _class in (
    (b'"', _QUOTE),
    (b"{[", _OPEN),
    (b"}", _CLOSE_BRACE),
    (b"]", _CLOSE_BRACKET),
    (b",", _COMMA),
):
    _CLASSES[list(_characters)] = _class


@dataclass(frozen=True, slots=True)
class ArrayScan:
    """What a stretch of a JSON array holds.

    Attributes:
        commas: offsets of the commas between elements, ascending.
        end: offset of the array's closing bracket, -1 where it is not in the text.
    """

    commas: npt.NDArray[np.int64]
    end: int

    def elements(self, length: int) -> list[tuple[int, int]]:
        """Begin and end of every element of a text of that length (the last may be cut off)."""
        stop = length if self.end < 0 else self.end
        starts = [0, *(int(comma) + 1 for comma in self.commas)]
        ends = [*(int(comma) for comma in self.commas), stop]
        return list(zip(starts, ends, strict=True))

    @property
    def value_starts(self) -> npt.NDArray[np.int64]:
        """Offsets at which elements start."""
        return np.concatenate((np.zeros(1, dtype=np.int64), self.commas + 1))


def scan_array(text: bytes) -> ArrayScan:
    """Finds the boundaries of the elements of a JSON array in a stretch of it."""
    data = np.frombuffer(text, dtype=np.uint8)
    classes = _CLASSES[data]
    where = np.flatnonzero(classes)
    kinds = classes[where]
    if b"\\" in text:
        real = (kinds != _QUOTE) | ~_escaped(data, where)
        where, kinds = where[real], kinds[real]
    quotes = kinds == _QUOTE
    inside = (np.cumsum(quotes, dtype=np.int32) & 1).astype(bool)
    structural = ~(inside | quotes)
    where, kinds = where[structural], kinds[structural]
    return _split(where, kinds)


def _split(where: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]) -> ArrayScan:
    steps = np.zeros(len(kinds), dtype=np.int32)
    steps[kinds == _OPEN] = 1
    steps[(kinds == _CLOSE_BRACE) | (kinds == _CLOSE_BRACKET)] = -1
    depth = np.cumsum(steps, dtype=np.int32)
    stop = len(kinds)
    if depth.min(initial=0) < 0:
        # What closes at no depth is a stray brace, which changes none, or the array's own bracket.
        lowest = np.minimum(np.minimum.accumulate(depth), 0)
        is_outer = np.diff(lowest, prepend=np.int32(0)) < 0
        ends = np.flatnonzero(is_outer & (kinds == _CLOSE_BRACKET))
        stop = int(ends[0]) if len(ends) else stop
        depth = depth - lowest
    is_between = (kinds[:stop] == _COMMA) & (depth[:stop] == 0)
    commas = where[:stop][is_between].astype(np.int64)
    return ArrayScan(commas, int(where[stop]) if stop < len(where) else -1)


def is_nested_deeper(text: bytes, limit: int) -> bool:
    """Whether values in the text are nested deeper than that; too many braces in strings may say so too."""
    data = np.frombuffer(text, dtype=np.uint8)
    classes = _CLASSES[data]
    kinds = classes[(classes == _OPEN) | (classes == _CLOSE_BRACE) | (classes == _CLOSE_BRACKET)]
    if len(kinds) <= limit:
        return False
    depth = np.cumsum(np.where(kinds == _OPEN, 1, -1), dtype=np.int64)
    # Over the lowest depth before: a text may close what it has not opened.
    lowest = np.minimum.accumulate(np.minimum(depth, 0))
    return bool(np.max(depth - lowest) > limit)


def _escaped(data: npt.NDArray[np.uint8], where: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Which of the positions stand behind an odd number of backslashes."""
    positions = np.arange(len(data), dtype=np.int64)
    last_other = np.maximum.accumulate(np.where(data != _BACKSLASH, positions, -1))
    before = np.maximum(where - 1, 0)
    run = np.where(where > 0, before - last_other[before], 0)
    return (run & 1).astype(bool)


def elements_as_lines(text: bytes, scan: ArrayScan) -> bytes:
    """The elements of the scanned text as a stream of values separated by line ends."""
    data = np.frombuffer(text, dtype=np.uint8).copy()
    data[scan.commas] = ord("\n")
    if scan.end >= 0:
        data = data[: scan.end]
    return data.tobytes() + b"\n"
