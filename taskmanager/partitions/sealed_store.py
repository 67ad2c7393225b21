"""Complete partitions on disk: found, listed and removed.

What is held is what the disk says, so a process that starts anew finds everything again. One thread
uses an instance; processes share a directory, because a partition is complete from one moment to the
next (its index appears) and gone from one moment to the next (its index is removed first).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from common.spill_paths import INDEX_NAME
from penstock.errors import StoreCorrupt, StoreTransient
from penstock.partition_id import PartitionId
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.spill_files import make_directory
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    decode_index,
    encode_index,
    job_directory,
    partition_directory,
)

_log = structlog.get_logger()

Held = tuple[str, PartitionId, int, int]
"""Job, partition, rows, bytes."""


class SealedStore:
    """The complete partitions below a spill directory.

    Args:
        root: the spill directory of a TaskManager; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[Path, tuple[tuple[int, int], SealedPartition]] = {}
        self._damaged: set[Path] = set()

    def find(self, job_id: str, partition_id: PartitionId) -> SealedPartition | None:
        """The partition; None where it is not there, or not complete.

        Raises:
            StoreCorrupt: its index is damaged; the message names the file.
            StoreTransient: its index cannot be read.
        """
        directory = partition_directory(self.root, job_id, partition_id)
        partition = self._opened(directory / INDEX_NAME)
        if partition is None:
            return None
        index = partition.index
        if index.job_id != job_id or index.partition_id != partition_id:
            raise StoreCorrupt(
                f"{directory / INDEX_NAME} is the index of {index.partition_id} of job"
                f" {index.job_id}, not of {partition_id} of job {job_id}"
            )
        return partition

    def held(self) -> list[Held]:
        """All complete partitions; those whose index is damaged are left out and logged once."""
        held: list[Held] = []
        for path in sorted(self.root.glob(f"*/*/part=*/{INDEX_NAME}")):
            try:
                partition = self._opened(path)
            except (StoreCorrupt, StoreTransient) as error:
                if path not in self._damaged:
                    self._damaged.add(path)
                    _log.error("partition.damaged", reason=str(error))
                continue
            if partition is not None:
                index = partition.index
                held.append((index.job_id, index.partition_id, index.rows, index.size_bytes))
        return held

    def release(self, job_id: str, partition_ids: Iterable[PartitionId] | None = None) -> None:
        """Removes partitions, complete or not; consumers that read them go on with what is mapped.

        Args:
            partition_ids: None = everything of the job.

        Raises:
            OSError: something cannot be removed.
        """
        if partition_ids is None:
            directory = job_directory(self.root, job_id)
            directories = sorted(directory.glob("*/part=*"))
        else:
            directories = [
                partition_directory(self.root, job_id, partition_id)
                for partition_id in partition_ids
            ]
        for directory in directories:
            self._open.pop(directory / INDEX_NAME, None)
            self._damaged.discard(directory / INDEX_NAME)
            remove_partition(directory)
        if partition_ids is None:
            _remove_tree(job_directory(self.root, job_id))

    def _opened(self, path: Path) -> SealedPartition | None:
        """The partition of an index file, from memory where the file has not changed."""
        try:
            stat = path.stat()
            version = (stat.st_ino, stat.st_mtime_ns)
            known = self._open.get(path)
            if known is not None and known[0] == version:
                return known[1]
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            self._open.pop(path, None)
            return None
        except OSError as error:
            raise StoreTransient(f"{path} cannot be read: {error.strerror or error}") from error
        partition = SealedPartition(decode_index(content, path), path.parent)
        self._open[path] = version, partition
        return partition


def write_index(root: Path, index: PartitionIndex) -> None:
    """Makes a partition complete: its index appears whole or not at all.

    Raises:
        OSError: it cannot be written; the partition stays incomplete.
    """
    directory = partition_directory(root, index.job_id, index.partition_id)
    make_directory(directory)
    temporary = directory / f".{INDEX_NAME}.tmp"
    try:
        temporary.write_bytes(encode_index(index))
        temporary.replace(directory / INDEX_NAME)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to be told
            temporary.unlink(missing_ok=True)
        raise


def remove_partition(directory: Path) -> None:
    """Removes what is kept of a partition, the index first, and the directories that it leaves empty.

    Raises:
        OSError: something cannot be removed.
    """
    (directory / INDEX_NAME).unlink(missing_ok=True)
    _remove_tree(directory)
    for parent in (directory.parent, directory.parent.parent):
        try:
            parent.rmdir()
        except OSError:  # another partition is there, or it is gone
            return


def _remove_tree(directory: Path) -> None:
    for path, directories, files in os.walk(directory, topdown=False):
        for name in files:
            (Path(path) / name).unlink(missing_ok=True)
        for name in directories:
            with contextlib.suppress(FileNotFoundError):
                (Path(path) / name).rmdir()
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()
