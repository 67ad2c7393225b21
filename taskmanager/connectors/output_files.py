"""The files of a file sink while they are hidden: their names, and how they become safe on an I/O thread.

A file is ``.part-...inprogress`` while rows are added and ``.part-...pending`` once it is complete and
synced. Rows may be held in memory until it is *started*: then only it is there. ``PreparedFiles`` takes
files on the mailbox thread and completes them on I/O threads; the mailbox thread completes files itself
where more of them would wait than ``limit`` allows.

Invariants:
- rows go to a file only until it is handed over;
- files are completed in the order in which they were handed over, each once: when the work asked for
  returns, all that was handed over before is safe, whichever thread has done it;
- after a failure, and after ``close``, no such work succeeds any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from penstock.errors import StreamError
from taskmanager.connectors.file_encoders import FileEncoder, copied
from taskmanager.connectors.output_place import FileNames, HiddenFile

SLICE_BYTES = 1024
"""Rows held in memory count as so much more, whatever is in them."""


@dataclass(slots=True)
class OutputFile:
    """A hidden file.

    Attributes:
        names: it has, one after the other.
        held: rows that came before it was started.
        held_bytes: size of these.
        created_ms: when the first row came.
        written_ms: when the last row came.
        complete_bytes: size of the file, once it is complete.
        checksum, etag: of it then.
    """

    names: FileNames
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0
    created_ms: int | None = None
    written_ms: int = 0
    was_written: bool = True
    is_complete: bool = False
    complete_bytes: int = 0
    checksum: int = 0
    etag: str = ""
    _file: HiddenFile | None = None
    _encoder: FileEncoder | None = None

    @property
    def is_started(self) -> bool:
        """It is there, and open."""
        return self._encoder is not None

    @property
    def buffered_bytes(self) -> int:
        """Size of what is in memory."""
        return self._row_bytes + (0 if self._file is None else self._file.unsent_bytes)

    @property
    def _row_bytes(self) -> int:
        """Size of the rows that are not encoded yet."""
        return self.held_bytes if self._encoder is None else self._encoder.buffered_bytes

    @property
    def size_bytes(self) -> int:
        """What it has so far, rows that are not encoded yet included."""
        return self._row_bytes + (0 if self._file is None else self._file.stream.tell())

    def write(self, rows: pa.RecordBatch) -> None:
        """Takes rows.

        Raises:
            OSError: there is no room, for example.
        """
        if self._encoder is None:
            self.held.append(rows)
            self.held_bytes += rows.nbytes + SLICE_BYTES
        else:
            self._encoder.write(rows)

    def start(self, file: HiddenFile, encoder: FileEncoder) -> None:
        """Goes on in a file: the rows held go there.

        Raises:
            OSError: there is no room, for example.
        """
        self._file, self._encoder = file, encoder
        held, self.held, self.held_bytes = self.held, [], 0
        for rows in held:
            encoder.write(rows)

    def let_go(self) -> None:
        """Lets go of the batches that the rows in memory were cut out of."""
        if self._encoder is not None:
            self._encoder.let_go()
        elif self.held and self.held[0].num_columns:
            self.held = copied(self.held)
            self.held_bytes = sum(rows.nbytes for rows in self.held) + SLICE_BYTES

    def shrink(self) -> bool:
        """Lets go of what is in memory, as far as that can be; returns whether it is less now. It is started."""
        assert self._encoder is not None, "it is started"
        assert self._file is not None, "it is started"
        before = self.buffered_bytes
        self._encoder.encode_buffered()
        self._file.send()
        return self.buffered_bytes < before

    def complete(self) -> None:
        """Encodes what is left and makes the content safe; it is started.

        Raises:
            OSError: there is no room, for example.
        """
        assert self._encoder is not None, "it is started"
        assert self._file is not None, "it is started"
        self._encoder.finish()
        self.complete_bytes = self._file.stream.tell()
        self.checksum = self._file.checksum
        self._file.complete()
        self.etag = self._file.etag
        self._encoder = None
        self.is_complete = True

    def remove(self) -> None:
        """Gives it up, in whatever state it is."""
        self.held, self.held_bytes = [], 0
        self._abandon_encoder()
        if self._file is not None:
            self._file.remove()

    def release(self) -> None:
        """Closes it as it is: nothing is written to it any more."""
        self.held, self.held_bytes = [], 0
        self._abandon_encoder()
        if self._file is not None and not self.is_complete:
            self._file.release()

    def _abandon_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.abandon()


class FilesGivenUpError(StreamError):
    """The attempt ends before its files are safe: what covers them does not count."""


class PreparedFiles:
    """Files that wait for being made safe.

    Args:
        complete: starts one file where it is not, and completes it; I/O thread.
        sync: makes the names in a directory safe; I/O thread.
    """

    def __init__(
        self, complete: Callable[[OutputFile], None], sync: Callable[[Path], None]
    ) -> None:
        self._complete = complete
        self._sync = sync
        self._files: deque[tuple[int, OutputFile, int, bool]] = deque()
        self._unsynced: set[Path] = set()
        self._mark = 0
        # Handed over: changed by the mailbox thread. Completed: changed with the lock held.
        self._added_bytes = self._added_open = 0
        self._done_bytes = self._done_open = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_closed = False

    def add(self, file: OutputFile) -> None:
        """Hands a file over."""
        self._mark += 1
        bytes_ = file.buffered_bytes + SLICE_BYTES
        is_open = file.is_started
        self._added_bytes += bytes_
        self._added_open += is_open
        self._files.append((self._mark, file, bytes_, is_open))

    def limit(self, open_max: int, bytes_max: int) -> None:
        """Completes files, the first ones first, until no more wait than may.

        Args:
            open_max: of those that were started when they were handed over.
            bytes_max: of rows that were not encoded then.
        """
        while (
            self._added_open - self._done_open > open_max
            or self._added_bytes - self._done_bytes > bytes_max
        ):
            with self._lock:
                if not self._check_and_complete(self._mark):
                    return

    @property
    def work(self) -> Callable[[], None] | None:
        """What makes all that was handed over so far safe, None where it is already; any thread."""
        if not self._files and not self._unsynced and self._failure is None:
            return None
        mark = self._mark
        return lambda: self._finish(mark)

    def _finish(self, mark: int) -> None:
        while self._step(mark):
            # The lock is free in between: closing need not wait for all of it.
            pass

    def _step(self, mark: int) -> bool:
        with self._lock:
            if self._check_and_complete(mark):
                return True
            if not self._unsynced:
                return False
            directory = next(iter(self._unsynced))
            with self._noting_failure():
                self._sync(directory)
            self._unsynced.discard(directory)
            return True

    def _check_and_complete(self, mark: int) -> bool:
        """Completes the first file, if it was handed over up to the mark; the lock is held."""
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise FilesGivenUpError("the attempt has ended before its output files were safe")
        if not self._files or self._files[0][0] > mark:
            return False
        _, file, bytes_, is_open = self._files[0]
        with self._noting_failure():
            self._complete(file)
        self._unsynced |= file.names.directories
        self._files.popleft()
        self._done_bytes += bytes_
        self._done_open += is_open
        return True

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def take(self, pending: Collection[str]) -> list[OutputFile]:
        """Takes back files that no work has made safe; no thread is at them any more.

        Args:
            pending: names of these; others are left alone.
        """
        with self._lock:
            taken = [one for one in self._files if one[1].names.pending in pending]
            self._files = deque(one for one in self._files if one[1].names.pending not in pending)
            self._done_bytes += sum(bytes_ for _, _, bytes_, _ in taken)
            self._done_open += sum(is_open for _, _, _, is_open in taken)
            return [file for _, file, _, _ in taken]

    def close(self) -> list[OutputFile]:
        """Lets no work succeed any more; returns the files that none has made safe."""
        with self._lock:
            self._is_closed = True
            left = [file for _, file, _, _ in self._files]
            self._files.clear()
            return left
