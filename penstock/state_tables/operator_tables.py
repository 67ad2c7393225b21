"""State that belongs to no key as tables: lists of subtasks, broadcast maps, positions of sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgpack
import pyarrow as pa

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.state_tables.value_columns import ReadableValues
from penstock.storage.blobs import SnapshotReader, list_items
from penstock.storage.codec import ENTRY_ARROW

SPLITS: Final = "splits"
DONE_SPLITS: Final = "done splits"
SUBTASK: Final = "subtask"
SPLITS_SCHEMA: Final = pa.schema(
    [
        (SUBTASK, pa.int32()),
        ("id", pa.string()),
        ("payload", pa.binary()),
        ("size", pa.int64()),
        ("min_event_time_ms", pa.int64()),
        ("position", pa.binary()),
        ("done", pa.bool_()),
    ]
)
DONE_SCHEMA: Final = pa.schema([("digest", pa.binary(16))])
_BROADCAST = checkpoint_pb2.REDISTRIBUTION_BROADCAST
_OWN_CODECS: Final = ("arrow.", "msgpack/", "pickle/")


def list_kind(held: checkpoint_pb2.OperatorStateSnapshot) -> str:
    """What a list is: "split list", "union list", "broadcast map" or "broadcast list"."""
    name = checkpoint_pb2.Redistribution.Name(held.redistribution)
    word = name.removeprefix("REDISTRIBUTION_").lower()
    return f"{word} map" if ENTRY_ARROW in held.codec else f"{word} list"


def list_schema(held: checkpoint_pb2.OperatorStateSnapshot) -> pa.Schema:
    """The columns of a list."""
    fields = [] if held.redistribution == _BROADCAST else [pa.field(SUBTASK, pa.int32())]
    return pa.schema([*fields, *(pa.field(name, one.type) for name, one in _columns(held))])


def list_batch(
    held: checkpoint_pb2.OperatorStateSnapshot, subtask_index: int, reader: SnapshotReader
) -> pa.RecordBatch:
    """The items of a list in one subtask.

    Raises:
        StoreCorrupt, StoreNotFound, StoreTransient: they cannot be read.
    """
    items = list_items(held, reader)
    columns = [
        one.shown(one.decoded([_part(item, place, held) for item in items]))
        for place, (_, one) in enumerate(_columns(held))
    ]
    schema = list_schema(held)
    if len(schema) > len(columns):
        columns.insert(0, pa.array([subtask_index] * len(items), pa.int32()))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class ItemColumn:
    """Items, or keys or values of a broadcast map, which are stored as a database stores values.

    Args:
        codec: its name; one of the runtime's own stays bytes.
    """

    def __init__(self, codec: str) -> None:
        self._values = ReadableValues(codec) if codec.startswith(_OWN_CODECS) else None
        self.type: pa.DataType = pa.binary() if self._values is None else self._values.type

    def shown(self, stored: pa.Array) -> pa.Array:
        """The readable values of stored forms."""
        return stored if self._values is None else self._values.shown(stored)

    def decoded(self, items: list[bytes]) -> pa.Array:
        """The stored forms."""
        return pa.array(items, pa.binary()) if self._values is None else self._values.decoded(items)

    def encoded(self, shown: pa.Array, where: str) -> list[bytes]:
        """Items of readable values.

        Raises:
            StateError: one does not fit.
        """
        if self._values is None:
            return list(shown.cast(pa.binary()).to_pylist())
        return self._values.encoded(shown, where)


def item_columns(codec: str) -> list[tuple[str, ItemColumn]]:
    """(name, column) of a list whose items are encoded so."""
    key_codec, arrow, value_codec = codec.partition(ENTRY_ARROW)
    if arrow:
        return [("map_key", ItemColumn(key_codec)), ("value", ItemColumn(value_codec))]
    return [("item", ItemColumn(codec))]


def _columns(held: checkpoint_pb2.OperatorStateSnapshot) -> list[tuple[str, ItemColumn]]:
    return item_columns(held.codec)


def _part(item: bytes, place: int, held: checkpoint_pb2.OperatorStateSnapshot) -> bytes:
    if ENTRY_ARROW not in held.codec:
        return item
    try:
        part: bytes = msgpack.unpackb(item)[place]
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreCorrupt(f"an entry of state {held.name!r} cannot be read: {error}") from error
    return part


def packed(parts: list[list[bytes]]) -> list[bytes]:
    """Items of their parts: themselves, or the entries of keys and values."""
    if len(parts) == 1:
        return parts[0]
    return [bytes(msgpack.packb(list(entry))) for entry in zip(*parts, strict=True)]


def entry_key(item: bytes) -> bytes:
    """The key of an entry of a broadcast map, as it is stored."""
    key: bytes = msgpack.unpackb(item)[0]
    return key


def splits_batch(operator: checkpoint_pb2.OperatorSnapshot, subtask_index: int) -> pa.RecordBatch:
    """The splits that one subtask of a source has."""
    rows = [
        {
            SUBTASK: subtask_index,
            "id": one.id,
            "payload": one.payload,
            "size": one.size,
            "min_event_time_ms": one.min_event_time_ms
            if one.HasField("min_event_time_ms")
            else None,
            "position": one.position if one.HasField("position") else None,
            "done": one.done,
        }
        for one in operator.splits
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SPLITS_SCHEMA)


def done_batches(
    done: checkpoint_pb2.DoneSplits, reader: SnapshotReader
) -> Iterator[pa.RecordBatch]:
    """Digests of the splits that a source has read to their end.

    Raises:
        StoreCorrupt, StoreNotFound, StoreTransient: they cannot be read.
    """
    size = DONE_SCHEMA.field(0).type.byte_width
    for content in (*map(reader.read, done.chunks), done.loose):
        count = len(content) // size
        if count:
            buffer = pa.py_buffer(content[: count * size])
            digests = pa.Array.from_buffers(DONE_SCHEMA.field(0).type, count, [None, buffer])
            yield pa.RecordBatch.from_arrays([digests], schema=DONE_SCHEMA)
