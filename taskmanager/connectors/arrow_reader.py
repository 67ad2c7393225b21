"""Reads Arrow IPC files and streams. The position is the batch and the rows handed out of it, and the
checksum of the pieces that these rows are in, of the columns read.

Nothing else reads every byte of such a file, so the checksum is a good part of the work; where no checkpoint will
ask for a position, none is taken, and a file that is touched while it is read is refused.

Local files are memory mapped: batches are views of the page cache. Such a file must not be cut off while it is
read (the kernel would end the process); writers that move finished files into place are safe.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pyarrow as pa
import xxhash
from typing_extensions import override

from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.source import END, EndOfSplit
from penstock.errors import TaskFailure, Unrecoverable
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import (
    FileMark,
    OpenedFile,
    fold,
)
from taskmanager.connectors.reading_ahead import NumberedReader
from taskmanager.connectors.recut import BatchCutter

_MAGIC = b"ARROW1"
_POSITION = struct.Struct("<qq")
_PIECE_ROWS = 1 << 15
"""Rows whose checksum is taken when the first of them is handed out: few enough that what is done with them
next finds them in the processor's cache, so that the file is read from memory once."""


class ArrowBatches:
    """The record batches of an IPC file (random access) or stream (in order)."""

    def __init__(self, file: OpenedFile, plan: ColumnPlan) -> None:
        self._path = file.path
        self._plan = plan
        self._next_of_stream = 0
        self._is_file = file.read(0, len(_MAGIC)) == _MAGIC
        try:
            self._map = file.arrow_file()
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
        except (TaskFailure, Unrecoverable):
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


def rows_before(batches: ArrowBatches, end: int) -> int:
    """Rows in front of the batch of this number; closes the batches."""
    try:
        return sum(batch.num_rows for index in range(end) if (batch := batches.get(index)))
    finally:
        batches.close()


class ArrowFileReader(NumberedReader):
    """One IPC file, batch by batch.

    Args:
        has_positions: ``position`` will be called.
    """

    def __init__(
        self,
        file: OpenedFile,
        plan: ColumnPlan,
        position: bytes | None,
        *,
        has_positions: bool = True,
    ) -> None:
        self._file = file
        self._plan = plan
        self._has_positions = has_positions
        self._batches = ArrowBatches(file, plan)
        self._cutter = BatchCutter()
        self._rows_of_batch = self._last_rows = 0
        self._next_batch = self._skip_rows = 0
        mark: FileMark | None = None
        if position is not None:
            mark, place = FileMark.decode(position, _POSITION.size)
            self._next_batch, self._skip_rows = _POSITION.unpack(place)
            file.check_resumed(mark, self._checksum_so_far)
        self._checksum = mark.checksum if mark is not None else 0
        self._pieces: PieceSums | None = None

    def _checksum_so_far(self) -> int:
        """Of all batches before the next one, and of that as far as rows of it were handed out."""
        batches = ArrowBatches(self._file, self._plan)
        try:
            checksum = 0
            for index in range(self._next_batch + (1 if self._skip_rows else 0)):
                batch = batches.get(index)
                if batch is None:
                    break
                end_row = batch.num_rows if index < self._next_batch else self._skip_rows
                for piece in self._sums_of(batch).up_to(end_row):
                    checksum = fold(checksum, piece)
            return checksum
        finally:
            batches.close()

    def _sums_of(self, batch: pa.RecordBatch, first_row: int = 0) -> PieceSums:
        names = self._plan.file_schema.names
        columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
        return PieceSums(columns, batch.num_rows, first_row)

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit:
        while not self._cutter.remaining_rows:
            batch = self._batches.get(self._next_batch)
            if batch is None:
                self._check_read()
                return END
            self._next_batch += 1
            self._rows_of_batch = batch.num_rows
            if self._has_positions:
                self._pieces = self._sums_of(batch, self._skip_rows)
            self._cutter.fill(self._plan.assemble(batch), self._skip_rows)
            self._skip_rows = 0
        rows = self._cutter.take(max_rows)
        self._last_rows = rows.num_rows
        if self._pieces is not None:
            for piece in self._pieces.up_to(self._rows_of_batch - self._cutter.remaining_rows):
                self._checksum = fold(self._checksum, piece)
        return rows

    @override
    def numbering(self) -> Callable[[int], int]:
        in_batch = self._rows_of_batch - self._cutter.remaining_rows - self._last_rows
        batch = self._next_batch - 1

        def number(index: int) -> int:
            before = rows_before(ArrowBatches(self._file, self._plan), batch)
            return before + in_batch + index + 1

        return number

    def _check_read(self) -> None:
        if self._has_positions:
            self._file.check_read(lambda: self._checksum, self._checksum_so_far)
        else:
            self._file.check_untouched()

    @override
    def position(self) -> bytes:
        assert self._has_positions, "what was read has not been summed"
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


class PieceSums:
    """The checksums of the pieces of a record batch, in order: each of ``_PIECE_ROWS`` rows, the last of the rest.

    Of each buffer a piece has its share of the bytes: that is its rows where they are equally wide, and all of it
    is in some piece in any case.

    Args:
        columns: what is read of the batch.
        row_count: of the batch.
        first_row: pieces that begin before it were summed before.
    """

    def __init__(self, columns: list[pa.Array], row_count: int, first_row: int = 0) -> None:
        self._buffers = [memoryview(b) for column in columns for b in _buffers(column)]
        self._row_count = row_count
        self._next_row = -(-first_row // _PIECE_ROWS) * _PIECE_ROWS

    def up_to(self, end_row: int) -> Iterator[int]:
        """Those of the pieces, not summed so far, that begin before a row; each 32 bits."""
        while self._next_row < end_row:
            start, end = self._next_row, min(self._next_row + _PIECE_ROWS, self._row_count)
            self._next_row += _PIECE_ROWS
            sums = xxhash.xxh3_64(seed=end - start)
            for buffer in self._buffers:
                size = len(buffer)
                sums.update(buffer[size * start // self._row_count : size * end // self._row_count])
            yield sums.intdigest() & 0xFFFFFFFF


def _buffers(array: pa.Array) -> Iterator[pa.Buffer]:
    yield from (buffer for buffer in array.buffers() if buffer is not None)
    for dictionary in _dictionaries(array):
        yield from _buffers(dictionary)


def _dictionaries(array: pa.Array) -> Iterator[pa.Array]:
    """Those of an array and of the arrays within it: their buffers are not among the array's own."""
    if isinstance(array, pa.ExtensionArray):
        yield from _dictionaries(array.storage)
    elif isinstance(array, pa.DictionaryArray):
        yield array.dictionary
    elif isinstance(array, pa.MapArray):
        yield from _dictionaries(array.keys)
        yield from _dictionaries(array.items)
    elif isinstance(array, pa.StructArray | pa.UnionArray):
        for index in range(array.type.num_fields):
            yield from _dictionaries(array.field(index))
    elif pa.types.is_nested(array.type) or pa.types.is_run_end_encoded(array.type):
        yield from _dictionaries(array.values)
