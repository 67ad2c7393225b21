"""Runs what is done to the files of kept partitions on I/O threads, and brings the results back.

Everything here is called on the mailbox thread; the work itself is not. Results come as mail. A
partition's directory is removed when nothing is being written to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import structlog
from typing_extensions import override

from penstock.errors import StoreCorrupt, StreamError
from penstock.partition_id import PartitionId
from taskmanager.network.transport import Post
from taskmanager.partitions.exchange_cache import WrittenFiles
from taskmanager.partitions.kept_partition import PartitionFiles
from taskmanager.partitions.kept_subpartition import SubpartitionFiles
from taskmanager.partitions.sealed_store import remove_partition, write_index
from taskmanager.partitions.spill_counts import SPILL
from taskmanager.partitions.spill_files import read_spill_file, spill_failed, write_spill_files
from taskmanager.partitions.spill_format import ARROW_FILES, FormatChoice
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFile,
    SubpartitionIndex,
    partition_directory,
    subpartition_directory,
)
from taskmanager.partitions.subpartition_log import LogFile

_log = structlog.get_logger()
_T = TypeVar("_T")

Submit = Callable[[Callable[[], None]], object]
"""Runs a call on an I/O thread."""


class SpillRunner:
    """The spill directory as one slot process uses it.

    Args:
        root: the spill directory of the TaskManager.
        job_id: of the slot's job.
        submit: runs a call on an I/O thread.
        post: adds mail to the slot's mailbox.
    """

    def __init__(self, root: Path, job_id: str, submit: Submit, post: Post) -> None:
        self._root = root
        self._job_id = job_id
        self._submit = submit
        self._post = post

    def partition(
        self, partition_id: PartitionId, choice: FormatChoice = ARROW_FILES
    ) -> PartitionFiles:
        """The files of a partition, and how they are written."""
        return _Files(self._root, self._job_id, partition_id, choice, self._submit, self._post)


class _Files(PartitionFiles):
    def __init__(
        self,
        root: Path,
        job_id: str,
        partition_id: PartitionId,
        choice: FormatChoice,
        submit: Submit,
        post: Post,
    ) -> None:
        self.directory = partition_directory(root, job_id, partition_id)
        self._root = root
        self._job_id = job_id
        self._partition_id = partition_id
        self.choice = choice
        self._submit = submit
        self._post = post
        self._writes = 0
        self._has_written = False
        self._is_removed = False

    @override
    def subpartition(self, index: int) -> SubpartitionFiles:
        return _SubpartitionFiles(self, index)

    @override
    def seal(
        self,
        subpartitions: tuple[SubpartitionIndex, ...],
        on_sealed: Callable[[PartitionIndex], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        index = PartitionIndex(self._job_id, self._partition_id, subpartitions)

        def write() -> PartitionIndex:
            try:
                write_index(self._root, index)
            except OSError as error:
                raise spill_failed(self.directory, error) from error
            return index

        self.write(write, on_sealed, on_failed)

    @override
    def remove(self) -> None:
        self._is_removed = True
        if self._has_written and not self._writes:
            self.clean(partial(remove_partition, self.directory))

    def write(
        self,
        work: Callable[[], _T],
        on_done: Callable[[_T], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Runs something that makes files."""
        self._writes += 1
        self._has_written = True

        def ended() -> None:
            self._writes -= 1
            if self._is_removed:
                self.remove()

        def done(result: _T) -> None:
            on_done(result)
            ended()

        def failed(error: StreamError) -> None:
            # An attempt that has finished does not fail with it: its rows stay in memory.
            _log.warning(
                "partition.not_written",
                job_id=self._job_id,
                partition_id=str(self._partition_id),
                reason=str(error),
            )
            on_failed(error)
            ended()

        self.run(work, done, failed)

    def run(
        self,
        work: Callable[[], _T],
        on_done: Callable[[_T], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Runs something on an I/O thread; its result, or its error, comes as mail."""

        def call() -> None:
            try:
                result = work()
            except StreamError as error:
                self._post(partial(on_failed, error))
            except Exception as error:  # noqa: BLE001 - a thread's boundary: the attempt fails with it
                failure = StoreCorrupt(f"{self.directory}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._post(partial(on_failed, failure))
            else:
                self._post(partial(on_done, result))

        self._submit(call)

    def clean(self, work: Callable[[], None]) -> None:
        """Removes something on an I/O thread; what cannot be removed is logged, and nothing else."""

        def call() -> None:
            try:
                work()
            except OSError as error:
                _log.warning(
                    "partition.removal_failed",
                    job_id=self._job_id,
                    partition_id=str(self._partition_id),
                    reason=str(error),
                )

        self._submit(call)


class _SubpartitionFiles(SubpartitionFiles):
    def __init__(self, files: _Files, index: int) -> None:
        self._files = files
        self._directory = subpartition_directory(files.directory, index)

    @override
    def write(
        self,
        sequence: int,
        first_row: int,
        batches: Sequence[pa.RecordBatch],
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        work = partial(
            write_spill_files, self._directory, sequence, first_row, batches, self._files.choice
        )

        def written(timed: tuple[WrittenFiles, float]) -> None:
            files, seconds = timed
            SPILL.add_written(sum(file.size_bytes for file, _ in files), seconds)
            on_written(files)

        self._files.write(partial(_timed, work), written, on_failed)

    @override
    def read(
        self,
        file: LogFile,
        on_read: Callable[[list[pa.RecordBatch]], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        path = self._directory / file.file.name

        def read(timed: tuple[list[pa.RecordBatch], float]) -> None:
            batches, seconds = timed
            SPILL.add_read(file.file.size_bytes, seconds)
            on_read(batches)

        work = partial(read_spill_file, path, file.file)
        self._files.run(partial(_timed, work), read, on_failed)

    @override
    def unlink(self, files: Sequence[SpillFile]) -> None:
        def unlink() -> None:
            for file in files:
                (self._directory / file.name).unlink(missing_ok=True)

        self._files.clean(unlink)


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """What it gives, and how many seconds it took."""
    started_s = time.perf_counter()
    return work(), time.perf_counter() - started_s
