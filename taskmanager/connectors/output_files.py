"""The files of a file sink while they are hidden: their names, and how they become safe on an I/O thread.

A file is ``.part-...inprogress`` while rows are added and ``.part-...pending`` once it is complete and
synced. ``PreparedFiles`` takes files on the mailbox thread, which never waits there, and completes them
on I/O threads.

Invariants:
- rows go to a file only until it is handed over;
- files are completed in the order in which they were handed over, each once: when ``finish`` returns, all
  that was handed over up to its mark is safe, whichever thread has done it;
- after a failure, and after ``close``, no ``finish`` succeeds any more.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.errors import StreamError
from taskmanager.connectors.file_encoders import FileEncoder


@dataclass(slots=True)
class OutputFile:
    """A hidden file.

    Attributes:
        path: its name while rows are added.
        pending_path: its name once it is complete.
        final_path: its name once it is committed.
        directories: its own and those above it that may have been made for it: names in them must be made
            safe too.
        created_ms: when the first row came.
        written_ms: when the last row came.
    """

    path: Path
    pending_path: Path
    final_path: Path
    directories: set[Path]
    file: BinaryIO
    encoder: FileEncoder
    created_ms: int | None = None
    written_ms: int = 0
    was_written: bool = True
    is_complete: bool = False

    @property
    def size_bytes(self) -> int:
        """What it has so far, rows that are not encoded yet included."""
        return self.file.tell() + self.encoder.buffered_bytes

    def complete(self) -> None:
        """Encodes what is left and makes the content safe.

        Raises:
            OSError: there is no room, for example.
        """
        self.encoder.finish()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.path.rename(self.pending_path)
        self.is_complete = True

    def remove(self) -> None:
        """Gives it up, in whatever state it is."""
        self.encoder.abandon()
        with suppress(OSError):
            # Its content is given up; a full disk must not stand in the way of removing it.
            self.file.close()
        self.path.unlink(missing_ok=True)
        self.pending_path.unlink(missing_ok=True)


class FilesGivenUpError(StreamError):
    """The attempt ends before its files are safe: what covers them does not count."""


class PreparedFiles:
    """Files that the next ``finish`` makes safe.

    Args:
        complete: completes one file; I/O thread.
        sync: makes the names in a directory safe; I/O thread.
    """

    def __init__(
        self, complete: Callable[[OutputFile], None], sync: Callable[[Path], None]
    ) -> None:
        self._complete = complete
        self._sync = sync
        self._files: deque[tuple[int, OutputFile]] = deque()
        self._unsynced: set[Path] = set()
        self._mark = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_closed = False

    def add(self, file: OutputFile) -> None:
        """Hands a file over, complete or not."""
        self._mark += 1
        self._files.append((self._mark, file))

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
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise FilesGivenUpError("the attempt has ended before its output files were safe")
            try:
                if self._files and self._files[0][0] <= mark:
                    file = self._files[0][1]
                    if not file.is_complete:
                        self._complete(file)
                    self._unsynced |= file.directories
                    self._files.popleft()
                elif self._unsynced:
                    directory = next(iter(self._unsynced))
                    self._sync(directory)
                    self._unsynced.discard(directory)
                else:
                    return False
            except BaseException as error:
                self._failure = error
                raise
            return True

    def close(self) -> list[OutputFile]:
        """Lets no ``finish`` succeed any more; returns the files that none has made safe."""
        with self._lock:
            self._is_closed = True
            left = [file for _, file in self._files]
            self._files.clear()
            return left


def sync_directory(directory: Path) -> None:
    """Makes names in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hidden_files(directory: Path, tag: str) -> Iterator[tuple[Path, int, int]]:
    """The hidden files of a sink: (path, subtask index, attempt) each.

    Args:
        directory: searched to the bottom; directories that vanish meanwhile are passed over.
        tag: stands for job and sink in names.

    Raises:
        OSError: a directory cannot be read.
    """
    pattern = re.compile(
        rf"\.part-{re.escape(tag)}-(\d+)-(\d+)(-.*\.(inprogress|pending)|\.probe)", re.DOTALL
    )
    for parent, _, names in os.walk(directory, onerror=_raise_unless_gone):
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                yield Path(parent, name), int(match[1]), int(match[2])


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
