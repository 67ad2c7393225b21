"""Reads Arrow IPC files and streams. The position is the batch and the rows handed out of it.

Files are memory mapped: batches are views of the page cache. A file must not be cut off while it is
read (the kernel would end the process); writers that move finished files into place are safe.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.source import END, EndOfSplit, Reader
from penstock.errors import TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.recut import BatchCutter

_MAGIC = b"ARROW1"
_POSITION = struct.Struct("<qq")


class ArrowBatches:
    """The record batches of an IPC file (random access) or stream (in order)."""

    def __init__(self, path: str, plan: ColumnPlan) -> None:
        self._path = path
        self._plan = plan
        self._next_of_stream = 0
        try:
            with Path(path).open("rb") as file:
                self._is_file = file.read(len(_MAGIC)) == _MAGIC
            self._map = pa.memory_map(path)
        except OSError as error:
            raise TaskFailure(f"{path}: cannot be read: {os_reason(error)}") from error
        except pa.ArrowInvalid as error:
            raise self._unreadable(error) from error
        self._file: pa.RecordBatchFileReader | None = None
        self._stream: pa.RecordBatchStreamReader | None = None
        try:
            self._open()
        except (pa.ArrowException, OSError) as error:
            self._map.close()
            raise self._unreadable(error) from error
        except TaskFailure:
            self._map.close()
            raise

    def _open(self) -> None:
        # No included_fields: with them pyarrow copies every buffer instead of viewing the map.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        if self._is_file:
            self._file = pa.ipc.open_file(self._map, options=options)
            self._plan.check_present(self._file.schema)
        else:
            self._stream = pa.ipc.open_stream(self._map, options=options)
            self._plan.check_present(self._stream.schema)

    def _unreadable(self, error: Exception) -> TaskFailure:
        return TaskFailure(f"{self._path}: not a readable Arrow file: {shorten(str(error))}")

    @property
    def count(self) -> int:
        """Record batches of a file (not known of a stream)."""
        assert self._file is not None
        return int(self._file.num_record_batches)

    def get(self, index: int) -> pa.RecordBatch | None:
        """The batch of this number, None behind the last; a stream is read forward only."""
        try:
            if self._file is not None:
                count = self._file.num_record_batches
                return self._file.get_batch(index) if index < count else None
            assert self._stream is not None
            while True:
                batch = self._stream.read_next_batch()
                self._next_of_stream += 1
                if self._next_of_stream > index:
                    return batch
        except StopIteration:
            return None
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        """Unmaps the file once no batch refers to it."""
        self._map.close()


class ArrowFileReader(Reader):
    """One IPC file, batch by batch."""

    def __init__(self, path: str, plan: ColumnPlan, position: bytes | None) -> None:
        self._batches = ArrowBatches(path, plan)
        self._plan = plan
        self._cutter = BatchCutter()
        self._next_batch, self._skip_rows = (
            (0, 0) if position is None else _POSITION.unpack(position)
        )
        self._rows_of_batch = 0

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit:
        while not self._cutter.remaining_rows:
            batch = self._batches.get(self._next_batch)
            if batch is None:
                return END
            self._next_batch += 1
            self._rows_of_batch = batch.num_rows
            self._cutter.fill(self._plan.assemble(batch), self._skip_rows)
            self._skip_rows = 0
        return self._cutter.take(max_rows)

    @override
    def position(self) -> bytes:
        if not self._cutter.remaining_rows:
            return _POSITION.pack(self._next_batch, self._skip_rows)
        given = self._rows_of_batch - self._cutter.remaining_rows
        return _POSITION.pack(self._next_batch - 1, given)

    @override
    def close(self) -> None:
        self._batches.close()
