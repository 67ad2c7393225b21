"""Lists in runs whose rows add to those before, as whole lists (pure).

A row of a list that is marked ``__appended`` has items that come behind those of the rows of its key before it; all
others replace these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.key_types import BoolArray, Int64Array
from penstock.storage.run_columns import APPENDED_FIELD, DELETED

JOINED_BYTES: Final = 128 << 20
"""About so much is joined at once; more only where one list has more."""

_NAME: Final = APPENDED_FIELD.name


def marked(kind: str, schema: pa.Schema) -> pa.Schema:
    """The schema of a state with the column of marks where it is of lists and was written without."""
    if kind != "list" or _NAME in schema.names:
        return schema
    return schema.insert(len(schema) - 1, APPENDED_FIELD)


def unmarked(schema: pa.Schema) -> pa.Schema:
    """The schema of a state without the column of marks."""
    place = schema.get_field_index(_NAME)
    return schema if place < 0 else schema.remove(place)


def with_marks(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of lists with the column of marks: where it is missing, each replaces what was before."""
    if _NAME in batch.schema.names:
        return batch
    place = batch.num_columns - 1
    return batch.add_column(place, APPENDED_FIELD, pa.repeat(False, batch.num_rows))


def without_marks(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows without the column of marks."""
    return batch.drop_columns([_NAME]) if _NAME in batch.schema.names else batch


def marks_of(batches: Sequence[pa.RecordBatch]) -> BoolArray:
    """bool[n]: which of all rows are added to what was before."""
    return np.concatenate(
        [
            batch.column(_NAME).to_numpy(zero_copy_only=False)
            if _NAME in batch.schema.names
            else np.zeros(batch.num_rows, np.bool_)
            for batch in batches
        ]
    )


def joined_lists(
    batches: Sequence[pa.RecordBatch], codes: Int64Array, appended: BoolArray
) -> Iterator[pa.RecordBatch]:
    """The whole lists, one row each, without those that are gone or empty; each batch by ascending key-group.

    Args:
        batches: all rows of some key-groups, oldest segment first, without marks; lists are the last column.
        codes: int64[n], a number below n per list.
        appended: bool[n], the marks.

    Example: an item is added to the first list.
        >>> kind = pa.list_(pa.int64())
        >>> rows = {"__key_group": [0, 9, 0], "__deleted": [False] * 3, "key_0": [1, 2, 1], "items": pa.array([[5], [6], [7, 8]], kind)}
        >>> codes, appended = np.array([0, 1, 0]), np.array([False, False, True])
        >>> [one.to_pylist() for one in joined_lists([pa.record_batch(rows)], codes, appended)][0][0]["items"]
        [5, 7, 8]
    """
    places = np.arange(len(codes))
    begins = np.zeros(len(codes), np.int64)
    begins[codes[~appended]] = places[~appended]  # the last one stays
    order = np.argsort(codes, kind="stable")
    order = order[places[order] >= begins[codes[order]]]
    for part in _parts(order, codes, sum(batch.nbytes for batch in batches)):
        rows = _taken(batches, part)
        firsts = np.flatnonzero(np.diff(codes[part], prepend=-1))
        lists = rows.column(rows.num_columns - 1)
        lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(np.add.reduceat(lengths, firsts))])
        whole = _lists(lists.type, offsets, lists.flatten())
        heads = rows.take(pa.array(firsts))
        there = offsets[1:] > offsets[:-1]
        columns = [*heads.columns[:-1], whole]
        columns[heads.schema.get_field_index(DELETED)] = pa.repeat(False, len(firsts))
        joined = pa.RecordBatch.from_arrays(columns, schema=rows.schema).filter(pa.array(there))
        yield joined.take(pa.array(np.argsort(joined.column(0).to_numpy(), kind="stable")))


def _parts(order: Int64Array, codes: Int64Array, size_bytes: int) -> Iterator[Int64Array]:
    """Pieces of rows that are ordered by list, cut between lists."""
    if not len(order):
        return
    count = 1 + size_bytes // JOINED_BYTES
    firsts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    wanted = np.linspace(0, len(order), count + 1).astype(np.int64)[1:-1]
    cuts = np.unique(firsts[np.searchsorted(firsts, wanted, side="right") - 1])
    yield from (part for part in np.split(order, cuts) if len(part))


def _taken(batches: Sequence[pa.RecordBatch], rows: Int64Array) -> pa.RecordBatch:
    """Rows of all batches, in the order of ``rows``."""
    ascending = np.sort(rows)
    bounds = np.cumsum([0, *(batch.num_rows for batch in batches)])
    cuts = np.searchsorted(ascending, bounds)
    pieces = [
        batch.take(pa.array(ascending[first:stop] - start))
        for batch, start, first, stop in zip(batches, bounds, cuts, cuts[1:], strict=False)
        if stop > first
    ]
    return pa.concat_batches(pieces).take(pa.array(np.searchsorted(ascending, rows)))


def _lists(kind: pa.DataType, offsets: Int64Array, items: pa.Array) -> pa.Array:
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets), items, type=kind)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), items, type=kind)
