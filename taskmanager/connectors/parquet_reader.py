"""Reads the row groups of one Parquet split. The position is the number of rows handed out, and the checksum
of the pages of the row groups they came from; of an object, which its ETag tells from others, there is none.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import shorten
from penstock.connectors.source import END, EndOfSplit
from penstock.errors import TaskFailure, Unrecoverable
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import (
    FileMark,
    OpenedFile,
    PieceChecksums,
    Submit,
    fold,
)
from taskmanager.connectors.file_splits import FileSplit, footer_checksum, min_event_times
from taskmanager.connectors.parquet_columns import column_names
from taskmanager.connectors.reading_ahead import NumberedReader
from taskmanager.connectors.recut import BatchCutter

_DECODE_ROWS = 64 * 1024
"""Rows decoded at once: enough to amortise the decoder's start, a few milliseconds of work."""

_POSITION = struct.Struct("<q")


class ParquetReader(NumberedReader):
    """Decodes on the calling thread, a bounded number of rows per call.

    Args:
        event_time: the declared column that event time is taken from, None = it is no column of the file.
    """

    def __init__(
        self,
        file: OpenedFile,
        split: FileSplit,
        plan: ColumnPlan,
        submit: Submit,
        position: bytes | None,
        event_time: pa.Field | None = None,
    ) -> None:
        from pyarrow import parquet

        self._opened = file
        self._path = split.path
        self._plan = plan
        self._cutter = BatchCutter()
        self._handle = file.stream()
        try:
            self._file = parquet.ParquetFile(self._handle)
            plan.check_present(self._file.schema_arrow)
            if split.footer_checksum:
                found = FileMark(split.version, split.footer_checksum)
                file.check_resumed(found, lambda: footer_checksum(file))
            if split.end_row_group >= 0:
                file.check_part(split.version, split.host, split.found_ms)
        except (pa.ArrowException, OSError) as error:
            self._handle.close()
            raise TaskFailure(
                f"{split.path}: not a readable Parquet file: {shorten(str(error))}"
            ) from error
        except (TaskFailure, Unrecoverable):
            self._handle.close()
            raise
        end = self._file.num_row_groups if split.end_row_group < 0 else split.end_row_group
        self._groups = range(split.first_row_group, end)
        self._group_ends = list(accumulate(map(self._group_rows, self._groups)))
        times = min_event_times(self._file.metadata, event_time, self._groups)
        self._earliest_from = list(accumulate(reversed(times), _earlier))[::-1]
        self._rows_read = self._last_rows = 0
        mark: FileMark | None = None
        if position is not None:
            mark, place = FileMark.decode(position, _POSITION.size)
            self._rows_read = int(_POSITION.unpack(place)[0])
            file.check_resumed(mark, self._checksum_so_far)
        self._summed_groups = self._begun_groups()
        self._checksums = PieceChecksums(submit, mark.checksum if mark is not None else 0)
        self._batches = self._decode(self._groups, self._rows_read)

    def _begun_groups(self) -> int:
        """How many row groups rows were handed out of."""
        return bisect_left(self._group_ends, self._rows_read) + 1 if self._rows_read else 0

    def _checksum_so_far(self) -> int:
        checksum = 0
        for index in self._groups[: self._begun_groups()]:
            checksum = fold(checksum, self._group_checksum(index))
        return checksum

    def _group_checksum(self, index: int) -> int:
        """Of the pages of the columns that are read."""
        group = self._file.metadata.row_group(index)
        names = frozenset(self._plan.file_schema.names)
        checksum = 0
        for number, name in enumerate(column_names(self._file.metadata)):
            if name in names:
                column = group.column(number)
                start = column.data_page_offset
                if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                    start = column.dictionary_page_offset
                end = start + column.total_compressed_size
                checksum = self._opened.checksum(start, end, checksum)
        return checksum

    def _decode(self, groups: range, skip_rows: int) -> Iterator[pa.RecordBatch]:
        remaining = list(groups)
        while remaining and skip_rows >= self._group_rows(remaining[0]):
            skip_rows -= self._group_rows(remaining.pop(0))
        if not remaining:
            return
        names = [f"{field.name}" for field in self._plan.file_schema]
        for batch in self._file.iter_batches(
            batch_size=_DECODE_ROWS, row_groups=remaining, columns=names, use_threads=False
        ):
            if skip_rows < batch.num_rows:
                yield batch.slice(skip_rows) if skip_rows else batch
            skip_rows = max(skip_rows - batch.num_rows, 0)

    def _group_rows(self, index: int) -> int:
        return int(self._file.metadata.row_group(index).num_rows)

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit:
        while not self._cutter.remaining_rows:
            try:
                batch = next(self._batches, None)
            except (pa.ArrowException, OSError) as error:
                raise TaskFailure(
                    f"{self._path}: cannot be decoded behind row {self._rows_read} of the split: "
                    f"{shorten(str(error))}"
                ) from error
            if batch is None:
                self._opened.check_read(self._checksums.value, self._checksum_so_far)
                return END
            self._cutter.fill(self._plan.assemble(batch))
        piece = self._cutter.take(max_rows)
        self._last_rows = piece.num_rows
        self._rows_read += piece.num_rows
        while not self._opened.is_known_by_version and self._summed_groups < self._begun_groups():
            index = self._groups[self._summed_groups]
            self._checksums.add(partial(self._group_checksum, index))
            self._summed_groups += 1
        return piece

    @override
    def numbering(self) -> Callable[[int], int]:
        in_groups_before = sum(map(self._group_rows, range(self._groups.start)))
        first = in_groups_before + self._rows_read - self._last_rows + 1
        return lambda index: first + index

    @override
    def min_event_time_ms(self) -> int | None:
        group = bisect_right(self._group_ends, self._rows_read)
        return self._earliest_from[group] if group < len(self._groups) else None

    @override
    def position(self) -> bytes:
        mark = FileMark(self._opened.version, self._checksums.value())
        return mark.encode(_POSITION.pack(self._rows_read))

    @override
    def close(self) -> None:
        self._file.close(force=True)
        self._handle.close()
        self._opened.close()


def _earlier(first: int | None, second: int | None) -> int | None:
    """The earlier of two times; None where one is not known."""
    return None if first is None or second is None else min(first, second)
