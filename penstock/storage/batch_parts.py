"""Batches in parts of bounded size: what is sorted, encoded and written together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from penstock.storage.key_types import Int64Array

PART_BYTES: Final = 256 << 20
"""Of the rows that are sorted together; more only where one batch has more."""
ANY_NUMBER: Final = 1 << 62


def in_parts(
    batches: Iterable[pa.RecordBatch], bytes_max: int, rows_max: int = ANY_NUMBER
) -> Iterator[list[pa.RecordBatch]]:
    """The batches, as many at a time as have no more than so many bytes, or just about so many rows.

    Example:
        >>> batches = [pa.RecordBatch.from_pydict({"n": [0] * rows}) for rows in (1, 2, 1, 5)]
        >>> [[part.num_rows for part in parts] for parts in in_parts(batches, 3 * 8)]
        [[1, 2], [1], [5]]
    """
    part: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if part and (rows >= rows_max or size_bytes + batch.nbytes > bytes_max):
            yield part
            part, rows, size_bytes = [], 0, 0
        part.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
    if part:
        yield part


def in_parts_with(
    batches: Iterable[pa.RecordBatch],
    sequences: Iterable[Int64Array],
    rows_max: int = ANY_NUMBER,
) -> Iterator[tuple[list[pa.RecordBatch], list[Int64Array]]]:
    """The same of up to ``PART_BYTES``, with the sequence of the rows of each batch."""
    remaining = iter(sequences)
    for part in in_parts(batches, PART_BYTES, rows_max):
        yield part, [next(remaining) for _ in part]
