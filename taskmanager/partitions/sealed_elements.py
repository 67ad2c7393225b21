"""What a consumer of a complete partition gets, file by file (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from common.elements import ControlElement, StreamStatus, Watermark
from penstock.errors import PartitionUnavailable
from taskmanager.partitions.spill_layout import PartitionIndex, SpillFile, SubpartitionIndex

Elements = Iterator[tuple[int, pa.RecordBatch | ControlElement]]
"""Each with the offset of its first row, or of the row it stands before."""


def check_readable(index: PartitionIndex, subpartition: int, first_row: int) -> None:
    """Checks that a subpartition is there, and the rows from one on.

    Raises:
        PartitionUnavailable: they are not.
    """
    partition_id, count = index.partition_id, len(index.subpartitions)
    if not 0 <= subpartition < count:
        raise PartitionUnavailable(
            f"partition {partition_id} has {count} subpartitions, not one of index {subpartition}",
            partition=partition_id,
        )
    part = index.subpartitions[subpartition]
    if not part.first_row <= first_row <= part.end_row:
        raise PartitionUnavailable(
            f"subpartition {subpartition} of {partition_id} has the rows {part.first_row} to"
            f" {part.end_row}: it cannot be read from row {first_row}",
            partition=partition_id,
        )


class ElementCursor:
    """The elements of a subpartition from a row on, in three calls: before its files, of each, behind them.

    Args:
        part: what there is.
        first_row: the first that is wanted.

    Attributes:
        files: those with rows that are wanted, in order; pieces of those that are read by pieces.

    Example: who begins behind a watermark is told it first.
        >>> files = (SpillFile(0, first_row=0, rows=2, size_bytes=9, checksum=0),)
        >>> cursor = ElementCursor(SubpartitionIndex(0, files, ((0, Watermark(5)),)), first_row=1)
        >>> list(cursor.before())
        [(1, Watermark(timestamp_ms=5))]
        >>> [(row, b.num_rows) for row, b in cursor.of_file(files[0], [pa.record_batch({"n": [7, 8]})])]
        [(1, 1)]
    """

    def __init__(self, part: SubpartitionIndex, first_row: int) -> None:
        pieces = (piece for file in part.files for piece in file.pieces)
        self.files = [piece for piece in pieces if piece.end_row > first_row]
        self._part = part
        self._first_row = first_row
        self._controls = [control for control in part.controls if control[0] >= first_row]
        self._number = 0

    def before(self) -> Elements:
        """The watermark and the status that held before the row."""
        watermark: Watermark | None = None
        status: StreamStatus | None = None
        for row, element in self._part.controls:
            if row >= self._first_row:
                break
            if isinstance(element, Watermark):
                watermark = element
            elif isinstance(element, StreamStatus):
                status = element
        if watermark is not None:
            yield self._first_row, watermark
        if status is not None:
            yield self._first_row, status

    def of_file(self, file: SpillFile, batches: Sequence[pa.RecordBatch]) -> Elements:
        """The rows of the next file, and what stands between them."""
        controls = self._controls
        row = file.first_row
        for batch in batches:
            end_row = row + batch.num_rows
            start = max(row, self._first_row)
            while start < end_row:
                while self._number < len(controls) and controls[self._number][0] <= start:
                    yield controls[self._number]
                    self._number += 1
                has_more = self._number < len(controls)
                stop = min(end_row, controls[self._number][0]) if has_more else end_row
                yield start, batch.slice(start - row, stop - start)
                start = stop
            row = end_row

    def behind(self) -> Elements:
        """What stands behind the last row."""
        yield from self._controls[self._number :]
