"""Complete partitions whose files Spark is given as they lie: which they are, and whether they are still what they were.

They are part of the job's recovery: a file that is gone or damaged is a partition that is not available, which its producer
makes again, and no failure of the user's function. So files are looked at before a stage begins, and again when it has failed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config import Configuration
from penstock.config.spark_keys import is_local_master
from penstock.errors import PartitionUnavailable
from penstock.partition_id import PartitionId
from taskmanager.partitions.sealed_partition import DataFile, SealedPartition
from taskmanager.partitions.spill_format import SpillFormat

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PartitionInPlace:
    """What a stage reads of one partition.

    Attributes:
        partition: of its producer, for who has to make it again.
        files: all of its rows.
    """

    partition: PartitionId
    files: tuple[DataFile, ...]


def seen_below(config: Configuration) -> Path | None:
    """The only directory whose files Spark sees, None = it runs on this machine."""
    own = config.spark_keys
    is_here = not own.get("spark.remote") and is_local_master(own.get("spark.master", "local"))
    return None if is_here else Path(config.execution_spark_directory)


def is_below(path: Path, directory: Path) -> bool:
    """Whether a file lies in a directory, whatever the names that lead to it."""
    return path.resolve().is_relative_to(directory.resolve())


def in_place(
    sealed: SealedPartition, subpartition: int, config: Configuration
) -> PartitionInPlace | None:
    """A partition as a stage reads it; None where a file is none that Spark reads, or lies where Spark does not see it."""
    files = sealed.files(subpartition)
    place = seen_below(config)
    if any(file.format is SpillFormat.ARROW for file in files):
        return None
    if place is not None and not all(is_below(file.path, place) for file in files):
        return None
    return PartitionInPlace(sealed.partition_id, tuple(files))


def check_files(partitions: Iterable[PartitionInPlace]) -> None:
    """Compares all files with what was written; on an I/O thread.

    Raises:
        PartitionUnavailable: one is gone, or altered; the message names it.
    """
    for one in partitions:
        for file in one.files:
            problem = _problem(file)
            if problem:
                raise PartitionUnavailable(
                    f"partition {one.partition}, which Spark reads in place, is not what was written: {file.path} "
                    f"{problem}",
                    partition=one.partition,
                )


def _problem(file: DataFile) -> str:
    """What is wrong with a file; "" = nothing."""
    size_bytes = checksum = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with file.path.open("rb", buffering=0) as opened:
            while count := opened.readinto(chunk):
                size_bytes += count
                checksum = zlib.crc32(chunk[:count], checksum)
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if size_bytes != file.size_bytes:
        return f"has {size_bytes} bytes, and had {file.size_bytes}"
    return "" if checksum == file.checksum else "has been altered"
