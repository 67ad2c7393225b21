"""Reads Arrow IPC files and streams. The position is the batch and the rows handed out of it, and the
checksum of a sample of the columns read of all batches up to that one.

Files are memory mapped: batches are views of the page cache. A file must not be cut off while it is
read (the kernel would end the process); writers that move finished files into place are safe.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.source import END, EndOfSplit, Reader
from penstock.errors import TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import (
    FileMark,
    OpenedFile,
    fold,
)
from taskmanager.connectors.recut import BatchCutter

_MAGIC = b"ARROW1"
_POSITION = struct.Struct("<qq")
_LANES = 512
_SAMPLED = 8
_LANE_WEIGHTS = (np.arange(_LANES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(
    0x9E3779B97F4A7C15
)


class ArrowBatches:
    """The record batches of an IPC file (random access) or stream (in order)."""

    def __init__(self, file: OpenedFile, plan: ColumnPlan) -> None:
        self._path = file.path
        self._plan = plan
        self._next_of_stream = 0
        self._is_file = file.read(0, len(_MAGIC)) == _MAGIC
        try:
            self._map = pa.memory_map(file.descriptor_path)
        except OSError as error:
            raise TaskFailure(f"{file.path}: cannot be read: {os_reason(error)}") from error
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

    def __init__(self, file: OpenedFile, plan: ColumnPlan, position: bytes | None) -> None:
        self._file = file
        self._plan = plan
        self._batches = ArrowBatches(file, plan)
        self._cutter = BatchCutter()
        self._rows_of_batch = 0
        self._next_batch = self._skip_rows = 0
        mark: FileMark | None = None
        if position is not None:
            mark, place = FileMark.decode(position, _POSITION.size)
            self._next_batch, self._skip_rows = _POSITION.unpack(place)
            file.check_resumed(mark, self._checksum_so_far)
        # Batches of a number below this one are in the checksum.
        self._summed_batches = self._next_batch + (1 if self._skip_rows else 0)
        self._checksum = mark.checksum if mark is not None else 0

    def _checksum_so_far(self) -> int:
        """Of the batches up to the next one, and of that where rows of it were handed out."""
        batches = ArrowBatches(self._file, self._plan)
        try:
            checksum = 0
            for index in range(self._next_batch + (1 if self._skip_rows else 0)):
                batch = batches.get(index)
                if batch is None:
                    break
                checksum = fold(checksum, self._batch_checksum(batch))
            return checksum
        finally:
            batches.close()

    def _batch_checksum(self, batch: pa.RecordBatch) -> int:
        checksum = batch.num_rows
        for name in self._plan.file_schema.names:
            checksum = _checksum(batch.column(batch.schema.get_field_index(name)), checksum)
        return checksum

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit:
        while not self._cutter.remaining_rows:
            batch = self._batches.get(self._next_batch)
            if batch is None:
                self._check_read()
                return END
            self._next_batch += 1
            if self._next_batch > self._summed_batches:
                self._summed_batches = self._next_batch
                self._checksum = fold(self._checksum, self._batch_checksum(batch))
            self._rows_of_batch = batch.num_rows
            self._cutter.fill(self._plan.assemble(batch), self._skip_rows)
            self._skip_rows = 0
        return self._cutter.take(max_rows)

    def _check_read(self) -> None:
        self._file.check_read(lambda: self._checksum, self._checksum_so_far)

    @override
    def position(self) -> bytes:
        if not self._cutter.remaining_rows:
            place = _POSITION.pack(self._next_batch, self._skip_rows)
        else:
            given = self._rows_of_batch - self._cutter.remaining_rows
            place = _POSITION.pack(self._next_batch - 1, given)
        return FileMark(self._file.version, self._checksum).encode(place)

    @override
    def close(self) -> None:
        self._batches.close()
        self._file.close()


def _checksum(array: pa.Array, checksum: int) -> int:
    for buffer in array.buffers():
        if buffer is not None:
            checksum = fold(checksum, _word_sum(buffer))
    if pa.types.is_dictionary(array.type):
        return _checksum(array.dictionary, checksum)
    return checksum


def _word_sum(buffer: pa.Buffer) -> int:
    """A sum of words of a buffer, weighted by their place among ``_LANES``, in 32 bits.

    Of long buffers every eighth block of 4 KiB counts, and the end: the files are mapped, and to read all
    of them once more cost a quarter of a columnar job.
    """
    words = np.frombuffer(buffer, np.uint64, count=buffer.size // 8)
    rows = len(words) // _LANES
    blocks = words[: rows * _LANES].reshape(rows, _LANES)[::_SAMPLED]
    sums = np.add.reduce(blocks, axis=0)
    rest = words[rows * _LANES :]
    sums[: len(rest)] += rest
    total = int(np.dot(sums, _LANE_WEIGHTS))
    tail = memoryview(buffer)[len(words) * 8 :]
    return zlib.crc32(tail, (total ^ (total >> 32)) & 0xFFFFFFFF)
