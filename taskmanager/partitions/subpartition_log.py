"""The log of one subpartition: what was emitted, in order, and where each part of it is (pure).

An entry is a batch or a control element. Entries have an index and stand at a row offset; both count
from the start of the job's rows that this attempt knows (where it was restored: from the restored
offset) and never change. The oldest entries go when a checkpoint completes, or when they have to make
room; then the watermark and the stream status that held there are remembered.

Batches are in memory, on their way to a file (still readable in memory), or in a file. They leave
memory in order, oldest first, in runs; what a run writes is told with ``written``.

Invariants:
    - entries are contiguous in index and in rows,
    - ``memory_bytes`` is the sum over batches in memory, those of unfinished runs included,
    - at most one run is being written.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from common.elements import ControlElement, StreamStatus, Watermark
from taskmanager.partitions.spill_layout import SpillFile


@dataclass(slots=True, eq=False)
class LogFile:
    """A file with entries of the log.

    Attributes:
        entry_count: entries of the log that are still in it.
    """

    file: SpillFile
    entry_count: int = 0


@dataclass(slots=True, eq=False)
class RowsEntry:
    """A batch.

    Attributes:
        row: offset of its first row.
        batch: None once it is in a file.
        number: of the batch in the file.
    """

    row: int
    rows: int
    size_bytes: int
    batch: pa.RecordBatch | None
    file: LogFile | None = None
    number: int = 0
    is_writing: bool = False
    is_dropped: bool = False

    @property
    def end_row(self) -> int:
        """Offset of the row behind its last."""
        return self.row + self.rows


@dataclass(slots=True, eq=False)
class ControlEntry:
    """A control element; ``row`` is the offset of the row it stands before."""

    row: int
    element: ControlElement


Entry = RowsEntry | ControlEntry


@dataclass(slots=True, eq=False)
class SpillRun:
    """Consecutive batches that are being written."""

    first_row: int
    sequence: int
    entries: list[RowsEntry]
    batches: list[pa.RecordBatch] = field(default_factory=list)
    size_bytes: int = 0


class SubpartitionLog:
    """Entries of one subpartition.

    Args:
        first_row: offset of the first row that will be appended.

    Example: what is before the barrier of a checkpoint that is complete need not be kept.
        >>> log = SubpartitionLog()
        >>> for rows in (3, 2):
        ...     log.append_batch(pa.record_batch({"n": range(rows)}), size_bytes=8 * rows)
        ...     log.mark(checkpoint_id=rows)
        >>> log.index_of(row=3), log.completed(checkpoint_id=3)
        (1, 1)
        >>> log.drop(1)
        []
        >>> log.first_row, log.end_row, log.memory_bytes
        (3, 5, 16)
    """

    def __init__(self, first_row: int = 0) -> None:
        self.first_row_of_all = first_row
        self.first_row = first_row
        self.end_row = first_row
        self.first_index = 0
        self.memory_bytes = 0
        self.spillable_bytes = 0
        self._entries: list[Entry] = []
        self._spilled_index = 0  # every batch before it is in a file or being written
        self._next_sequence = 0
        self._run: SpillRun | None = None
        self._files: list[LogFile] = []
        self._marks: dict[int, int] = {}
        self._watermark: Watermark | None = None
        self._status: StreamStatus | None = None

    @property
    def end_index(self) -> int:
        """Index of the entry that will be appended next."""
        return self.first_index + len(self._entries)

    @property
    def is_writing(self) -> bool:
        """True while a run is being written."""
        return self._run is not None

    def entry(self, index: int) -> Entry:
        """An entry that is still there."""
        return self._entries[index - self.first_index]

    def entries(self) -> Sequence[Entry]:
        """All that are still there."""
        return self._entries

    # ------------------------------------------------------------ appending

    def append_batch(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        """A batch with at least one row.

        It counts as a byte at least: whether rows are in memory is told from their bytes, and nulls without a type
        have none.
        """
        rows = batch.num_rows
        size_bytes = max(1, size_bytes)
        self._entries.append(RowsEntry(self.end_row, rows, size_bytes, batch))
        self.end_row += rows
        self.memory_bytes += size_bytes
        self.spillable_bytes += size_bytes

    def append_files(self, rows: Sequence[int]) -> SpillRun:
        """Rows that are in files of their own, at least one in each, which ``written`` tells of."""
        assert self._run is None, "what is being written comes first"
        entries = []
        for count in rows:
            entries.append(RowsEntry(self.end_row, count, 0, None, is_writing=True))
            self.end_row += count
        self._entries += entries
        self._spilled_index = self.end_index
        self._run = SpillRun(entries[0].row, self._next_sequence, entries)
        return self._run

    def append_control(self, element: ControlElement) -> bool:
        """A control element; True when it took the place of the last entry, a watermark too."""
        entries = self._entries
        if entries and isinstance(element, Watermark) and element.takes_place:
            last = entries[-1]
            if isinstance(last, ControlEntry) and isinstance(last.element, Watermark):
                last.element = element
                return True
        entries.append(ControlEntry(self.end_row, element))
        return False

    def skip(self, rows: int) -> None:
        """Counts rows that nobody will read; nothing is kept."""
        self.end_row += rows
        self.first_row = self.end_row

    # ------------------------------------------------------------ checkpoints

    def mark(self, checkpoint_id: int) -> None:
        """The last entry is the barrier of a checkpoint."""
        self._marks[checkpoint_id] = self.end_index

    def is_pending(self, checkpoint_id: int) -> bool:
        """True between a checkpoint's barrier and its end."""
        return checkpoint_id in self._marks

    def completed(self, checkpoint_id: int) -> int:
        """A checkpoint is complete; returns the index before which nothing is needed any more."""
        index = self._marks.get(checkpoint_id, self.first_index)
        for older in [known for known in self._marks if known <= checkpoint_id]:
            del self._marks[older]
        return index

    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete; its barrier stays where it is."""
        self._marks.pop(checkpoint_id, None)

    # ------------------------------------------------------------ reading

    def index_of(self, row: int) -> int:
        """Index of the first entry that somebody needs who has all rows before ``row``."""

        def is_needed(entry: Entry) -> bool:
            return (entry.end_row > row) if isinstance(entry, RowsEntry) else entry.row >= row

        return self.first_index + bisect.bisect_left(self._entries, True, key=is_needed)

    def state_before(self, index: int) -> list[ControlElement]:
        """The watermark and the status that hold before an entry, as far as there are any."""
        watermark, status = self._watermark, self._status
        for entry in self._entries[: index - self.first_index]:
            if isinstance(entry, ControlEntry):
                watermark, status = _state_behind(entry.element, watermark, status)
        return [element for element in (watermark, status) if element is not None]

    @property
    def files(self) -> Sequence[LogFile]:
        """The files with entries of the log, in order."""
        return self._files

    def files_from(self, file: LogFile, count: int) -> Sequence[LogFile]:
        """The file and those behind it, ``count`` at most."""
        start = bisect.bisect_left(
            self._files, file.file.sequence, key=lambda known: known.file.sequence
        )
        return self._files[start : start + count]

    # ------------------------------------------------------------ leaving

    def drop(self, index: int) -> list[LogFile]:
        """Drops the entries before ``index``; returns the files that have none left."""
        count = index - self.first_index
        files = []
        for entry in self._entries[:count]:
            if isinstance(entry, ControlEntry):
                self._watermark, self._status = _state_behind(
                    entry.element, self._watermark, self._status
                )
                continue
            entry.is_dropped = True
            self.first_row = entry.end_row
            if entry.file is not None:
                entry.file.entry_count -= 1
                if not entry.file.entry_count:
                    files.append(entry.file)
            elif not entry.is_writing:
                self.memory_bytes -= entry.size_bytes
                self.spillable_bytes -= entry.size_bytes
        del self._entries[:count]
        self.first_index += count
        self._spilled_index = max(self._spilled_index, self.first_index)
        del self._files[: len(files)]  # they empty in order
        return files

    def oldest_batch_end(self, limit: int) -> int | None:
        """Index behind the oldest batch, where that is not beyond ``limit``; None = there is none."""
        for index, entry in enumerate(self._entries, self.first_index):
            if index >= limit:
                return None
            if isinstance(entry, RowsEntry):
                return index + 1
        return None

    # ------------------------------------------------------------ spilling

    def begin_run(self, bytes_max: int) -> SpillRun | None:
        """Takes the oldest batches in memory, at least one, to be written; None = there is none."""
        assert self._run is None, "a subpartition writes one run at a time"
        run = SpillRun(self.end_row, self._next_sequence, [])
        index = self._spilled_index
        while index < self.end_index:
            entry = self.entry(index)
            if isinstance(entry, RowsEntry) and entry.file is None:
                if run.entries and run.size_bytes + entry.size_bytes > bytes_max:
                    break
                assert entry.batch is not None, "a batch behind those in files is in memory"
                entry.is_writing = True
                run.first_row = min(run.first_row, entry.row)
                run.entries.append(entry)
                run.batches.append(entry.batch)
                run.size_bytes += entry.size_bytes
            index += 1
        if not run.entries:
            return None
        self._spilled_index = index
        self.spillable_bytes -= run.size_bytes
        self._run = run
        return run

    def written(self, run: SpillRun, files: Sequence[tuple[SpillFile, int]]) -> list[LogFile]:
        """A run is in files (each with its number of batches); returns those that nobody needs."""
        assert run is self._run, "this run is not being written"
        self._run = None
        self._next_sequence = files[-1][0].sequence + 1
        self.memory_bytes -= run.size_bytes
        entries = iter(run.entries)
        unneeded = []
        for file, count in files:
            log_file = LogFile(file)
            for number in range(count):
                entry = next(entries)
                entry.batch = None
                entry.is_writing = False
                if not entry.is_dropped:
                    entry.file, entry.number = log_file, number
                    log_file.entry_count += 1
            if log_file.entry_count:
                self._files.append(log_file)
            else:
                unneeded.append(log_file)
        return unneeded

    def abandoned(self, run: SpillRun) -> None:
        """A run could not be written: its batches are in memory as before."""
        assert run is self._run, "this run is not being written"
        self._run = None
        self._spilled_index = self.first_index
        for entry in run.entries:
            entry.is_writing = False
            if entry.is_dropped:
                self.memory_bytes -= entry.size_bytes
            else:
                self.spillable_bytes += entry.size_bytes


def _state_behind(
    element: ControlElement, watermark: Watermark | None, status: StreamStatus | None
) -> tuple[Watermark | None, StreamStatus | None]:
    if isinstance(element, Watermark):
        return element, status
    if isinstance(element, StreamStatus):
        return watermark, element
    return watermark, status
