"""Format of the segments that the in-memory backend writes, version 1. Tools read it too.

A segment is an Arrow IPC stream, its buffers compressed with LZ4, followed by the CRC-32 of the stream (4
bytes, little-endian); all segments of a snapshot lie one after the other in one file
(``KeyedStateSnapshot.segments`` says where, the checksum included). Its schema is the table's
``StateTable.schema``, without dictionary types. The columns, by kind of table:

======== ==============================================================================================
all      ``__key_group`` uint16, ascending within a batch
         ``__deleted`` bool, where single rows can be removed: the row is a tombstone, the columns behind
         its identity are null
group    identity ``key_0``, ``key_1``, ...; then ``number_<i>_<accumulator kind>`` (null = no value yet),
         then the states of the group columns
value    identity ``key_0``, ...; then ``value``
list     identity ``key_0``, ...; then ``items``: list
map      identity ``key_0``, ..., ``map_key``; then ``value``
timers   identity ``key_0``, ..., ``time`` int64 (milliseconds)
rows     ``__sequence`` int64, then the rows' columns; rows have no identity and are never replaced
sessions see ``session_table``
counts   see ``count_table``
======== ==============================================================================================

The segments of a table and namespace form a chain, in the order of ``KeyedStateSnapshot.segments``: of all
rows of an identity, tombstones included, the last one counts. Rows of key-groups that are not the
snapshot's do not count. The metadata of
a field names the codec of its values (``codec``); the schema's own metadata has ``ttl_ms`` where values
are kept with a time stamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import UInt16Array
from penstock.storage.key_types import value_type
from taskmanager.kernels import encode_keys
from taskmanager.state.key_batches import retyped

FORMAT_VERSION: Final = 1
KEY_GROUP: Final = "__key_group"
DELETED: Final = "__deleted"
CODEC: Final = b"codec"

_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)


def key_fields(key_types: Sequence[pa.DataType]) -> list[pa.Field]:
    """The key columns of a segment."""
    return [pa.field(f"key_{index}", value_type(kind)) for index, kind in enumerate(key_types)]


def plain_keys(keys: KeyBatch) -> KeyBatch:
    """The same keys, whose arrays have plain types."""
    return retyped(keys, [value_type(kind) for kind in keys.types])


def sorted_batch(
    schema: pa.Schema, key_groups: UInt16Array, columns: Sequence[pa.Array]
) -> pa.RecordBatch:
    """A batch of a segment.

    Args:
        schema: of the segment.
        key_groups: uint16[n], in any order.
        columns: the other columns of the schema, n rows each.
    """
    if len(key_groups) and (key_groups[1:] < key_groups[:-1]).any():
        order = np.argsort(key_groups, kind="stable")
        key_groups = key_groups[order]
        indices = pa.array(order)
        columns = [column.take(indices) for column in columns]
    return pa.RecordBatch.from_arrays([pa.array(key_groups), *columns], schema=schema)


def within(batch: pa.RecordBatch, key_groups: range) -> pa.RecordBatch:
    """The rows of a batch that belong to a range of key-groups; not copied."""
    groups = batch.column(0).to_numpy()
    start = int(np.searchsorted(groups, key_groups.start, side="left"))
    stop = int(np.searchsorted(groups, key_groups.stop, side="left"))
    if start == 0 and stop == len(groups):
        return batch
    return batch.slice(start, stop - start)


def split_tombstones(
    batch: pa.RecordBatch, identity_count: int
) -> tuple[KeyBatch | None, pa.RecordBatch | None]:
    """The removed identities, and the rows of a batch with tombstones; None where there are none."""
    deleted = batch.column(1)
    count = deleted.true_count
    if not count:
        return None, batch
    buried = batch if count == batch.num_rows else batch.filter(deleted)
    rows = None if count == batch.num_rows else batch.filter(pa.compute.invert(deleted))
    return encode_keys(buried.columns[2 : 2 + identity_count]), rows


def write_segment(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """The bytes of a segment, part by part, as the batches are made."""
    sink = _Parts()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema, options=_OPTIONS) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield from sink.take()
    yield from sink.take()


def read_segment(data: bytes | memoryview) -> Iterator[pa.RecordBatch]:
    """The batches of a segment.

    Raises:
        pyarrow.ArrowInvalid: the bytes are no segment.
    """
    with pa.ipc.open_stream(pa.py_buffer(data), options=_READ_OPTIONS) as reader:
        yield from reader


class _Parts:
    """A file that collects what is written to it."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        """Adds a part."""
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> list[bytes]:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return parts
