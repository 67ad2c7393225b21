"""Reads the row groups of one Parquet split. The position is the number of rows handed out."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.source import END, EndOfSplit, Reader
from penstock.errors import TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_splits import FileSplit
from taskmanager.connectors.recut import BatchCutter

_DECODE_ROWS = 64 * 1024
"""Rows decoded at once: enough to amortise the decoder's start, a few milliseconds of work."""

_POSITION = struct.Struct("<q")


class ParquetReader(Reader):
    """Decodes on the calling thread, a bounded number of rows per call."""

    def __init__(self, split: FileSplit, plan: ColumnPlan, position: bytes | None) -> None:
        from pyarrow import parquet

        self._path = split.path
        self._plan = plan
        self._cutter = BatchCutter()
        self._rows_read = 0 if position is None else int(_POSITION.unpack(position)[0])
        try:
            self._handle = Path(split.path).open("rb")  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise TaskFailure(f"{split.path}: cannot be read: {os_reason(error)}") from error
        try:
            self._file = parquet.ParquetFile(self._handle)
            plan.check_present(self._file.schema_arrow)
        except (pa.ArrowException, OSError) as error:
            self._handle.close()
            raise TaskFailure(
                f"{split.path}: not a readable Parquet file: {shorten(str(error))}"
            ) from error
        except TaskFailure:
            self._handle.close()
            raise
        end = self._file.num_row_groups if split.end_row_group < 0 else split.end_row_group
        self._batches = self._decode(range(split.first_row_group, end), self._rows_read)

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
                return END
            self._cutter.fill(self._plan.assemble(batch))
        piece = self._cutter.take(max_rows)
        self._rows_read += piece.num_rows
        return piece

    @override
    def position(self) -> bytes:
        return _POSITION.pack(self._rows_read)

    @override
    def close(self) -> None:
        self._file.close(force=True)
        self._handle.close()
