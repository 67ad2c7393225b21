"""Complete partitions on shared storage as a consumer's own process reads them (pure).

Nobody serves them: the index is read, then file after file, the next one while one is being taken. What is
not there, or damaged, is a partition that is not available, because its producer can make it again; storage that does
not answer is a connection that is lost, which is tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from penstock.errors import PartitionUnavailable, StoreTransient, StreamError
from penstock.partition_id import PartitionId
from taskmanager.network.partition_registry import PartitionRequest, PartitionSource
from taskmanager.network.subpartition import SubpartitionReader
from taskmanager.partitions.elements_view import ElementsView
from taskmanager.partitions.sealed_elements import ElementCursor, check_readable
from taskmanager.partitions.spill_layout import PartitionIndex, SpillFile


class CompleteFiles(Protocol):
    """The files of a complete partition; one of the two callbacks of a call follows from the mailbox."""

    def index(
        self,
        on_read: Callable[[PartitionIndex], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Reads what it holds."""

    def read(
        self,
        subpartition: int,
        file: SpillFile,
        on_read: Callable[[list[pa.RecordBatch]], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Reads the batches of a file."""


class SharedPartitions(PartitionSource):
    """Those below one place.

    Args:
        name: of the place, for messages.
        files_of: the files of a partition.
        is_own: it is the disk of this TaskManager.
    """

    may_be_lost = True

    def __init__(
        self, name: str, files_of: Callable[[PartitionId], CompleteFiles], *, is_own: bool = False
    ) -> None:
        self._name = name
        self._told = name if is_own else f"{name} (is it the same place for all TaskManagers?)"
        self._files_of = files_of
        self._wanted: list[PartitionRequest] = []

    @override
    def request(self, request: PartitionRequest) -> None:
        self._wanted.append(request)
        files = self._files_of(request.partition_id)
        files.index(partial(self._found, request, files), partial(self._failed, request))

    @override
    def withdraw(self, request: PartitionRequest) -> None:
        if request in self._wanted:
            self._wanted.remove(request)

    def _found(
        self, request: PartitionRequest, files: CompleteFiles, index: PartitionIndex
    ) -> None:
        if request not in self._wanted:
            return
        self._wanted.remove(request)
        try:
            check_readable(index, request.subpartition_index, request.first_row)
        except PartitionUnavailable as error:
            request.refused(error)
            return
        view = _SharedView(index, files, request, partial(self._tell, request))
        request.attached(view)
        view.attach(request.reader)

    def _failed(self, request: PartitionRequest, error: StreamError) -> None:
        if request in self._wanted:
            self._wanted.remove(request)
            self._tell(request, error)

    def _tell(self, request: PartitionRequest, error: StreamError) -> None:
        if isinstance(error, StoreTransient):
            request.lost(f"{self._name} cannot be read now: {error}")
            return
        wanted = request.partition_id
        message = f"partition {wanted} cannot be read from {self._told}: {error}"
        request.refused(PartitionUnavailable(message, partition=wanted))


class _SharedView(ElementsView):
    """One consumer's place."""

    def __init__(
        self,
        index: PartitionIndex,
        files: CompleteFiles,
        request: PartitionRequest,
        on_failed: Callable[[StreamError], None],
    ) -> None:
        super().__init__(iter(()))
        self._files = files
        self._subpartition = request.subpartition_index
        part = index.subpartitions[self._subpartition]
        self._cursor = ElementCursor(part, request.first_row)
        self._before = self._cursor.before()
        self._on_failed = on_failed
        self._next = 0
        """Of the cursor's files, the one behind that whose elements are sent."""
        self._ahead: list[pa.RecordBatch] | None = None
        """Its batches, once they are there."""
        self._is_reading = self._is_behind = False

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        self._reader = reader
        self._read_ahead()
        self.serve()

    @override
    def _go_on(self) -> bool:
        # To the next file, where it is there, or to what is behind the last.
        if self._next == len(self._cursor.files):
            has_more = not self._is_behind
            self._is_behind = True
            self._elements = chain(self._before, self._cursor.behind()) if has_more else iter(())
            return has_more
        if self._ahead is None:
            return False
        file = self._cursor.files[self._next]
        # What held before the rows comes with them: nothing comes while they are out of reach.
        self._elements = chain(self._before, self._cursor.of_file(file, self._ahead))
        self._next, self._ahead = self._next + 1, None
        self._read_ahead()
        return True

    def _read_ahead(self) -> None:
        if self._is_reading or self._next == len(self._cursor.files):
            return
        self._is_reading = True
        file = self._cursor.files[self._next]
        self._files.read(self._subpartition, file, self._have_read, self._have_failed)

    def _have_read(self, batches: list[pa.RecordBatch]) -> None:
        self._is_reading = False
        if self._reader is not None:
            self._ahead = batches
            self.serve()

    def _have_failed(self, error: StreamError) -> None:
        self._is_reading = False
        if self._reader is not None:
            self.detach(is_complete=False)
            self._on_failed(error)

    @override
    def detach(self, *, is_complete: bool) -> None:
        super().detach(is_complete=is_complete)
        self._ahead = None
