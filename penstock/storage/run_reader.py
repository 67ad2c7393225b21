"""Reads the segments that keyed state is written in; their format is told where they are written (``run_format``)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.object_store import RANGE_BYTES
from penstock.storage.run_columns import is_plain

WIDTH: Final = b"width"
"""In the metadata of a column of narrow integers: the type that it has in the table."""

_JOINED_ROWS: Final = 1 << 15
_JOINED_BYTES: Final = 4 << 20
"""A batch that is put together from those of several parts has no more."""

_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where a segment is.

    Attributes:
        offset, size_bytes: within it.
        parts: what it consists of, one behind the other.
        name: of the file and of whose state it is, for messages.
    """

    handle: checkpoint_pb2.StateHandle
    offset: int
    size_bytes: int
    parts: Sequence[checkpoint_pb2.StatePart]
    name: str


@dataclass(frozen=True, slots=True)
class _Read:
    """What is read at once: parts of a segment that lie one behind the other.

    Attributes:
        first, count: of the parts.
        start, size_bytes: within the segment.
    """

    place: SegmentPlace
    first: int
    count: int
    start: int
    size_bytes: int

    def batches(self, data: bytes) -> Iterator[pa.RecordBatch]:
        """What has been read, checked."""
        yield from map(_widened, _joined(self._parts(data)))

    def _parts(self, data: bytes) -> Iterator[tuple[checkpoint_pb2.StatePart, pa.RecordBatch]]:
        """The batches of the parts, as they were written, each with its part."""
        place, offset = self.place, 0
        for index in range(self.first, self.first + self.count):
            part = place.parts[index]
            content = memoryview(data)[offset : offset + part.size_bytes]
            which = f"part {index} of {len(place.parts)}, "
            which += f"key-groups {part.first_key_group} to {part.last_key_group}, "
            _check(content, part.checksum, place, (self.start + offset, part.size_bytes), which)
            offset += part.size_bytes
            for batch in _stored(content):
                yield part, batch


def chain_batches(
    reader: SnapshotReader, chain: Iterable[SegmentPlace], key_groups: range
) -> Iterator[pa.RecordBatch]:
    """The batches of segments that may have rows of some key-groups, in order; bytes of others are not read.

    Raises:
        StoreCorrupt: something of them is not what was written.
        StoreNotFound, StoreTransient: they cannot be read.
    """
    reads = [one for place in chain for one in _reads(place, key_groups)]
    ranges = [(one.place.handle, one.place.offset + one.start, one.size_bytes) for one in reads]
    with closing(reader.read_ranges(ranges)) as contents:
        for one, data in zip(reads, contents, strict=True):
            yield from one.batches(data)


def _reads(place: SegmentPlace, key_groups: range) -> Iterator[_Read]:
    first = count = start = size_bytes = position = 0
    for index, part in enumerate(place.parts):
        is_wanted = (
            part.first_key_group < key_groups.stop and part.last_key_group >= key_groups.start
        )
        if count and (not is_wanted or size_bytes + part.size_bytes > RANGE_BYTES):
            yield _Read(place, first, count, start, size_bytes)
            count = size_bytes = 0
        if is_wanted:
            if not count:
                first, start = index, position
            count += 1
            size_bytes += part.size_bytes
        position += part.size_bytes
    if position != place.size_bytes:
        where = place.handle.path or "the checkpoint's manifest"
        raise StoreCorrupt(
            f"{where} ({place.name}): the parts of a segment have "
            f"{position} bytes, it has {place.size_bytes}"
        )
    if count:
        yield _Read(place, first, count, start, size_bytes)


def _check(
    content: memoryview, checksum: int, place: SegmentPlace, within: tuple[int, int], which: str
) -> None:
    if zlib.crc32(content) == checksum:
        return
    first = place.handle.offset + place.offset + within[0]
    where = place.handle.path or "the checkpoint's manifest"
    raise StoreCorrupt(
        f"{where}, bytes {first} to {first + within[1]} "
        f"({which}{place.name}), is not what was written: its checksum differs"
    )


def _stored(data: bytes | memoryview) -> Iterator[pa.RecordBatch]:
    """The batches of a segment or part as they were written."""
    source = pa.BufferReader(pa.py_buffer(data))
    while source.tell() < source.size():
        with pa.ipc.open_stream(source, options=_READ_OPTIONS) as reader:
            yield from reader


def _joined(
    stored: Iterable[tuple[checkpoint_pb2.StatePart, pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """The batches, small ones together where that leaves their key-groups ascending: each costs whoever takes it as
    much as a thousand rows do."""
    waiting: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    last_key_group = -1
    for part, batch in stored:
        fits = (
            part.first_key_group > last_key_group
            and rows + batch.num_rows <= _JOINED_ROWS
            and size_bytes + part.size_bytes <= _JOINED_BYTES
        )
        if waiting and not (fits and batch.schema.equals(waiting[0].schema, check_metadata=True)):
            yield _one(waiting)
            waiting, rows, size_bytes = [], 0, 0
        waiting.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + part.size_bytes
        last_key_group = part.last_key_group
    if waiting:
        yield _one(waiting)


def _one(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with integers as wide as those of the table."""
    schema = _wide_schema(batch.schema.serialize().to_pybytes())
    columns = [
        column if column.type == field.type else _as_wide(column, field.type)
        for field, column in zip(schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@lru_cache(maxsize=64)
def _wide_schema(narrow: bytes) -> pa.Schema:
    """The table's schema, of that of a stream; kept, since a segment has thousands of streams of few schemas."""
    schema = pa.ipc.read_schema(pa.py_buffer(narrow))
    fields = []
    for field in schema:
        metadata = dict(field.metadata or {})
        width = metadata.pop(WIDTH, None)
        if width is not None:
            kind = pa.type_for_alias(width.decode())
            field = field.with_type(kind).with_metadata(metadata or None)
        fields.append(field)
    return pa.schema(fields, schema.metadata)


def _as_wide(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Integers as wider ones; by numpy, which asks less of a call, where none is null."""
    if is_plain(column):
        return pa.array(column.to_numpy().astype(kind.to_pandas_dtype()))
    return column.cast(kind)
