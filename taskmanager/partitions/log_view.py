"""One reader's place in the log of a subpartition (pure).

A reader starts at a row. It is told the watermark and the stream status that hold there, then gets
everything from there on. A restarted producer may still be on its way to that row: what it emits until then
is not sent. Barriers that were put in before the reader attached are sent where their
checkpoints are still pending: it may have been slow to connect, or have lost its connection with them. A
reader that was restarted takes no part in older checkpoints, which were aborted for its sake.

A reader that is behind must not stop its producer, and must not stay behind for ever where the producer
is the faster of the two. Until it has read what was there when it attached, it holds nothing back. From
then on its producer may emit one row for two that it reads, until it has caught up. A reader that has
caught up is live: it holds the producer back whenever a batch has to wait for it, as on a pipelined edge.

Batches that are in files are read ahead, off the mailbox: the file that is being sent and the next.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from typing_extensions import override

from common.elements import CheckpointBarrier, CheckpointCancelled, ControlElement
from penstock.errors import PartitionUnavailable, StreamError
from taskmanager.network.subpartition import (
    PreparedBatch,
    Refusal,
    SubpartitionReader,
    SubpartitionView,
)
from taskmanager.partitions.subpartition_log import (
    ControlEntry,
    LogFile,
    RowsEntry,
    SubpartitionLog,
)

_FILES_AHEAD = 1

ReadFile = Callable[
    [LogFile, Callable[[list[pa.RecordBatch]], None], Callable[[StreamError], None]], None
]
"""Reads a file; one of the callbacks follows, from the mailbox."""


class LogView(SubpartitionView):
    """A cursor.

    Args:
        row: offset of the first row that is wanted; the log has it, or will have.
        reader_attempt: of the consumer.
        read_file: reads a file of the log.
        on_sent: called with the bytes of each batch sent.
        on_progress: called after every turn of sending that the log did not start itself.
        on_detached: called once, when nothing is sent any more.
        on_unavailable: tells the consumer that it cannot read on.

    Attributes:
        index: of the entry that is sent next.
        is_live: it has been sent everything once.

    Example: a reader that goes on from row 3 gets what is behind it.
        >>> from unittest.mock import Mock
        >>> log = SubpartitionLog()
        >>> log.append_batch(pa.record_batch({"n": [0, 1, 2]}), size_bytes=24)
        >>> log.append_batch(pa.record_batch({"n": [3, 4]}), size_bytes=16)
        >>> heard = dict.fromkeys(("read_file", "on_sent", "on_progress", "on_detached"), Mock())
        >>> view = LogView(log, row=3, on_unavailable=Mock(), on_attached=Mock(), **heard)
        >>> reader = Mock()
        >>> view.attach(reader)
        >>> [call.args[1] for call in reader.send_batch.mock_calls], view.is_caught_up
        ([3], True)
    """

    def __init__(
        self,
        log: SubpartitionLog,
        row: int,
        *,
        read_file: ReadFile,
        on_sent: Callable[[int], None],
        on_progress: Callable[[], None],
        on_detached: Callable[[LogView, bool], None],
        on_unavailable: Refusal,
        on_attached: Callable[[LogView], None],
        reader_attempt: int = 0,
    ) -> None:
        self.index = log.index_of(row)
        self.is_live = False
        self.reader_attempt = reader_attempt
        self.reader: SubpartitionReader | None = None
        self._log = log
        self._row = row
        self._read_file = read_file
        self._on_sent = on_sent
        self._on_progress = on_progress
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._on_unavailable = on_unavailable
        self._attached_index = log.end_index
        self._attached_end_row = log.end_row
        self._behind_rows_max: int | None = None
        """How far it may be behind, once it has read what was there when it attached."""
        self._prepared: PreparedBatch | None = None
        self._loaded: dict[LogFile, list[pa.RecordBatch] | None] = {}
        """The file that is being sent and the next; None = it is being read."""

    @property
    def is_caught_up(self) -> bool:
        """True when everything has been sent."""
        return self.index == self._log.end_index

    @property
    def holds_back(self) -> bool:
        """True while the producer has to wait for it."""
        if self.is_live:
            return not self.is_caught_up
        behind_rows_max = self._behind_rows_max
        return behind_rows_max is not None and self._log.end_row - self._row > behind_rows_max

    # ------------------------------------------------------------ the consumer's calls

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        self.reader = reader
        self._on_attached(self)
        for element in self._log.state_before(self.index):
            reader.send_control(element)
        self.serve()

    @override
    def serve(self) -> None:
        if self.reader is not None:
            self.pump()
            self._on_progress()

    @override
    def detach(self, *, is_complete: bool) -> None:
        if self.reader is not None:
            self.end()
            self._on_detached(self, is_complete)

    @override
    def connection_lost(self, reason: str) -> None:
        self.detach(is_complete=False)

    # ------------------------------------------------------------ the log's calls

    def pump(self) -> None:
        """Sends what waits as far as there is credit and it is in memory."""
        log = self._log
        while (reader := self.reader) is not None and self.index < log.end_index:
            entry = log.entry(self.index)
            if isinstance(entry, ControlEntry):
                index, self.index = self.index, self.index + 1
                if self._is_meant(index, entry.element):
                    reader.send_control(entry.element)
            elif not self._send(reader, entry):
                return
        self.is_live = True

    def _send(self, reader: SubpartitionReader, entry: RowsEntry) -> bool:
        if entry.end_row <= self._row:  # the reader is ahead of a restarted producer
            self.index += 1
            return True
        prepared = self._prepared
        if prepared is None:
            batch = self._batch_of(entry)
            if batch is None:
                return False
            size_bytes = entry.size_bytes
            if entry.row < self._row:
                batch = batch.slice(self._row - entry.row)
                size_bytes = size_bytes * batch.num_rows // entry.rows
            prepared = self._prepared = reader.prepare(batch, size_bytes)
        if not reader.may_send(prepared.charge_bytes):
            return False
        self._prepared = None
        self.index += 1
        row, self._row = max(self._row, entry.row), entry.end_row
        if not self.is_live:
            self._come_nearer(entry.end_row - row)
        self._on_sent(prepared.size_bytes)
        reader.send_batch(prepared, row)
        return True

    def _come_nearer(self, rows: int) -> None:
        if self._behind_rows_max is not None:
            self._behind_rows_max -= rows // 2
        elif self._row >= self._attached_end_row:
            self._behind_rows_max = self._log.end_row - self._row

    def step_back(self) -> None:
        """The last entry, a watermark, has been replaced by one that is to be sent too."""
        if self.is_caught_up:
            self.index -= 1

    def released(self) -> None:
        """The log is no more, or another has taken the reader's place."""
        reader = self.reader
        self.end()
        if reader is not None:
            reader.partition_released()

    def end(self) -> None:
        """Nothing is sent any more."""
        self.reader = self._prepared = None
        self._loaded.clear()

    # ------------------------------------------------------------ internals

    def _is_meant(self, index: int, element: ControlElement) -> bool:
        if index >= self._attached_index:
            return True
        if isinstance(element, CheckpointBarrier):
            return self._log.is_pending(element.checkpoint_id)
        return not isinstance(element, CheckpointCancelled)

    def _batch_of(self, entry: RowsEntry) -> pa.RecordBatch | None:
        """The batch where it is in memory; else it is on its way."""
        if entry.batch is not None:
            if self._loaded:
                self._loaded.clear()
            return entry.batch
        file = entry.file
        assert file is not None, "a batch is in memory or in a file"
        wanted = self._log.files_from(file, 1 + _FILES_AHEAD)
        self._loaded = {known: self._loaded[known] for known in wanted if known in self._loaded}
        for ahead in wanted:
            if ahead not in self._loaded:
                self._loaded[ahead] = None
                self._load(ahead)
        batches = self._loaded.get(file)
        return batches[entry.number] if batches is not None else None

    def _load(self, file: LogFile) -> None:
        def loaded(batches: list[pa.RecordBatch]) -> None:
            if self.reader is not None and file in self._loaded:
                self._loaded[file] = batches
                self.serve()

        def failed(error: StreamError) -> None:
            if self.reader is not None and file in self._loaded:
                self.detach(is_complete=False)
                self._on_unavailable(PartitionUnavailable(f"it cannot be read any more: {error}"))

        self._read_file(file, loaded, failed)
