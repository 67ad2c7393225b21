"""Where a file sink's output goes: what a directory and a prefix on S3 each do in their way.

A file has a *hidden* name while rows are added, a *pending* one once it is complete and safe, and a *final* one once it
is committed; a savepoint that names it gives it a *held* one besides. Names are whole: a local path or ``s3://...``.
"""

from __future__ import annotations

import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from typing_extensions import Buffer, override

from penstock.connectors.sink import SinkContext


@dataclass(frozen=True, slots=True)
class FileNames:
    """The names of one file.

    Attributes:
        directories: that may have been made for it: names in them must be made safe too.
    """

    hidden: str
    pending: str
    final: str
    directories: frozenset[Path] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A pending or held file that is there.

    Attributes:
        etag: see ``HiddenFile``.
    """

    size_bytes: int
    etag: str = ""


class _CheckedStream(io.RawIOBase):
    """Takes the checksum of what is written."""

    def __init__(self, write: Callable[[Buffer], int], tell: Callable[[], int]) -> None:
        self._write = write
        self._tell = tell
        self.checksum = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Buffer) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._write(data)

    @override
    def tell(self) -> int:
        return self._tell()


class HiddenFile(ABC):
    """A file that rows are added to.

    Args:
        write: adds bytes to it.
        tell: how many there are.

    Attributes:
        stream: takes its bytes.
    """

    def __init__(self, write: Callable[[Buffer], int], tell: Callable[[], int]) -> None:
        self._checked = _CheckedStream(write, tell)
        self.stream = cast("BinaryIO", self._checked)

    @property
    def checksum(self) -> int:
        """CRC-32 of what was written."""
        return self._checked.checksum

    @property
    def etag(self) -> str:
        """What the server calls this content under this name, once the file is complete; "" = there is no server."""
        return ""

    @property
    def unsent_bytes(self) -> int:
        """What of it is in memory."""
        return 0

    def send(self) -> None:
        """Lets go of as much of that as can go."""

    @abstractmethod
    def complete(self) -> None:
        """It has all its bytes: makes them safe, under its pending name."""

    @abstractmethod
    def release(self) -> None:
        """Closes it as it is: nothing is written to it any more."""

    @abstractmethod
    def remove(self) -> None:
        """Gives it up, in whatever state it is."""


class OutputPlace(ABC):
    """The place of one sink, for one attempt of a subtask.

    Raises:
        OSError: of any method: something cannot be written.
        StoreTransient: the same, on S3.
    """

    @abstractmethod
    def open(self, context: SinkContext) -> None:
        """Makes the place; says now, rather than with the first rows, that it cannot be written."""

    @abstractmethod
    def names(self, directory: str, number: int, extension: str) -> FileNames:
        """The names of a new file.

        Args:
            directory: ``key=value`` directories, "" = none.
            number: of the attempt's own.
        """

    @abstractmethod
    def create(self, names: FileNames) -> HiddenFile:
        """Makes it."""

    @abstractmethod
    def sync(self, directory: Path) -> None:
        """Makes names in a directory safe."""

    @abstractmethod
    def commit(self, pairs: Sequence[tuple[str, str]], *, is_repeated: bool) -> list[str]:
        """Gives files their final names; repeatable.

        Args:
            pairs: (pending or held, final) names.
            is_repeated: it may have been done before, in part.

        Returns:
            Final names of those that are gone under both.
        """

    @abstractmethod
    def found(self, names: Collection[str]) -> Mapping[str, FoundFile]:
        """Pending or held files, as far as they are there."""

    @abstractmethod
    def checksum(self, name: str) -> int:
        """CRC-32 of a pending or held file that is there, all of which is read."""

    @abstractmethod
    def held_name(self, pending: str, final: str, savepoint_id: int) -> str:
        """The name that a savepoint gives a file."""

    @abstractmethod
    def keep_held(self, pending: str, final: str, savepoint_id: int) -> None:
        """The file gets that name besides, whether it has been committed meanwhile or not."""

    @abstractmethod
    def let_go(self, pending: str, final: str, savepoint_id: int) -> None:
        """It loses it; repeatable."""

    @abstractmethod
    def remove_pending(self, names: Collection[str]) -> None:
        """Nobody will ever commit them; repeatable."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Removes what earlier attempts of this subtask have not committed, and those of subtasks that are no more."""

    def remove_made(self) -> None:
        """What was made for files, none of which has been committed, goes where nothing is in it."""
