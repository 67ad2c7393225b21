"""Values of the entries of aggregates: the numbers, and which of them are there.

A value is 8 bytes little-endian per accumulator, then, where some accumulator of the batch that was
written had no value, one bit per accumulator (1 = has a value), in whole bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.storage.entries.byte_strings import ByteStrings
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import BoolArray

Values = npt.NDArray[Any]
"""int64[n], uint64[n] or float64[n]."""


def encoded_rows(
    accumulators: Sequence[Values], validity: Sequence[BoolArray | None]
) -> ByteStrings:
    """The values of n records.

    Args:
        accumulators: per accumulator n numbers of 8 bytes.
        validity: per accumulator bool[n], False where it has no value; None = all have.
    """
    count, width = len(accumulators[0]), 8 * len(accumulators)
    numbers = np.empty((count, len(accumulators)), np.int64)
    for column, values in enumerate(accumulators):
        numbers[:, column] = values.view(np.int64)
    matrix = numbers.view(np.uint8).reshape(count, width)
    if any(valid is not None for valid in validity):
        seen = np.ones((count, len(accumulators)), np.bool_)
        for column, valid in enumerate(validity):
            if valid is not None:
                seen[:, column] = valid
        matrix = np.hstack([matrix, np.packbits(seen, axis=1, bitorder="little")])
    return ByteStrings.rows_of(matrix)


def decoded_rows(
    kinds: Sequence[np.dtype[Any]], values: list[bytes]
) -> tuple[list[Values], list[BoolArray | None]]:
    """Inverse of ``encoded_rows``: accumulators, of these types, and validity of n values."""
    width = 8 * len(kinds)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    data = np.frombuffer(b"".join(values), np.uint8)
    starts = bounds_of(lengths)[:-1]
    if len(values) and (lengths == lengths[0]).all():
        matrix = data.reshape(len(values), int(lengths[0]))
        numbers = np.ascontiguousarray(matrix[:, :width])
    else:
        numbers = data[starts[:, None] + np.arange(width)]
    words = numbers.view("<i8").reshape(len(values), len(kinds))
    accumulators: list[Values] = [
        np.ascontiguousarray(words[:, column]).view(kind) for column, kind in enumerate(kinds)
    ]
    marked = np.flatnonzero(lengths > width)
    if not len(marked):
        return accumulators, [None] * len(kinds)
    mark_bytes = -(-len(kinds) // 8)
    marks = data[starts[marked, None] + width + np.arange(mark_bytes)]
    seen = np.ones((len(values), len(kinds)), np.bool_)
    seen[marked] = np.unpackbits(marks, axis=1, count=len(kinds), bitorder="little") == 1
    validity: list[BoolArray | None] = [
        None if seen[:, column].all() else seen[:, column] for column in range(len(kinds))
    ]
    return accumulators, validity
