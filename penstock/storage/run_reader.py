"""Reads the segments that keyed state is written in; their format is told where they are written (``run_format``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

WIDTH: Final = b"width"
"""In the metadata of a column of narrow integers: the type that it has in the table."""
CHECKSUM_BYTES: Final = 4
"""Behind the last batch of a segment."""

_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)


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
