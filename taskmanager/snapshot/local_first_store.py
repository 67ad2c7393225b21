"""Reads snapshots from the TaskManager's own disk where an undamaged copy is there, else from the store."""

from __future__ import annotations

import itertools
import os
import shutil
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from typing_extensions import override

from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import HandleRange, SnapshotReader
from taskmanager.snapshot.local_copies_store import LocalCopies

_READ_BYTES: Final = 4 << 20


class LocalFirstReader(SnapshotReader):
    """A copy counts where size and checksum are those that the checkpoint's manifest has; each is looked at
    once. Files with checksums of their own (``fetch_all``) count by their size, so that nothing is read before it
    is asked for; what turns out to be damaged is then no copy any more. May be used from any thread.

    Args:
        store: reads everything else.
        copies: of the job; None = there are none.

    Attributes:
        local_bytes: read from copies.
        store_bytes: read from the checkpoint store.
    """

    def __init__(self, store: SnapshotReader, copies: LocalCopies | None) -> None:
        self.local_bytes = 0
        self.store_bytes = 0
        self._store = store
        self._copies = copies
        self._undamaged: dict[tuple[str, int], Path | None] = {}
        self._unread: dict[Path, checkpoint_pb2.StateHandle] = {}

    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        path = self._file_of(handle)
        content = None if path is None else _part(path, 0, handle.size_bytes)
        if content is not None and zlib.crc32(content) == handle.checksum:
            self.local_bytes += len(content)
            return content
        self._count_store(handle, handle.size_bytes)
        return self._store.read(handle)

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        path = self._copy(handle)
        if path is not None and 0 <= offset <= offset + size_bytes <= handle.size_bytes:
            content = _part(path, offset, size_bytes)
            if content is not None:
                self.local_bytes += size_bytes
                return content
        self._count_store(handle, size_bytes)
        return self._store.read_range(handle, offset, size_bytes)

    @override
    def read_ranges(self, wanted: Iterable[HandleRange]) -> Generator[bytes]:
        for path, group in itertools.groupby(wanted, lambda one: self._copy(one[0])):
            if path is None:
                yield from self._store.read_ranges(self._counted(group))
            else:
                yield from (self.read_range(*one) for one in group)

    @override
    def fetch(self, handle: checkpoint_pb2.StateHandle, target: Path) -> None:
        path = self._copy(handle)
        if path is not None and _take(path, target):
            self.local_bytes += handle.size_bytes
            return
        self._count_store(handle, handle.size_bytes)
        self._store.fetch(handle, target)

    @override
    def fetch_all(self, wanted: Mapping[Path, checkpoint_pb2.StateHandle]) -> None:
        missing: dict[Path, checkpoint_pb2.StateHandle] = {}
        for target, handle in wanted.items():
            path = self._file_of(handle)
            if path is not None and _has_size(path, handle.size_bytes) and _take(path, target):
                self.local_bytes += 0 if path in self._unread else handle.size_bytes
                self._unread[path] = handle
            else:
                self._count_store(handle, handle.size_bytes)
                missing[target] = handle
        self._store.fetch_all(missing)

    @override
    def remove_damaged(self) -> bool:
        damaged = [
            path
            for path, handle in self._unread.items()
            if path.exists() and not _matches(path, handle)
        ]
        for path in damaged:
            path.unlink(missing_ok=True)
            self.local_bytes -= self._unread.pop(path).size_bytes
        return bool(damaged)

    def _counted(self, wanted: Iterable[HandleRange]) -> Iterator[HandleRange]:
        """What is read from the store, counted as it is asked for."""
        for one in wanted:
            self._count_store(one[0], one[2])
            yield one

    def _count_store(self, handle: checkpoint_pb2.StateHandle, size_bytes: int) -> None:
        if handle.path:
            self.store_bytes += size_bytes

    def _copy(self, handle: checkpoint_pb2.StateHandle) -> Path | None:
        """The copy of a blob, where it is what was written."""
        place = handle.path, handle.offset
        if place not in self._undamaged:
            path = self._file_of(handle)
            self._undamaged[place] = path if path is not None and _matches(path, handle) else None
        return self._undamaged[place]

    def _file_of(self, handle: checkpoint_pb2.StateHandle) -> Path | None:
        """Where the copy of a blob would be; None = it is no file of the job itself, of others there are none."""
        if self._copies is None or not handle.path or handle.store:
            return None
        return self._copies.file_of(handle)


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def _matches(path: Path, handle: checkpoint_pb2.StateHandle) -> bool:
    size, checksum = 0, 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
    except OSError:
        return False
    return size == handle.size_bytes and checksum == handle.checksum


def _take(path: Path, target: Path) -> bool:
    """Makes a file of a copy; False = the copy is gone, or cannot be read."""
    try:
        os.link(path, target)
    except OSError:  # another file system
        try:
            shutil.copyfile(path, target)
        except OSError:
            target.unlink(missing_ok=True)
            return False
    return True


def _part(path: Path, offset: int, size_bytes: int) -> bytes | None:
    """Part of a copy; None = it is gone, or shorter than it was."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(size_bytes)
    except OSError:
        return None
    return content if len(content) == size_bytes else None
