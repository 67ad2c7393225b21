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

from penstock.errors import StoreCorrupt, StoreTransient, StreamError
from penstock.partition_id import PartitionId
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store
from taskmanager.network.transport import Post
from taskmanager.partitions.exchange_cache import WrittenFiles
from taskmanager.partitions.kept_partition import PartitionFiles
from taskmanager.partitions.kept_subpartition import SubpartitionFiles
from taskmanager.partitions.shared_partitions import CompleteFiles
from taskmanager.partitions.spill_counts import SPILL
from taskmanager.partitions.spill_format import ARROW_FILES, FormatChoice
from taskmanager.partitions.spill_layout import PartitionIndex, SpillFile, SubpartitionIndex
from taskmanager.partitions.spill_places import LocalPlace, PartitionPlace, SharedPlace
from taskmanager.partitions.subpartition_log import LogFile

_log = structlog.get_logger()
_T = TypeVar("_T")

Submit = Callable[[Callable[[], None]], object]
"""Runs a call on an I/O thread."""


class SpillRunner:
    """The spill directory, and shared storage, as one slot process uses them.

    Args:
        root: the spill directory of the TaskManager.
        job_id: of the slot's job.
        submit: runs a call on an I/O thread.
        post: adds mail to the slot's mailbox.
        open_store: the store of a name.
    """

    def __init__(
        self,
        root: Path,
        job_id: str,
        submit: Submit,
        post: Post,
        open_store: Callable[[str], ObjectStore] = open_store,
    ) -> None:
        self._root = root
        self._job_id = job_id
        self._submit = submit
        self._post = post
        self._open_store = open_store
        self._stores: dict[str, ObjectStore] = {}

    def partition(
        self, partition_id: PartitionId, choice: FormatChoice = ARROW_FILES, shared: str = ""
    ) -> PartitionFiles:
        """The files of a partition.

        Args:
            partition_id: which.
            choice: how they are written.
            shared: name of the shared storage that they lie on; "" = the disk of the TaskManager.
        """
        place: PartitionPlace
        if shared:
            place = self._shared_place(partition_id, choice, shared)
        else:
            place = LocalPlace(self._root, self._job_id, partition_id, choice)
        return _Files(place, self._job_id, partition_id, self._submit, self._post)

    def complete(self, partition_id: PartitionId, shared: str) -> CompleteFiles:
        """The files of a partition that has been completed on shared storage."""
        place = self._shared_place(partition_id, ARROW_FILES, shared)
        return _CompleteFiles(place, self._job_id, partition_id, self._submit, self._post)

    def _shared_place(
        self, partition_id: PartitionId, choice: FormatChoice, shared: str
    ) -> SharedPlace:
        store = self._stores.get(shared)
        if store is None:
            store = self._stores[shared] = self._open_store(shared)
        return SharedPlace(store, shared, self._job_id, partition_id, choice)


class _Files(PartitionFiles):
    def __init__(
        self,
        place: PartitionPlace,
        job_id: str,
        partition_id: PartitionId,
        submit: Submit,
        post: Post,
    ) -> None:
        self.place = place
        self._job_id = job_id
        self._partition_id = partition_id
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
            self.place.seal(index)
            return index

        self.write(write, on_sealed, on_failed)

    @override
    def remove(self) -> None:
        self._is_removed = True
        if self._has_written and not self._writes:
            self.clean(self.place.remove)

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
                failure = StoreCorrupt(f"{self.place.name}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._post(partial(on_failed, failure))
            else:
                self._post(partial(on_done, result))

        self._submit(call)

    def read(
        self,
        subpartition: int,
        file: SpillFile,
        on_read: Callable[[list[pa.RecordBatch]], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Reads the batches of a file."""

        def read(timed: tuple[list[pa.RecordBatch], float]) -> None:
            batches, seconds = timed
            SPILL.add_read(file.size_bytes, seconds)
            on_read(batches)

        work = partial(self.place.read, subpartition, file)
        self.run(partial(_timed, work), read, on_failed)

    def clean(self, work: Callable[[], None]) -> None:
        """Removes something on an I/O thread; what cannot be removed is logged, and nothing else."""

        def call() -> None:
            try:
                work()
            except (OSError, StoreTransient) as error:
                _log.warning(
                    "partition.removal_failed",
                    job_id=self._job_id,
                    partition_id=str(self._partition_id),
                    reason=str(error),
                )

        self._submit(call)


class _SubpartitionFiles(SubpartitionFiles):
    def __init__(self, files: _Files, index: int) -> None:
        self.need_local_disk = files.place.needs_local_disk
        self._files = files
        self._index = index

    @override
    def write(
        self,
        sequence: int,
        first_row: int,
        batches: Sequence[pa.RecordBatch],
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        work = partial(self._files.place.write, self._index, sequence, first_row, batches)

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
        self._files.read(self._index, file.file, on_read, on_failed)

    @override
    def unlink(self, files: Sequence[SpillFile]) -> None:
        self._files.clean(partial(self._files.place.unlink, self._index, files))


class _CompleteFiles(_Files, CompleteFiles):
    def __init__(
        self,
        place: SharedPlace,
        job_id: str,
        partition_id: PartitionId,
        submit: Submit,
        post: Post,
    ) -> None:
        super().__init__(place, job_id, partition_id, submit, post)
        self._shared = place

    @override
    def index(
        self,
        on_read: Callable[[PartitionIndex], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        self.run(self._shared.index, on_read, on_failed)


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """What it gives, and how many seconds it took."""
    started_s = time.perf_counter()
    return work(), time.perf_counter() - started_s
