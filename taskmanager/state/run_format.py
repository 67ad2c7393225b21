"""Format of the segments that the in-memory backend writes, and canonical savepoints consist of, version 3. Tools read
it too.

A segment is a sequence of Arrow IPC streams, one for each of its *parts*: rows of some key-groups, cut such that most
parts share none (``run_parts``). ``KeyedStateSnapshot.segments`` says of each part which key-groups it has, its size and
its CRC-32, so that parts are read and checked by themselves. All segments of a snapshot lie one after the other in one
file. (In version 2 a segment had no parts, and the CRC-32 of all its bytes followed it, 4 bytes, little-endian: such
segments are read, and later snapshots refer to them.) A segment's schema is the table's
``StateTable.schema``, without dictionary types, but a stream holds integers in the narrowest type that is wide
enough, unsigned where none is negative: the metadata of such a field has the type of the schema
(``width``). Where that leaves no wide column it is as small as compressed and written in a fraction of the
time; the buffers of other streams are compressed with LZ4. (In version 1 it was one stream of all batches,
not narrowed, compressed.) The columns, by kind of table:

======== ==============================================================================================
all      ``__key_group`` uint16, ascending within a batch
         ``__deleted`` bool, where single rows can be removed: the row is a tombstone, the columns behind
         its identity are null
group    identity ``key_0``, ``key_1``, ...; then ``number_<i>_<accumulator kind>`` (null = no value yet),
         then the states of the group columns; the metadata ``uses`` of both says which aggregates they are for
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

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import value_type
from penstock.storage.run_columns import is_plain
from penstock.storage.run_reader import WIDTH
from taskmanager.kernels import encode_keys
from taskmanager.state.key_batches import retyped

FORMAT_VERSION: Final = 3

_COMPACT_BITS: Final = 32
_PLAIN: Final = pa.ipc.IpcWriteOptions(use_threads=False)
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""On the thread that writes: others would take the cores from those who process rows."""
_UNSIGNED: Final = {
    kind: (0, (1 << kind.bit_width) - 1) for kind in (pa.uint8(), pa.uint16(), pa.uint32())
}
_SIGNED: Final = {
    kind: (-(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1)
    for kind in (pa.int8(), pa.int16(), pa.int32())
}
"""Type -> the smallest and the largest number."""


def key_fields(key_types: Sequence[pa.DataType]) -> list[pa.Field]:
    """The key columns of a segment."""
    return [pa.field(f"key_{index}", value_type(kind)) for index, kind in enumerate(key_types)]


def plain_keys(keys: KeyBatch) -> KeyBatch:
    """The same keys, whose arrays have plain types."""
    return retyped(keys, [value_type(kind) for kind in keys.types])


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


def write_segment(batches: Iterable[pa.RecordBatch]) -> Iterator[memoryview]:
    """The bytes of a segment, batch by batch, as these are made."""
    for batch in map(_narrowed, batches):
        sink = pa.BufferOutputStream()
        options = _PLAIN if _is_compact(batch.schema) else _COMPRESSED
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        yield memoryview(sink.getvalue())


def _narrowed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with integers in the narrowest types that hold them."""
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = _narrowest(column)
        if kind != field.type:
            metadata = {**(field.metadata or {}), WIDTH: str(field.type)}
            field = field.with_type(kind).with_metadata(metadata)
            column = (
                pa.array(column.to_numpy().astype(kind.to_pandas_dtype()))
                if is_plain(column)
                else column.cast(kind, safe=False)
            )
        fields.append(field)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def _narrowest(column: pa.Array) -> pa.DataType:
    if not pa.types.is_integer(column.type):
        return column.type
    bounds = pa.compute.min_max(column)
    smallest, largest = bounds["min"].as_py() or 0, bounds["max"].as_py() or 0
    for kind, (lowest, highest) in (_UNSIGNED if smallest >= 0 else _SIGNED).items():
        if kind.bit_width >= column.type.bit_width:
            break
        if lowest <= smallest and largest <= highest:
            return kind
    return column.type


def _is_compact(schema: pa.Schema) -> bool:
    return all(
        pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width <= _COMPACT_BITS)
        for kind in schema.types
    )
