"""Files of kept subpartitions that are no files: what is asked for happens when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock.errors import StoreNotFound, StreamError
from taskmanager.partitions.exchange_cache import WrittenFiles
from taskmanager.partitions.kept_subpartition import SubpartitionFiles
from taskmanager.partitions.spill_layout import SpillFailed, SpillFile
from taskmanager.partitions.subpartition_log import LogFile


class PendingFiles(SubpartitionFiles):
    """Holds batches by file.

    Args:
        batches_per_file: a run is cut into files of so many batches.

    Attributes:
        pending: what has been asked for and not happened; a test calls them in any order.
        files: sequence -> batches.
        disk_is_full: writes fail.
    """

    def __init__(self, batches_per_file: int = 1000) -> None:
        self.pending: list[Callable[[], None]] = []
        self.files: dict[int, list[pa.RecordBatch]] = {}
        self.disk_is_full = False
        self._batches_per_file = batches_per_file

    def run(self) -> None:
        """Lets everything happen, and what comes of it."""
        while self.pending:
            self.pending.pop(0)()

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(batch.nbytes for batches in self.files.values() for batch in batches)

    @override
    def write(
        self,
        sequence: int,
        first_row: int,
        batches: Sequence[pa.RecordBatch],
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        self.pending.append(
            partial(self._write, sequence, first_row, list(batches), on_written, on_failed)
        )

    def _write(
        self,
        sequence: int,
        first_row: int,
        batches: list[pa.RecordBatch],
        on_written: Any,
        on_failed: Any,
    ) -> None:
        if self.disk_is_full:
            on_failed(SpillFailed("the disk is full"))
            return
        written = []
        for start in range(0, len(batches), self._batches_per_file):
            part = batches[start : start + self._batches_per_file]
            rows = sum(batch.num_rows for batch in part)
            size_bytes = sum(batch.nbytes for batch in part)
            assert sequence not in self.files
            self.files[sequence] = part
            written.append((SpillFile(sequence, first_row, rows, size_bytes, 0), len(part)))
            sequence, first_row = sequence + 1, first_row + rows
        on_written(written)

    @override
    def read(
        self,
        file: LogFile,
        on_read: Callable[[list[pa.RecordBatch]], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        def read() -> None:
            batches = self.files.get(file.file.sequence)
            if batches is None:
                on_failed(StoreNotFound(f"file {file.file.sequence} is not there"))
            else:
                on_read(batches)

        self.pending.append(read)

    @override
    def unlink(self, files: Sequence[SpillFile]) -> None:
        for file in files:
            del self.files[file.sequence]
