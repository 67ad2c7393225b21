"""Which rows of a chain of segments count: of all rows of one identity the last one, unless it says that it is gone.

A chain is merged some key-groups at a time, so that what is in memory is bounded, whatever the state takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.pb.checkpoint_pb2 import StatePart
from penstock.storage.blobs import SnapshotReader
from penstock.storage.entries.entry_rows import KEY_NAME
from penstock.storage.key_encoding import KeyBatch, concatenated_keys, encode_keys
from penstock.storage.key_types import BoolArray, Int64Array
from penstock.storage.run_columns import DELETED, within
from penstock.storage.run_lists import joined_lists, marks_of, without_marks
from penstock.storage.run_reader import SegmentPlace, chain_batches

MERGED_BYTES: Final = 16 << 20
"""About so much of a chain, as it is stored, is merged at once; more only where one key-group has more."""

_ALSO_IDENTITY: Final = {("map", "map_key"), ("timers", "time"), ("sessions", "start")}
"""Beside the key: (kind of table, column)."""


def identity_of(kind: str, schema: pa.Schema) -> list[str]:
    """The columns that a row of a kind of table is known by; none = rows are never replaced."""
    if kind == "rows":
        return []
    return [
        name for name in schema.names if KEY_NAME.fullmatch(name) or (kind, name) in _ALSO_IDENTITY
    ]


def latest(batches: Sequence[pa.RecordBatch], identity: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows that count, of all batches of some key-groups, oldest segment first; lists come whole.

    Example: the second segment has changed one key, and removed another.
        >>> base = pa.record_batch({"__deleted": [False, False], "key_0": [1, 2], "value": ["a", "b"]})
        >>> change = pa.record_batch({"__deleted": [True, False], "key_0": [1, 2], "value": [None, "c"]})
        >>> [one.to_pylist() for one in latest([base, change], ["key_0"])]
        [[{'__deleted': False, 'key_0': 2, 'value': 'c'}]]
    """
    batches = [batch for batch in batches if batch.num_rows]
    if not batches or not identity:
        yield from batches
        return
    keys = [encode_keys([one.column(name) for name in identity]) for one in batches]
    codes = identity_codes(concatenated_keys(keys))
    appended, batches = marks_of(batches), [without_marks(batch) for batch in batches]
    if appended.any():
        yield from joined_lists(batches, codes, appended)
        return
    last = np.empty(len(codes), np.int64)
    places = np.arange(len(codes))
    last[codes] = places  # the last write to an element stays
    counts: BoolArray = last[codes] == places
    start = 0
    for batch in batches:
        kept = counts[start : start + batch.num_rows]
        start += batch.num_rows
        deleted = batch.column(DELETED)
        if deleted.true_count:
            kept = kept & ~deleted.to_numpy(zero_copy_only=False)
        if kept.all():
            yield batch
        elif kept.any():
            yield batch.filter(pa.array(kept))


def whole_lists(
    batches: Iterable[pa.RecordBatch], identity: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Lists of which rows that are added stand directly behind those that they are added to, as whole ones."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        firsts = np.flatnonzero(~marks_of([batch]))
        if len(firsts):  # the last list may go on in the next batch
            last = int(firsts[-1])
            yield from latest([*held, batch.slice(0, last)], identity)
            held, batch = [], batch.slice(last)
        held.append(batch)
    yield from latest(held, identity)


def identity_codes(keys: KeyBatch) -> Int64Array:
    """int64[n]: numbers below n, the same for the same identities."""
    if keys.fixed is not None:
        mask = keys.nulls
        values = pa.array(keys.fixed, mask=mask)
    else:
        assert keys.data is not None
        assert keys.offsets is not None
        buffers = [None, pa.py_buffer(np.ascontiguousarray(keys.offsets)), pa.py_buffer(keys.data)]
        values = pa.Array.from_buffers(pa.large_binary(), len(keys), buffers)
    indices = values.dictionary_encode("encode").indices
    return indices.to_numpy().astype(np.int64)


def merged_rows(
    reader: SnapshotReader,
    chain: Sequence[SegmentPlace],
    identity: Sequence[str],
    key_groups: range,
) -> Iterator[pa.RecordBatch]:
    """The rows of a chain that count, some key-groups after the others; lists come whole.

    Raises:
        StoreCorrupt, StoreNotFound, StoreTransient: they cannot be read.
    """
    for some in merged_at_once([place.parts for place in chain], key_groups):
        rows = (within(batch, some) for batch in chain_batches(reader, chain, some))
        yield from latest(list(rows), identity) if identity else rows


def merged_at_once(
    chain: Sequence[Sequence[StatePart]], key_groups: range, limit_bytes: int = MERGED_BYTES
) -> Iterator[range]:
    """Key-groups whose rows are merged together.

    Args:
        chain: the parts of each segment; one without parts is empty.
        key_groups: those that are wanted.

    Example: small ones together, large ones by themselves.
        >>> sizes = [(0, 0, 60), (1, 2, 40), (3, 3, 90)]
        >>> parts = [
        ...     StatePart(first_key_group=first, last_key_group=last, size_bytes=size)
        ...     for first, last, size in sizes
        ... ]
        >>> list(merged_at_once([parts], range(4), limit_bytes=100))
        [range(0, 3), range(3, 4)]
    """
    sizes = dict.fromkeys(key_groups, 0.0)
    for parts in chain:
        for part in parts:
            groups = range(part.first_key_group, part.last_key_group + 1)
            for group in groups:
                if group in sizes:
                    sizes[group] += part.size_bytes / len(groups)
    start, size_bytes = key_groups.start, 0.0
    for group, size in sizes.items():
        if size_bytes and size_bytes + size > limit_bytes:
            yield range(start, group)
            start, size_bytes = group, 0.0
        size_bytes += size
    if start < key_groups.stop:
        yield range(start, key_groups.stop)
