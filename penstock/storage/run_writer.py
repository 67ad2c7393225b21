"""Writes the segments that keyed state is kept in; their format is told in ``taskmanager/state/run_format.py``.

The rows of a segment are cut into parts by key-group, so that each range of key-groups is read by itself.

Rows come in batches each of which may hold all key-groups; many of them together are sorted, and cut where one key-group
ends and the next begins. A subtask that restores a range then reads few pieces, which hold little else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.batch_parts import in_parts
from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import is_plain, is_same_mark
from penstock.storage.run_reader import WIDTH

SORTED_BYTES: Final = 16 << 20
"""About so much is sorted at once; more only where one batch has more."""
PART_BYTES: Final = 32 << 10
"""A part has at least about so much, unless all rows that are sorted together have less."""

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


class SegmentWriter:
    """Writes one segment.

    Attributes:
        parts: of what was written.
        row_count: rows, tombstones included.
    """

    def __init__(self) -> None:
        self.parts: list[checkpoint_pb2.StatePart] = []
        self.row_count = 0

    @property
    def size_bytes(self) -> int:
        """Of what was written."""
        return sum(part.size_bytes for part in self.parts)

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[memoryview]:
        """The bytes of rows, which come behind those that were written before.

        Args:
            batches: rows in any order of key-groups; of several rows of one identity the last one counts, and a batch has none of it twice but for a
                tombstone before a row.
        """
        for part in in_parts((batch for batch in batches if batch.num_rows), SORTED_BYTES):
            yield from self._written(part, sum(batch.nbytes for batch in part))

    def whole(
        self, table: int, namespace: int, file: str, offset: int
    ) -> checkpoint_pb2.StateSegment:
        """What was written, as a snapshot names it that has nothing else of a table and namespace."""
        return checkpoint_pb2.StateSegment(
            table=table,
            namespace=namespace,
            file=file,
            offset=offset,
            size_bytes=self.size_bytes,
            row_count=self.row_count,
            is_empty=not self.row_count,
            to_version=1,
            parts=self.parts,
        )

    def _written(self, batches: list[pa.RecordBatch], size_bytes: int) -> Iterator[memoryview]:
        # For all parts at once: whoever writes holds the interpreter's lock for each column of each.
        rows = _sorted(batches)
        options = _options(rows.schema)
        groups = rows.column(0).to_numpy()
        self.row_count += len(groups)
        for start, stop in _cuts(groups, max(1, len(groups) * PART_BYTES // max(size_bytes, 1))):
            piece = _encoded(rows.slice(start, stop - start), options)
            yield piece
            first, last = int(groups[start]), int(groups[stop - 1])
            self.parts.append(
                checkpoint_pb2.StatePart(
                    first_key_group=first,
                    last_key_group=last,
                    size_bytes=len(piece),
                    checksum=zlib.crc32(piece),
                )
            )


def _sorted(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of batches by ascending key-group, those of one in their order; integers in the narrowest types that hold them.

    Each column is copied once to narrow it, which is the first thing that is done, and once to sort it.
    """
    groups = np.concatenate([batch.column(0).to_numpy() for batch in batches])
    order = None
    if (groups[1:] < groups[:-1]).any():
        order = np.argsort(groups, kind="stable")
    fields, columns = [], []
    for place, field in enumerate(batches[0].schema):
        pieces = [batch.column(place) for batch in batches]
        kind = _narrowest(pieces)
        if kind != field.type:
            metadata = {**(field.metadata or {}), WIDTH: str(field.type)}
            field = field.with_type(kind).with_metadata(metadata)
        fields.append(field)
        columns.append(_column(pieces, kind, order))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batches[0].schema.metadata))


def _column(pieces: Sequence[pa.Array], kind: pa.DataType, order: Int64Array | None) -> pa.Array:
    """All values in a type that holds them; those at some places in their order, or all."""
    if all(map(is_plain, pieces)):
        arrays = [piece.to_numpy() for piece in pieces]
        values = np.concatenate(arrays, dtype=kind.to_pandas_dtype(), casting="unsafe")
        return pa.array(values if order is None else values.take(order))
    if pieces[0].type != kind:
        pieces = [piece.cast(kind, safe=False) for piece in pieces]
    column = pa.concat_arrays(pieces) if len(pieces) > 1 else pieces[0]
    return column if order is None or is_same_mark(column) else column.take(pa.array(order))


def _cuts(groups: np.ndarray, rows_min: int) -> Iterator[tuple[int, int]]:
    """First row of each part and the first one behind it."""
    ends = [*(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(groups)]
    start = 0
    for end in ends[:-1]:
        if end - start >= rows_min and len(groups) - end >= rows_min:
            yield start, end
            start = end
    yield start, ends[-1]


def _encoded(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _options(schema: pa.Schema) -> pa.ipc.IpcWriteOptions:
    return _PLAIN if _is_compact(schema) else _COMPRESSED


def _narrowest(pieces: Sequence[pa.Array]) -> pa.DataType:
    wide = pieces[0].type
    if not pa.types.is_integer(wide):
        return wide
    bounds = [pa.compute.min_max(piece) for piece in pieces]
    smallest = min(bound["min"].as_py() or 0 for bound in bounds)
    largest = max(bound["max"].as_py() or 0 for bound in bounds)
    for kind, (lowest, highest) in (_UNSIGNED if smallest >= 0 else _SIGNED).items():
        if kind.bit_width >= wide.bit_width:
            break
        if lowest <= smallest and largest <= highest:
            return kind
    return wide


def _is_compact(schema: pa.Schema) -> bool:
    return all(
        pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and kind.bit_width <= _COMPACT_BITS)
        for kind in schema.types
    )
