"""Reads the segments that keyed state is written in; their format is told where they are written (``run_format``)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.object_store import RANGE_BYTES

WIDTH: Final = b"width"
"""In the metadata of a column of narrow integers: the type that it has in the table."""
CHECKSUM_BYTES: Final = 4
"""Behind the last batch of a segment that has no parts."""

_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Rows of some key-groups within a segment.

    Attributes:
        first_key_group, last_key_group: of its rows, both inclusive.
        size_bytes: the parts of a segment lie one behind the other.
        checksum: CRC-32 of the bytes.
    """

    first_key_group: int
    last_key_group: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where a segment is.

    Attributes:
        handle: of its file.
        offset, size_bytes: within it.
        parts: what it consists of; none where it was written before there were any.
        name: of the file and of whose state it is, for messages.
    """

    handle: checkpoint_pb2.StateHandle
    offset: int
    size_bytes: int
    parts: Sequence[SegmentPart]
    name: str


def parts_of(segment: checkpoint_pb2.StateSegment) -> tuple[SegmentPart, ...]:
    """The parts of a segment."""
    return tuple(
        SegmentPart(one.first_key_group, one.last_key_group, one.size_bytes, one.checksum)
        for one in segment.parts
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """What is read at once: parts of a segment that lie one behind the other, or one that has none.

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
        place, offset = self.place, 0
        if not place.parts:
            content = memoryview(data)[:-CHECKSUM_BYTES]
            stored = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
            _check(content, stored, place, (0, place.size_bytes), "")
            yield from read_segment(content)
        for index in range(self.first, self.first + self.count):
            part = place.parts[index]
            content = memoryview(data)[offset : offset + part.size_bytes]
            which = f"part {index} of {len(place.parts)}, "
            which += f"key-groups {part.first_key_group} to {part.last_key_group}, "
            _check(content, part.checksum, place, (self.start + offset, part.size_bytes), which)
            offset += part.size_bytes
            yield from read_segment(content)


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
    if not place.parts and place.size_bytes:
        yield _Read(place, 0, 0, 0, place.size_bytes)
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


def read_segment(data: bytes | memoryview) -> Iterator[pa.RecordBatch]:
    """The batches of a segment, whose checksum has been looked at and is not among the bytes.

    Raises:
        pyarrow.ArrowInvalid: the bytes are no segment.
    """
    source = pa.BufferReader(pa.py_buffer(data))
    while source.tell() < source.size():
        with pa.ipc.open_stream(source, options=_READ_OPTIONS) as reader:
            yield from map(_widened, reader)


def _widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with integers as wide as those of the table."""
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        metadata = dict(field.metadata or {})
        width = metadata.pop(WIDTH, None)
        if width is not None:
            kind = pa.type_for_alias(width.decode())
            field = field.with_type(kind).with_metadata(metadata or None)
            column = column.cast(kind)
        fields.append(field)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))
