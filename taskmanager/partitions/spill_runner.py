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
from penstock.storage.open_store import directory_of, open_store
from taskmanager.network.transport import Post
from taskmanager.partitions.dealt_files import GivenFiles
from taskmanager.partitions.exchange_cache import WrittenFiles
from taskmanager.partitions.kept_partition import PartitionFiles
from taskmanager.partitions.kept_subpartition import SubpartitionFiles
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import SealedStore
from taskmanager.partitions.shared_calls_runner import Mail, SharedCallsRunner
from taskmanager.partitions.shared_partitions import CompleteFiles
from taskmanager.partitions.spill_counts import SPILL
from taskmanager.partitions.spill_format import ARROW_FILES, FormatChoice
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SpillFailed,
    SpillFile,
    SubpartitionIndex,
)
from taskmanager.partitions.spill_places import LocalPlace, PartitionPlace, SharedPlace
from taskmanager.partitions.subpartition_log import LogFile

_log = structlog.get_logger()
_T = TypeVar("_T")

Submit = Callable[[Callable[[], None]], object]
"""Runs a call on an I/O thread."""

MakeCall = Callable[[Callable[[], Mail], Callable[[str], None]], None]
"""Makes a call that blocks, on another thread: what it returns becomes mail; or it is given up on, with a reason."""


class SpillRunner:
    """The spill directory, and shared storage, as one slot process uses them.

    Args:
        root: the spill directory of the TaskManager.
        submit: runs a call on an I/O thread.
        post: adds mail to the slot's mailbox.
        shared_calls: makes those to shared storage.
        open_store: the store of a name.
    """

    def __init__(
        self,
        root: Path,
        job_id: str,
        submit: Submit,
        post: Post,
        shared_calls: SharedCallsRunner | None = None,
        open_store: Callable[[str], ObjectStore] = open_store,
    ) -> None:
        self.root = root
        self._job_id = job_id
        self._submit = submit
        self._post = post
        self._shared_calls = SharedCallsRunner(post) if shared_calls is None else shared_calls
        self._open_store = open_store
        self._stores: dict[str, ObjectStore] = {}

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = nothing waits."""
        return self._shared_calls.next_deadline_ns

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed."""
        self._shared_calls.tick(now_ns)

    def partition(
        self, partition_id: PartitionId, choice: FormatChoice = ARROW_FILES, shared: str = ""
    ) -> PartitionFiles:
        """The files of a partition.

        Args:
            choice: how they are written.
            shared: name of the shared storage that they lie on; "" = the disk of the TaskManager.
        """
        if shared:
            place = self._shared_place(self._job_id, partition_id, choice, shared)
            return _Files(place, self._job_id, partition_id, self._shared_calls.call)
        local = LocalPlace(self.root, self._job_id, partition_id, choice)
        return _Files(local, self._job_id, partition_id, self._on_io_thread)

    def _on_io_thread(self, work: Callable[[], Mail], _given_up: Callable[[str], None]) -> None:
        """The disk of the TaskManager holds up everything else as well where it does not answer."""
        self._submit(lambda: self._post(work()))

    def complete(self, job_id: str, partition_id: PartitionId, shared: str) -> CompleteFiles:
        """The files of a partition that a job has completed on shared storage."""
        place = self._shared_place(job_id, partition_id, ARROW_FILES, shared)
        return _CompleteFiles(place, job_id, partition_id, self._shared_calls.call)

    def here(self, job_id: str, partition_id: PartitionId, shared: str) -> SealedPartition | None:
        """A complete partition whose files this machine sees under names of their own, for who reads them in place.

        Blocks; any thread.

        Args:
            job_id: that has completed it.
            shared: name of the shared storage that it lies on; "" = the disk of its TaskManager.

        Returns:
            None where it is on the disk of another one, on storage that has no files, or not complete.

        Raises:
            StoreCorrupt, StoreTransient: its index is damaged, or cannot be read now.
        """
        root = directory_of(self._open_store(shared)) if shared else self.root
        return None if root is None else SealedStore(root).find(job_id, partition_id)

    def _shared_place(
        self, job_id: str, partition_id: PartitionId, choice: FormatChoice, shared: str
    ) -> SharedPlace:
        store = self._stores.get(shared)
        if store is None:
            store = self._stores[shared] = self._open_store(shared)
        return SharedPlace(store, shared, job_id, partition_id, choice)


class _Files(PartitionFiles):
    def __init__(
        self,
        place: PartitionPlace,
        job_id: str,
        partition_id: PartitionId,
        make_call: MakeCall,
    ) -> None:
        self.place = place
        self._job_id = job_id
        self._partition_id = partition_id
        self._make_call = make_call
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
            if not isinstance(error, SpillFailed):  # nobody has answered
                error = _write_failed(error)
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

        def call() -> Mail:
            try:
                result = work()
            except StreamError as error:
                return partial(on_failed, error)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: the attempt fails with it
                failure = StoreCorrupt(f"{self.place.name}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                return partial(on_failed, failure)
            return partial(on_done, result)

        self._make_call(
            call, lambda reason: on_failed(StoreTransient(f"{self.place.name}: {reason}"))
        )

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

        def failed(reason: str) -> None:
            _log.warning(
                "partition.removal_failed",
                job_id=self._job_id,
                partition_id=str(self._partition_id),
                reason=reason,
            )

        def call() -> Mail:
            try:
                work()
            except (OSError, StoreTransient) as error:
                return partial(failed, str(error))
            return _nothing

        self._make_call(call, failed)


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
    def take(
        self,
        sequence: int,
        first_row: int,
        files: GivenFiles,
        on_taken: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        work = partial(self._files.place.take, self._index, sequence, first_row, files)
        self._files.write(work, on_taken, on_failed)

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
        make_call: MakeCall,
    ) -> None:
        super().__init__(place, job_id, partition_id, make_call)
        self._shared = place

    @override
    def index(
        self,
        on_read: Callable[[PartitionIndex], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        self.run(self._shared.index, on_read, on_failed)


def _write_failed(cause: StreamError) -> SpillFailed:
    error = SpillFailed(f"rows of a kept result partition cannot be written: {cause}")
    error.__cause__ = cause
    return error


def _nothing() -> None:
    """Nobody waits for it."""


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """What it gives, and how many seconds it took."""
    started_s = time.perf_counter()
    return work(), time.perf_counter() - started_s
