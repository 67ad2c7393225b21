"""A complete partition on disk as its consumers see it.

Any number of consumers read it, each from the row it asks for and within its credit. What they are
sent refers to mapped files, so a file may be removed while it is read; a file is compared with its
checksum whenever it is opened. A damaged file is reported to the consumer as a partition
that is not available, because its producer can make it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.errors import PartitionUnavailable, StoreCorrupt, StoreNotFound
from taskmanager.network.subpartition import ReadablePartition, Refusal
from taskmanager.partitions.elements_view import ElementsView
from taskmanager.partitions.sealed_elements import ElementCursor, Elements, check_readable
from taskmanager.partitions.spill_files import read_spill_file
from taskmanager.partitions.spill_format import SpillFormat
from taskmanager.partitions.spill_layout import PartitionIndex, SpillFile, subpartition_directory


@dataclass(frozen=True, slots=True)
class DataFile:
    """Rows of a complete partition, for who reads files in place.

    Attributes:
        path: where it is. Read it by this name alone: from a directory, readers take `part=` and `sub=` for columns.
        checksum: CRC-32 of the file.
    """

    path: Path
    format: SpillFormat
    rows: int
    size_bytes: int
    checksum: int


class SealedPartition(ReadablePartition):
    """Reads the files that an index names."""

    def __init__(self, index: PartitionIndex, directory: Path) -> None:
        self.partition_id = index.partition_id
        self.index = index
        self._directory = directory

    @override
    def view(
        self, index: int, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0
    ) -> SealedView:
        check_readable(self.index, index, first_row)
        return SealedView(self, index, first_row, on_unavailable)

    def files(self, index: int) -> list[DataFile]:
        """The files of one subpartition, in the order of its rows; together they are all of these."""
        directory = subpartition_directory(self._directory, index)
        return [
            DataFile(directory / file.name, file.format, file.rows, file.size_bytes, file.checksum)
            for file in self.index.subpartitions[index].files
        ]

    def elements(self, index: int, first_row: int) -> Elements:
        """Everything from a row on, behind the watermark and status that held before it.

        Raises:
            StoreNotFound, StoreCorrupt: a file is not there, or not what was written.
        """
        cursor = ElementCursor(self.index.subpartitions[index], first_row)
        yield from cursor.before()
        for file in cursor.files:
            yield from cursor.of_file(file, self._read(index, file))
        yield from cursor.behind()

    def _read(self, index: int, file: SpillFile) -> list[pa.RecordBatch]:
        path = subpartition_directory(self._directory, index) / file.name
        return read_spill_file(path, file)


class SealedView(ElementsView):
    """One consumer's place."""

    def __init__(
        self, partition: SealedPartition, index: int, first_row: int, on_unavailable: Refusal
    ) -> None:
        super().__init__(partition.elements(index, first_row))
        self._partition_id = partition.partition_id
        self._on_unavailable = on_unavailable

    @override
    def serve(self) -> None:
        try:
            super().serve()
        except (StoreCorrupt, StoreNotFound) as error:
            self._reader = None
            self._on_unavailable(
                PartitionUnavailable(
                    f"partition {self._partition_id} cannot be read any more: {error}",
                    partition=self._partition_id,
                )
            )
