"""Rows of a collect sink that have come and that nobody has read yet.

A job stands still while the rows of one of its collect sinks are not taken, so they are taken while the program
reads those of another. Beyond ``MEMORY_BYTES_MAX`` they lie in temporary files.

Invariants: a loop sees each subtask's rows in their order, once; what a loop has seen of more rows than fit into
memory is dropped while they still come, so that an endless stream needs bounded room; an error is final.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import JobRejected, RowsComeAgain, StoreTransient, StreamError
from penstock.storage.spill_store import SpillStore

_log = logging.getLogger("penstock")

MEMORY_BYTES_MAX = 64 * 1024 * 1024
SPILLED_BYTES_MAX = 8 * 1024 * 1024 * 1024
SEEN_BY_A_LOOP = (
    "a loop over these rows takes them as they come, or was left before their end: each is sent once. "
    "Call to_pylist() or to_arrow() in its place to have them all"
)


@dataclass(slots=True)
class _Entry:
    """A batch; None where it lies in the files, at ``where``."""

    subtask_index: int
    batch: pa.RecordBatch | None
    size_bytes: int
    where: int = 0


class ArrivedRows:
    """Batches between the thread that fetches them and the loops that read them."""

    def __init__(self, collect_id: str) -> None:
        self._collect_id = collect_id
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._next = 0
        self._dropped_count = 0
        self._memory_bytes = 0
        self._spill = SpillStore()
        weakref.finalize(self, self._spill.clear)
        self._is_large = False
        self._were_seen = False
        """A loop has been given some."""
        self._has_ended = False
        self._error: StreamError | None = None

    @property
    def memory_bytes(self) -> int:
        """What lies in memory."""
        return self._memory_bytes

    def wait(self) -> None:
        """Waits until no more will come.

        Raises:
            StreamError: they could not be fetched or kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
            if self._error is not None:
                raise self._error

    def put(self, subtask_index: int, batch: pa.RecordBatch) -> None:
        """Keeps a batch. Where there is no room all are dropped, and reading them raises."""
        with self._changed:
            if self._error is not None:
                return
            entry = _Entry(subtask_index, batch, batch.nbytes)
            if self._memory_bytes + entry.size_bytes <= MEMORY_BYTES_MAX:
                self._memory_bytes += entry.size_bytes
            else:
                self._is_large = True
                try:
                    self._to_file(entry)
                except StoreTransient as error:
                    told = f"{error}. {self._remedy()}"
                    _log.warning("%s", told)
                    self._break(JobRejected(told))
                    return
            self._entries[self._next] = entry
            self._next += 1
            self._changed.notify_all()

    def _to_file(self, entry: _Entry) -> None:
        assert entry.batch is not None
        data = _to_ipc(entry.batch)
        if self._spill.size_bytes + len(data) > SPILLED_BYTES_MAX:
            raise StoreTransient(f"more than {SPILLED_BYTES_MAX >> 20} MB of rows wait to be read")
        entry.where = self._spill.put(data)
        entry.size_bytes, entry.batch = len(data), None

    def _remedy(self) -> str:
        return (
            f"The rows of {self._collect_id!r} were dropped: read them beside those of the other collect(), "
            "for example with zip(), or write them to files"
        )

    def end(self, error: StreamError | None = None) -> None:
        """No more will come; with an error, reading them raises it."""
        with self._changed:
            self._has_ended = True
            if error is not None and self._error is None:
                self._break(error)
            self._changed.notify_all()

    def begin_again(self, reason: RowsComeAgain) -> None:
        """All rows come anew; raises the reason where a loop has seen some."""
        with self._changed:
            if self._were_seen:
                raise reason
            self._drop_all()
            self._next = 0

    def _drop_all(self) -> None:
        self._entries.clear()
        self._memory_bytes = 0
        self._spill.clear()

    def _break(self, error: StreamError) -> None:
        self._error = error
        self._drop_all()
        self._changed.notify_all()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The batches as they come; where all have come, subtask by subtask.

        Raises:
            StreamError: they could not be fetched or kept, or a loop has seen them.
        """
        with self._changed:
            positions = self._in_order() if self._has_ended else None
        if positions is not None:
            for position in positions:
                with self._changed:
                    batch = self._batch(position)
                yield batch
            return
        position = 0
        while (taken := self._take(position)) is not None:
            yield taken
            position += 1

    def _in_order(self) -> list[int]:
        self._check()
        return sorted(self._entries, key=lambda position: self._entries[position].subtask_index)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._dropped_count:
            raise JobRejected(SEEN_BY_A_LOOP)

    def _take(self, position: int) -> pa.RecordBatch | None:
        with self._changed:
            while position == self._next and not self._has_ended and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if position < self._dropped_count:
                self._check()
            if position == self._next:
                return None
            batch = self._batch(position)
            self._were_seen = True
            if self._is_large and not self._has_ended:
                self._drop_to(position)
            return batch

    def _batch(self, position: int) -> pa.RecordBatch:
        if position not in self._entries:
            self._check()
        entry = self._entries[position]
        if entry.batch is not None:
            return entry.batch
        with pa.ipc.open_stream(self._spill.read(entry.where, entry.size_bytes)) as reader:
            return reader.read_next_batch()

    def _drop_to(self, position: int) -> None:
        for dropped in range(self._dropped_count, position + 1):
            entry = self._entries.pop(dropped)
            if entry.batch is None:
                self._spill.drop(entry.where)
            else:
                self._memory_bytes -= entry.size_bytes
        self._dropped_count = position + 1


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
