"""Collected rows that wait, in temporary files that end with the process: for a checkpoint in the JobManager, for their
reader in the client.

Writes and reads go to the page cache for the most part, in pieces of about a megabyte: the JobManager makes them on
its event loop. Invariants: a file is given back when nothing in it is needed any more; all but the
newest are at most a piece longer than ``FILE_BYTES``.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import IO

from penstock.errors import StoreTransient

FILE_BYTES = 32 * 1024 * 1024
_OFFSET_BITS = 40


@dataclass(slots=True)
class _File:
    file: IO[bytes]
    size_bytes: int = 0
    live_count: int = 0


class SpillStore:
    """Unnamed files, made as they are needed."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._newest = 0

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self._files.values())

    def put(self, data: bytes) -> int:
        """Keeps bytes; returns where they are.

        Raises:
            StoreTransient: they cannot be written; what was kept before is there.
        """
        try:
            file = self._writable()
            view, offset = memoryview(data), file.size_bytes
            while view:
                written = os.pwrite(file.file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise StoreTransient(
                f"collected rows cannot be written to {tempfile.gettempdir()}: {error.strerror}"
            ) from error
        where = self._newest << _OFFSET_BITS | file.size_bytes
        file.size_bytes += len(data)
        file.live_count += 1
        return where

    def read(self, where: int, size_bytes: int) -> bytes:
        """Bytes that were kept."""
        number, offset = where >> _OFFSET_BITS, where & (1 << _OFFSET_BITS) - 1
        data = os.pread(self._files[number].file.fileno(), size_bytes, offset)
        assert len(data) == size_bytes, "what was written can be read"
        return data

    def take(self, where: int, size_bytes: int) -> bytes:
        """Bytes that were kept, for the last time."""
        data = self.read(where, size_bytes)
        self.drop(where)
        return data

    def drop(self, where: int) -> None:
        """Bytes are not needed any more."""
        number = where >> _OFFSET_BITS
        file = self._files[number]
        file.live_count -= 1
        if not file.live_count:
            file.file.close()
            del self._files[number]

    def clear(self) -> None:
        """Nothing is needed any more."""
        for file in self._files.values():
            file.file.close()
        self._files.clear()

    def _writable(self) -> _File:
        file = self._files.get(self._newest)
        if file is None or file.size_bytes >= FILE_BYTES:
            self._newest += 1
            unnamed = tempfile.TemporaryFile(prefix="penstock-results-", buffering=0)  # noqa: SIM115 - closed when nothing in it is needed
            file = _File(unnamed)
            self._files[self._newest] = file
        return file
