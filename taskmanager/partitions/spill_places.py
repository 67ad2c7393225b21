"""Where the files of one partition lie: on the disk of its TaskManager, or on storage that all see.

Every call blocks, and is made on an I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from common.spill_paths import index_path, partition_path, subpartition_path
from penstock.errors import StoreCorrupt, StoreTransient
from penstock.partition_id import PartitionId
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.ranged_stream import RangedStream
from taskmanager.partitions.dealt_files import GivenFiles
from taskmanager.partitions.exchange_cache import WrittenFiles
from taskmanager.partitions.sealed_store import remove_partition, write_index
from taskmanager.partitions.spill_files import (
    checksum_of,
    decode_rows,
    encode_rows,
    make_directory,
    read_spill_file,
    spill_failed,
    write_spill_files,
)
from taskmanager.partitions.spill_format import FormatChoice, FormatMisfitError, SpillFormat
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFailed,
    SpillFile,
    decode_index,
    encode_index,
    partition_directory,
    subpartition_directory,
)
from taskmanager.partitions.taken_files import (
    chunks_of,
    decode_piece,
    described,
    link_or_copy,
)


class PartitionPlace(Protocol):
    """The files of one partition.

    Attributes:
        name: for messages.
        needs_local_disk: the limits of the TaskManager's disk are those of its files.
    """

    name: str
    needs_local_disk: bool

    def write(
        self, subpartition: int, sequence: int, first_row: int, batches: Sequence[pa.RecordBatch]
    ) -> WrittenFiles:
        """Writes consecutive batches; see ``write_spill_files``.

        Raises:
            SpillFailed: they cannot be written; no file of this call is left.
        """

    def take(
        self, subpartition: int, sequence: int, first_row: int, files: GivenFiles
    ) -> WrittenFiles:
        """Takes files that Spark has written as they are, with consecutive rows; those given stay where they are.

        Raises:
            SpillFailed: they cannot be taken.
        """

    def read(self, subpartition: int, file: SpillFile) -> list[pa.RecordBatch]:
        """The batches of a file, or of a piece of it.

        Raises:
            StoreNotFound, StoreCorrupt: it is not there, or not what was written.
            StoreTransient: it cannot be read now.
        """

    def unlink(self, subpartition: int, files: Sequence[SpillFile]) -> None:
        """Removes files.

        Raises:
            OSError, StoreTransient: one cannot be removed.
        """

    def seal(self, index: PartitionIndex) -> None:
        """Makes the partition complete: its index appears whole or not at all.

        Raises:
            SpillFailed: it cannot be written.
        """

    def remove(self) -> None:
        """Removes everything, the index first.

        Raises:
            OSError, StoreTransient: something cannot be removed.
        """


class LocalPlace(PartitionPlace):
    """Below the spill directory of a TaskManager.

    Args:
        root: that directory.
        job_id: of the partition.
        choice: of the format of files.
    """

    needs_local_disk = True

    def __init__(
        self, root: Path, job_id: str, partition_id: PartitionId, choice: FormatChoice
    ) -> None:
        self._root = root
        self._directory = partition_directory(root, job_id, partition_id)
        self._choice = choice
        self.name = str(self._directory)

    @override
    def write(
        self, subpartition: int, sequence: int, first_row: int, batches: Sequence[pa.RecordBatch]
    ) -> WrittenFiles:
        directory = subpartition_directory(self._directory, subpartition)
        return write_spill_files(directory, sequence, first_row, batches, self._choice)

    @override
    def take(
        self, subpartition: int, sequence: int, first_row: int, files: GivenFiles
    ) -> WrittenFiles:
        directory = subpartition_directory(self._directory, subpartition)
        taken = described(files, sequence, first_row)
        try:
            make_directory(directory)
            for (path, _), file in zip(files, taken, strict=True):
                link_or_copy(path, directory / file.name)
        except OSError as error:
            raise spill_failed(directory, error) from error
        return [(file, 1) for file in taken]

    @override
    def read(self, subpartition: int, file: SpillFile) -> list[pa.RecordBatch]:
        directory = subpartition_directory(self._directory, subpartition)
        return read_spill_file(directory / file.name, file)

    @override
    def unlink(self, subpartition: int, files: Sequence[SpillFile]) -> None:
        directory = subpartition_directory(self._directory, subpartition)
        for file in files:
            (directory / file.name).unlink(missing_ok=True)

    @override
    def seal(self, index: PartitionIndex) -> None:
        try:
            write_index(self._root, index)
        except OSError as error:
            raise spill_failed(self._directory, error) from error

    @override
    def remove(self) -> None:
        remove_partition(self._directory)


class SharedPlace(PartitionPlace):
    """On storage that all TaskManagers see; what is complete there needs none of them.

    Args:
        store: what the cluster has there.
        uri: its name, for messages.
        job_id: of the partition.
        choice: of the format of files.
    """

    needs_local_disk = False

    def __init__(
        self,
        store: ObjectStore,
        uri: str,
        job_id: str,
        partition_id: PartitionId,
        choice: FormatChoice,
    ) -> None:
        self._store = store
        self._job_id = job_id
        self._partition_id = partition_id
        self._path = partition_path(job_id, partition_id)
        self._index_path = index_path(job_id, partition_id)
        self._choice = choice
        self.name = f"{uri}/{self._path}"

    @override
    def write(
        self, subpartition: int, sequence: int, first_row: int, batches: Sequence[pa.RecordBatch]
    ) -> WrittenFiles:
        written: list[tuple[SpillFile, int]] = []
        start = 0
        try:
            while start < len(batches):
                spill_format = self._choice.format_of(batches[start].schema)
                content, count = encode_rows(batches, start, spill_format)
                rows = sum(batch.num_rows for batch in batches[start : start + count])
                checksum = checksum_of(content)
                file = SpillFile(sequence, first_row, rows, content.size, checksum, spill_format)
                self._store.put(self._file_path(subpartition, file), [memoryview(content)])
                written.append((file, count))
                sequence, first_row, start = sequence + 1, first_row + rows, start + count
        except (StoreTransient, FormatMisfitError) as error:
            self._store.delete_many(self._file_path(subpartition, file) for file, _ in written)
            raise self._failed(error) from error
        return written

    @override
    def take(
        self, subpartition: int, sequence: int, first_row: int, files: GivenFiles
    ) -> WrittenFiles:
        taken = described(files, sequence, first_row)
        try:
            for (path, _), file in zip(files, taken, strict=True):
                self._store.put(self._file_path(subpartition, file), chunks_of(path))
        except (OSError, StoreTransient) as error:
            raise self._failed(error) from error
        return [(file, 1) for file in taken]

    @override
    def read(self, subpartition: int, file: SpillFile) -> list[pa.RecordBatch]:
        path = self._file_path(subpartition, file)
        if file.format is SpillFormat.SPARK:
            stored = RangedStream(partial(self._store.read, path), file.size_bytes)
            return decode_piece(pa.PythonFile(stored, "r"), file, f"{self.name}/{path}")
        return decode_rows(pa.py_buffer(self._store.get(path)), file, f"{self.name}/{path}")

    @override
    def unlink(self, subpartition: int, files: Sequence[SpillFile]) -> None:
        delete_all(self._store, [self._file_path(subpartition, file) for file in files])

    @override
    def seal(self, index: PartitionIndex) -> None:
        try:
            self._store.put(self._index_path, [encode_index(index)])
        except StoreTransient as error:
            raise self._failed(error) from error

    @override
    def remove(self) -> None:
        self._store.delete(self._index_path)
        delete_all(self._store, [found.path for found in self._store.list(f"{self._path}/")])

    def index(self) -> PartitionIndex:
        """What it holds, now that it is complete.

        Raises:
            StoreNotFound: it is not complete, or has been removed.
            StoreCorrupt: its index is damaged.
            StoreTransient: it cannot be read now.
        """
        index = decode_index(self._store.get(self._index_path), f"{self.name}/index")
        if (index.job_id, index.partition_id) != (self._job_id, self._partition_id):
            raise StoreCorrupt(
                f"{self.name}/index is that of {index.partition_id} of job {index.job_id}"
            )
        return index

    def _file_path(self, subpartition: int, file: SpillFile) -> str:
        return f"{subpartition_path(self._path, subpartition)}/{file.name}"

    def _failed(self, error: Exception) -> SpillFailed:
        return SpillFailed(
            f"rows of a kept result partition cannot be written to {self.name}: {error}"
        )
