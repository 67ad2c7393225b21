"""Parquet files that Spark has written, as files of a subpartition: taken as they are, and read by row groups.

Called on I/O threads, or by the one thread of a process that serves files. What is read is compared with the checksums
that its pages have, so that a piece of a large file costs no more than its own bytes.
"""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StoreCorrupt, StoreNotFound, TaskFailure
from penstock.rows.spark_types import carried_schema, converted
from taskmanager.partitions.dealt_files import GivenFiles
from taskmanager.partitions.spill_format import SpillFormat
from taskmanager.partitions.spill_layout import SpillFailed, SpillFile

_CHUNK_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 8_192
_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)


def described(files: GivenFiles, sequence: int, first_row: int) -> list[SpillFile]:
    """What an index says of files, in order.

    Raises:
        SpillFailed: one is not there any more, or has other rows.
    """
    found = []
    for path, rows in files:
        try:
            metadata = pq.read_metadata(path)
            size_bytes = checksum = 0
            for chunk in chunks_of(path):
                size_bytes += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
        except (OSError, pa.ArrowException) as error:
            raise SpillFailed(
                f"{path}, which Spark has written, cannot be read: {error}"
            ) from error
        groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        if sum(groups) != rows:
            raise SpillFailed(f"{path} has {sum(groups)} rows, and had {rows} when it was complete")
        file = SpillFile(sequence, first_row, rows, size_bytes, checksum, SpillFormat.SPARK, groups)
        found.append(file)
        sequence, first_row = sequence + 1, file.end_row
    return found


def chunks_of(path: str) -> Iterator[memoryview]:
    """The content of a file; each chunk is valid until the next one.

    Raises:
        OSError: it cannot be read.
    """
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            yield chunk[:count]


def link_or_copy(path: str, target: Path) -> None:
    """Gives a file a second name, or makes a copy where it cannot have one.

    Raises:
        OSError: neither can be.
    """
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(path, target)


def read_piece(path: Path, piece: SpillFile) -> list[pa.RecordBatch]:
    """The batches of a row group; they stay readable when the file is unlinked.

    Raises:
        StoreNotFound: the file is not there.
        StoreCorrupt: it is not what was taken.
    """
    try:
        with pa.memory_map(str(path), "r") as source:
            return decode_piece(source, piece, str(path))
    except FileNotFoundError as error:
        raise StoreNotFound(
            f"{path} is not there: something else removes spilled partitions"
        ) from error
    except OSError as error:
        raise StoreCorrupt(f"{path} cannot be read: {error}") from error


def decode_piece(source: pa.NativeFile, piece: SpillFile, path: str) -> list[pa.RecordBatch]:
    """The batches of a row group, with the types that Spark's are to us.

    Raises:
        StoreCorrupt: it is not what was taken.
    """
    assert piece.group is not None, "Spark's files are read by pieces"
    with _corrupt(path):
        size_bytes = source.size()
        if size_bytes != piece.size_bytes:
            raise StoreCorrupt(f"{path} has {size_bytes} bytes, {piece.size_bytes} were written")
        file = pq.ParquetFile(source, page_checksum_verification=True)
        read = file.iter_batches(_BATCH_ROWS, row_groups=[piece.group], use_threads=False)
        schema = carried_schema(file.schema_arrow)
        batches = [
            batch
            for given in read
            for batch in converted(pa.Table.from_batches([given]), schema, path).to_batches()
        ]
    rows = sum(batch.num_rows for batch in batches)
    if rows != piece.rows:
        raise StoreCorrupt(f"row group {piece.group} of {path} has {rows} rows, not {piece.rows}")
    return batches


@contextmanager
def _corrupt(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TaskFailure) as error:
        raise StoreCorrupt(f"{path} cannot be read: {error}") from error
