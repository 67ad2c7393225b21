"""Format of the segments that the in-memory backend writes, and canonical savepoints consist of, version 4. Tools read
it too.

A segment is a sequence of Arrow IPC streams, one for each of its *parts*: rows of some key-groups, cut such that most
parts share none (``penstock/storage/run_writer.py``). ``KeyedStateSnapshot.segments`` says of each part which key-groups it has, its size and
its CRC-32, so that parts are read and checked by themselves. All segments of a snapshot lie one after the other in one
file. A segment's schema is the table's
``StateTable.schema``, without dictionary types, but a stream holds integers in the narrowest type that is wide
enough, unsigned where none is negative: the metadata of such a field has the type of the schema
(``width``). Where that leaves no wide column it is as small as compressed and written in a fraction of the
time; the buffers of other streams are compressed with LZ4. The columns, by kind of table:

======== ==============================================================================================
all      ``__key_group`` uint16, ascending within a batch
         ``__deleted`` bool, where single rows can be removed: the row is a tombstone, the columns behind
         its identity are null
group    identity ``key_0``, ``key_1``, ...; then ``number_<i>_<accumulator kind>`` (null = no value yet),
         then the states of the group columns; the metadata ``uses`` of both says which aggregates they are for
value    identity ``key_0``, ...; then ``value``
list     identity ``key_0``, ...; then ``__appended`` bool; then ``items``: list
map      identity ``key_0``, ..., ``map_key``; then ``value``
timers   identity ``key_0``, ..., ``time`` int64 (milliseconds)
rows     ``__sequence`` int64, then the rows' columns; rows have no identity and are never replaced
sessions see ``session_table``
counts   see ``count_table``
======== ==============================================================================================

The segments of a table and namespace form a chain, in the order of ``KeyedStateSnapshot.segments``: of all
rows of an identity, tombstones included, the last one counts; but of a list the items of a row that is
``__appended`` come behind those of the rows before it (where the column is missing, as in version 3, none is). Rows of key-groups that are not the
snapshot's do not count. The metadata of
a field names the codec of its values (``codec``); the schema's own metadata has ``ttl_ms`` where values
are kept with a time stamp.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch, retyped
from penstock.storage.key_types import value_type
from taskmanager.kernels import encode_keys


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
