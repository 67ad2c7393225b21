"""Whether a file is still the one that its rows were read from.

A position carries a mark: which version of the file was read (times of the last changes and inode; the
second time cannot be set back), and a checksum of what was read before it. Another version is no proof: each host may have a copy of its own,
and a file may have been touched or have grown. Then the checksum decides. An object's version is its ETag. It is also asked at the end of a
split whose file changed while it was read, so that the rows of a split are rows of one content.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.compacted import replaced_place
from penstock.connectors.messages import os_reason
from penstock.errors import TaskFailure, Unrecoverable

CHUNK_BYTES = 1 << 20

_NS_PER_MS = 1_000_000
_CLOCK_SKEW_MS = 1_000

_MARK = struct.Struct("<IH")
_PENDING_MAX = 16

IN_PARTS = (
    "it is read in parts, and whether what was read of the others is still in it cannot be told"
)

Submit = Callable[[Callable[[], int]], Future[int]]


def checksum_of(read: Callable[[int, int], bytes], start: int, end: int, checksum: int = 0) -> int:
    """CRC-32 of a stretch of what ``read`` gives, as far as that goes, behind what ``checksum`` is of."""
    while start < end:
        data = read(start, min(CHUNK_BYTES, end - start))
        if not data:
            break
        checksum = zlib.crc32(data, checksum)
        start += len(data)
    return checksum


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a position says about its file.

    Attributes:
        version: of the file that was read, "" = not known.
        checksum: of what was read of the split, 32 bits, as its reader takes it.
    """

    version: str
    checksum: int

    def encode(self, place: bytes) -> bytes:
        """A position: the mark, then the place in the reader's own bytes."""
        version = self.version.encode()
        return _MARK.pack(self.checksum, len(version)) + version + place

    @staticmethod
    def decode(position: bytes, place_bytes: int) -> tuple[FileMark | None, bytes]:
        """Inverse of ``encode``; no mark where there is only a place, as there was none once."""
        if len(position) == place_bytes:
            return None, position
        checksum, length = _MARK.unpack_from(position)
        end = _MARK.size + length
        return FileMark(position[_MARK.size : end].decode(), checksum), position[end:]


def file_version(modified_ns: int, changed_ns: int, inode: int) -> str:
    """The version of a file."""
    return f"{modified_ns}:{changed_ns}:{inode}"


class OpenedFile(ABC):
    """A file that is open for reading by position, and the version of it that was opened.

    Attributes:
        path: its name.
        version: of what was opened.
        is_known_by_version: another version is another content, so no checksum has to tell.
    """

    path: str
    version: str
    is_known_by_version: bool = False

    @abstractmethod
    def _version_now(self) -> str: ...

    @abstractmethod
    def is_another_file(self, version: str) -> bool:
        """Whether it is not the file of that version, changed or not."""

    @abstractmethod
    def size(self) -> int:
        """Bytes in it now."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the file.

        Raises:
            TaskFailure: they cannot be read.
            Unrecoverable: it has been replaced, and what was opened is not there any more.
        """

    def checksum(self, start: int, end: int, checksum: int = 0) -> int:
        """CRC-32 of a stretch of the file, behind what ``checksum`` is of."""
        return checksum_of(self.read, start, end, checksum)

    def check_resumed(self, mark: FileMark | None, checksum: Callable[[], int]) -> None:
        """Refuses to go on in a file of another content than was read before the position.

        Args:
            mark: of the position.
            checksum: of what lies before the position in the file that is there now.

        Raises:
            Unrecoverable: it is another content.
        """
        if mark is None or mark.version == self.version:
            return
        if checksum() != mark.checksum:
            raise replaced(self.path)

    @abstractmethod
    def check_part(self, version: str, host: str, found_ms: int) -> None:
        """Refuses to read a part of a file, without a checksum of that part, in another file.

        What was read of the other parts cannot be compared here. So it must be the file that was
        found, or another host's copy of it that has not changed since.

        Args:
            version: of the file that was found.
            host: where it was found.
            found_ms: when.

        Raises:
            Unrecoverable: it may be another content.
        """

    def check_read(self, expected: Callable[[], int], checksum: Callable[[], int]) -> None:
        """As ``check_resumed``, for what has been read of it while it was open."""
        if self._version_now() != self.version and checksum() != expected():
            raise replaced(self.path)

    @abstractmethod
    def check_untouched(self) -> None:
        """As ``check_read``, where nobody has summed what was read.

        Raises:
            Unrecoverable: it was written to, or something else of it was set.
        """

    @abstractmethod
    def stream(self) -> BinaryIO:
        """The file for those who read streams; to be closed apart."""

    @abstractmethod
    def arrow_file(self) -> pa.NativeFile:
        """The file for Arrow, without a copy of its bytes where that can be; to be closed apart.

        Raises:
            OSError: it cannot be read.
            pa.ArrowInvalid: it is empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""


class LocalFile(OpenedFile):
    """A file of this machine.

    Raises:
        TaskFailure: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_moved = False
        try:
            self._file = self._open()
        except OSError as error:
            raise TaskFailure(
                f"{path}: cannot be read on this TaskManager: {os_reason(error)}"
            ) from error
        self.version = self._version_now()

    def _open(self) -> io.FileIO:
        """The file; where it has been merged into another one meanwhile, from where it was moved to."""
        try:
            return io.FileIO(self.path)
        except FileNotFoundError as error:
            with suppress(FileNotFoundError):
                file = io.FileIO(replaced_place(self.path))
                self._is_moved = True
                return file
            raise error from None

    @override
    def _version_now(self) -> str:
        status = os.fstat(self._file.fileno())
        return file_version(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    @override
    def is_another_file(self, version: str) -> bool:
        return version.rpartition(":")[2] != self.version.rpartition(":")[2]

    @override
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @override
    def read(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            raise TaskFailure(f"{self.path}: cannot be read: {os_reason(error)}") from error

    @override
    def check_part(self, version: str, host: str, found_ms: int) -> None:
        if version == self.version or (self._is_moved and self._is_only_moved(version)):
            return
        changed_ms = os.fstat(self._file.fileno()).st_ctime_ns // _NS_PER_MS
        if host == this_host() or changed_ms > found_ms - _CLOCK_SKEW_MS:
            raise replaced(self.path, IN_PARTS)

    def _is_only_moved(self, version: str) -> bool:
        """Whether it is the file of that version but for when anything of it has changed, as moving it does."""
        modified, _, rest = self.version.partition(":")
        was_modified, _, was = version.partition(":")
        return modified == was_modified and rest.partition(":")[2] == was.partition(":")[2]

    @override
    def check_untouched(self) -> None:
        # That its name was given to another file, or taken away, changes nothing in what is open.
        modified, now = self.version.partition(":")[0], self._version_now()
        is_unlinked = not os.fstat(self._file.fileno()).st_nlink
        if now != self.version and not (is_unlinked and now.partition(":")[0] == modified):
            raise replaced(self.path)

    @override
    def stream(self) -> BinaryIO:
        return os.fdopen(os.dup(self._file.fileno()), "rb")

    @override
    def arrow_file(self) -> pa.NativeFile:
        # By its descriptor: this very file, whatever has got its name meanwhile.
        return pa.memory_map(f"/dev/fd/{self._file.fileno()}")

    @override
    def close(self) -> None:
        self._file.close()


def fold(checksum: int, piece: int) -> int:
    """The checksum of pieces, from that of those before and that of the next one."""
    return zlib.crc32(struct.pack("<I", piece), checksum)


class PieceChecksums:
    """The checksum of pieces that were read, each computed on an I/O thread.

    Args:
        submit: runs a function on an I/O thread.
        folded: of the pieces before.
    """

    def __init__(self, submit: Submit, folded: int = 0) -> None:
        self._submit = submit
        self._folded = folded
        self._pending: deque[tuple[Callable[[], int], Future[int]]] = deque()

    def add(self, piece: Callable[[], int]) -> None:
        """The next piece is being read."""
        self._pending.append((piece, self._submit(piece)))
        while self._pending and (self._pending[0][1].done() or len(self._pending) > _PENDING_MAX):
            self._take()

    def value(self) -> int:
        """Of all pieces so far; waits for those that are under way."""
        while self._pending:
            self._take()
        return self._folded

    def _take(self) -> None:
        piece, future = self._pending.popleft()
        # The I/O threads may be held by others, as by one who lists a directory: what has not begun there is done here.
        found = piece() if future.cancel() else future.result()
        self._folded = fold(self._folded, found)


def this_host() -> str:
    """The name of the host that this process runs on."""
    return socket.gethostname()


def replaced(
    path: str,
    why: str = "what was read of it before is not in it any more, so the rest would not belong to it",
) -> Unrecoverable:
    """The error of a file that is not what was read before."""
    return Unrecoverable(
        f"{path}: was replaced or changed while the job read it: {why}; put the file back as it was, or run the job anew. "
        "Files that are read must not change: write new ones under new names"
    )
