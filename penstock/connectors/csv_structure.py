"""Where the rows of a CSV text end, quoted line ends included.

The text starts at the start of a row. Quotes open a field only at its start, a doubled quote inside
is a quote (RFC 4180, as pyarrow reads it). Text in which every second quote stands where a field may
open is split by counting quotes; text with quotes elsewhere is split by a slower regular expression.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_LINE_END, _QUOTE, _RETURN = ord("\n"), ord('"'), ord("\r")

_QUOTED_STEPS = 64
"""So many quoted fields with line ends are gone back over one by one for the last row's end."""


@lru_cache
def _row_pattern(delimiter: str) -> re.Pattern[bytes]:
    # A carriage return is followed by a new field too, of the next row or (empty) before the "\n".
    between = re.escape(delimiter.encode()) + rb"\r"
    field = rb'(?:"(?:[^"]++|"")*+"[^%s\n]*+|(?!")[^%s\n]*+)' % (between, between)
    return re.compile(rb"%s(?:[%s]%s)*+\n" % (field, between, field))


def row_ends(text: bytes, delimiter: str = ",") -> npt.NDArray[np.int64]:
    """Offsets just behind the line end of every row that ends in the text, ascending."""
    data = np.frombuffer(text, dtype=np.uint8)
    line_ends = np.flatnonzero(data == _LINE_END)
    if b'"' not in text:
        return line_ends + 1
    quotes = np.flatnonzero(data == _QUOTE)
    if not _opens_fields(data, quotes[::2], ord(delimiter)):
        return _row_ends_by_grammar(text, delimiter)
    quotes_before = np.searchsorted(quotes, line_ends)
    return line_ends[(quotes_before & 1) == 0] + 1


def last_row_end(text: bytes, delimiter: str = ",") -> int:
    """The last of ``row_ends``, 0 where there is none; costs less than all of them."""
    data = np.frombuffer(text, dtype=np.uint8)
    quotes = np.flatnonzero(data == _QUOTE)
    if _opens_fields(data, quotes[::2], ord(delimiter)):
        behind = len(text)
        for _ in range(_QUOTED_STEPS):
            line_end = text.rfind(b"\n", 0, behind)
            quotes_before = int(np.searchsorted(quotes, line_end))
            if line_end < 0 or quotes_before % 2 == 0:
                return line_end + 1
            behind = int(quotes[quotes_before - 1])
    ends = row_ends(text, delimiter)
    return int(ends[-1]) if len(ends) else 0


def _opens_fields(data: npt.NDArray[np.uint8], openers: npt.NDArray[Any], delimiter: int) -> bool:
    """Whether each of the quotes stands where a field starts, or doubles the quote before it."""
    before = data[np.maximum(openers - 1, 0)]
    fits = (openers == 0) | (before == delimiter) | (before == _LINE_END) | (before == _QUOTE)
    return bool(np.all(fits | (before == _RETURN)))


def _row_ends_by_grammar(text: bytes, delimiter: str) -> npt.NDArray[np.int64]:
    ends: list[int] = []
    position, row = 0, _row_pattern(delimiter)
    # No match: the rest has an open quote, or no line end.
    while match := row.match(text, position):
        position = match.end()
        ends.append(position)
    return np.array(ends, dtype=np.int64)
