"""Writes rows of a subpartition to files, and reads them from there.

Called on I/O threads, or by the one thread of a process that serves files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock.errors import StoreCorrupt, StoreNotFound
from taskmanager.partitions.parquet_file import read_parquet, write_parquet
from taskmanager.partitions.spill_format import (
    ARROW_FILES,
    FormatChoice,
    FormatMisfitError,
    SpillFormat,
)
from taskmanager.partitions.spill_layout import SpillFailed, SpillFile, file_name
from taskmanager.partitions.taken_files import read_piece

_CHUNK_BYTES: Final = 256 << 10
_DIRECTORY_ATTEMPTS: Final = 8
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def write_spill_files(
    directory: Path,
    sequence: int,
    first_row: int,
    batches: Sequence[pa.RecordBatch],
    choice: FormatChoice = ARROW_FILES,
) -> list[tuple[SpillFile, int]]:
    """Writes consecutive batches; a new file begins where schema or dictionaries change.

    Args:
        directory: of the subpartition; made where it is missing.
        sequence: number of the first file.
        first_row: offset of the first row.
        batches: with at least one row each.
        choice: of the format.

    Returns:
        The files in order, each with the number of batches in it.

    Raises:
        SpillFailed: the disk is full, or has a fault, or the rows do not fit the format that is required; no
            file of this call is left.
    """
    written: list[tuple[SpillFile, int]] = []
    begun: list[Path] = []
    start = 0
    try:
        make_directory(directory)
        while start < len(batches):
            spill_format = choice.format_of(batches[start].schema)
            path = directory / file_name(sequence, spill_format)
            begun.append(path)
            with pa.OSFile(str(path), "wb") as sink:
                count = _WRITERS[spill_format](sink, batches, start)
            rows = sum(batch.num_rows for batch in batches[start : start + count])
            size_bytes, checksum = _measure(path)
            file = SpillFile(sequence, first_row, rows, size_bytes, checksum, spill_format)
            written.append((file, count))
            sequence, first_row, start = sequence + 1, first_row + rows, start + count
    except (OSError, FormatMisfitError) as error:
        for path in begun:
            with contextlib.suppress(OSError):  # the error that ends the attempt is the first one
                path.unlink(missing_ok=True)
        if isinstance(error, FormatMisfitError):
            raise SpillFailed(f"rows cannot be written to {directory}: {error}") from error
        raise spill_failed(directory, error) from error
    return written


def make_directory(directory: Path) -> None:
    """Makes a directory with its parents, which others may be removing because they are empty.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(_DIRECTORY_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            directory.mkdir(parents=True, exist_ok=True)
            return
    directory.mkdir(parents=True, exist_ok=True)


def spill_failed(directory: Path, error: OSError) -> SpillFailed:
    """The failure of the attempt whose rows cannot be kept."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        advice = "free space there, or use another taskmanager.spill.dir"
    else:
        advice = (
            "see whether the directory is there and writable, or use another taskmanager.spill.dir"
        )
    return SpillFailed(
        f"rows of a kept result partition cannot be written to {directory}: {reason}; {advice}"
    )


def read_spill_file(path: Path, file: SpillFile) -> list[pa.RecordBatch]:
    """The batches of a file; they stay readable when it is unlinked: those of Arrow refer to its pages.

    Raises:
        StoreNotFound: it is not there.
        StoreCorrupt: it is not what was written.
    """
    if file.format is SpillFormat.SPARK:
        return read_piece(path, file)
    try:
        with pa.memory_map(str(path), "r") as source:
            return decode_rows(source.read_buffer(), file, str(path))
    except FileNotFoundError as error:
        raise StoreNotFound(
            f"{path} is not there: something else removes spilled partitions"
        ) from error
    except OSError as error:
        raise StoreCorrupt(f"{path} cannot be read: {error}") from error


def encode_rows(
    batches: Sequence[pa.RecordBatch], start: int, spill_format: SpillFormat
) -> tuple[pa.Buffer, int]:
    """The content of a file with as many of the batches as fit into one, and how many these are."""
    sink = pa.BufferOutputStream()
    count = _WRITERS[spill_format](sink, batches, start)
    return sink.getvalue(), count


def decode_rows(content: pa.Buffer, file: SpillFile, path: str) -> list[pa.RecordBatch]:
    """The batches of a file's content.

    Raises:
        StoreCorrupt: it is not what was written.
    """
    if content.size != file.size_bytes:
        raise StoreCorrupt(f"{path} has {content.size} bytes, {file.size_bytes} were written")
    _verify(path, content, file.checksum)
    try:
        batches = _READERS[file.format](content)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise StoreCorrupt(f"{path} cannot be read: {error}") from error
    rows = sum(batch.num_rows for batch in batches)
    if rows != file.rows:
        raise StoreCorrupt(f"{path} has {rows} rows, {file.rows} were written")
    return batches


def checksum_of(content: pa.Buffer) -> int:
    """CRC-32 of a file's content."""
    return zlib.crc32(content)


def _verify(path: str, content: pa.Buffer, expected: int) -> None:
    checksum = checksum_of(content)
    if checksum != expected:
        raise StoreCorrupt(
            f"{path} is altered: its checksum is {checksum:08x}, it was {expected:08x}"
        )


def _write_parquet_rows(sink: pa.NativeFile, batches: Sequence[pa.RecordBatch], start: int) -> int:
    """Writes the batches that have the schema of the first; returns how many."""
    schema = batches[start].schema
    alike = list(
        itertools.takewhile(
            lambda batch: batch.schema.equals(schema, check_metadata=True), batches[start:]
        )
    )
    write_parquet(sink, alike)
    return len(alike)


def _read_arrow(content: pa.Buffer) -> list[pa.RecordBatch]:
    with pa.ipc.open_file(content) as reader:
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _write_arrow_rows(sink: pa.NativeFile, batches: Sequence[pa.RecordBatch], start: int) -> int:
    """Writes as many of the batches as fit into one file; returns how many."""
    schema = batches[start].schema
    count = 0
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches[start:]:
            if count and not batch.schema.equals(schema, check_metadata=True):
                break
            try:
                writer.write_batch(batch)
            except pa.ArrowInvalid:
                if not count:
                    raise
                break  # its dictionaries are not those of the file
            count += 1
    return count


_WRITERS: Final = {
    SpillFormat.ARROW: _write_arrow_rows,
    SpillFormat.PARQUET: _write_parquet_rows,
}
_READERS: Final = {SpillFormat.ARROW: _read_arrow, SpillFormat.PARQUET: read_parquet}


def _measure(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file; its pages have just been written, so this reads memory."""
    size_bytes = checksum = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            size_bytes += count
            checksum = zlib.crc32(chunk[:count], checksum)
    return size_bytes, checksum
