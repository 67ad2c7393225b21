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
from taskmanager.network.batch_codec import SizeEstimator
from taskmanager.network.subpartition import (
    PreparedBatch,
    ReadablePartition,
    Refusal,
    SubpartitionReader,
    SubpartitionView,
)
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
    """Reads the files that an index names.

    Args:
        index: of the partition.
        directory: of the partition.
    """

    def __init__(self, index: PartitionIndex, directory: Path) -> None:
        self.partition_id = index.partition_id
        self.index = index
        self._directory = directory

    @property
    def subpartition_count(self) -> int:
        """How many consumers the partition was made for."""
        return len(self.index.subpartitions)

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


class SealedView(SubpartitionView):
    """One consumer's place."""

    def __init__(
        self, partition: SealedPartition, index: int, first_row: int, on_unavailable: Refusal
    ) -> None:
        self._partition = partition
        self._elements = partition.elements(index, first_row)
        self._on_unavailable = on_unavailable
        self._sizes = SizeEstimator()
        self._reader: SubpartitionReader | None = None
        self._waiting: tuple[int, PreparedBatch] | None = None

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        self._reader = reader
        self.serve()

    @override
    def serve(self) -> None:
        try:
            while (reader := self._reader) is not None and self._next(reader):
                pass
        except (StoreCorrupt, StoreNotFound) as error:
            self._reader = None
            partition_id = self._partition.partition_id
            self._on_unavailable(
                PartitionUnavailable(
                    f"partition {partition_id} cannot be read any more: {error}",
                    partition=partition_id,
                )
            )

    def _next(self, reader: SubpartitionReader) -> bool:
        """Sends one element; False when there is no credit or nothing left."""
        if self._waiting is None:
            row, element = next(self._elements, (0, None))
            if element is None:
                return False
            if not isinstance(element, pa.RecordBatch):
                reader.send_control(element)
                return True
            self._waiting = row, reader.prepare(element, self._sizes.size_bytes(element))
        row, prepared = self._waiting
        if not reader.may_send(prepared.charge_bytes):
            return False
        self._waiting = None
        reader.send_batch(prepared, row)
        return True

    @override
    def detach(self, *, is_complete: bool) -> None:
        self._reader = self._waiting = None

    @override
    def connection_lost(self, reason: str) -> None:
        self.detach(is_complete=False)
