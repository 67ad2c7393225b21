"""Bytes on their way into a checkpoint: what a backend hands over, and who takes it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.pb import checkpoint_pb2


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that a snapshot is to contain.

    Attributes:
        name: unique within the snapshot of a subtask.
        chunks: makes the parts, in order; called once, on an I/O thread, when they are written, so
            that nothing large is held in memory.
    """

    name: str
    chunks: Callable[[], Iterable[bytes | memoryview]]


class SnapshotWriter(Protocol):
    """Writes the blobs of one subtask's snapshot: inline, or packed into one file with one fsync."""

    def write(self, blobs: Iterable[Blob]) -> Mapping[str, checkpoint_pb2.StateHandle]:
        """Writes all blobs of the subtask; called once, on an I/O thread.

        Returns:
            Per blob name where it is.

        Raises:
            StoreTransient: they cannot be written; nothing of them is left.
        """


class SnapshotCopy(Protocol):
    """Takes what is written into a snapshot file, a second time. Raises nothing."""

    def begin_blob(self, offset: int) -> None:
        """What is written next is the blob at this offset of the file."""

    def write(self, chunk: bytes | memoryview) -> None:
        """Goes on with the blob."""

    def commit(self) -> None:
        """The file is safe."""

    def abandon(self) -> None:
        """There is no such file."""


HandleRange = tuple[checkpoint_pb2.StateHandle, int, int]
"""Of the bytes of a handle: offset and size in bytes."""


class SnapshotReader(Protocol):
    """Reads what a ``SnapshotWriter`` has written."""

    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        """The bytes of a handle, checked against size and checksum.

        Raises:
            StoreNotFound: the file is gone.
            StoreCorrupt: it is not what was written.
            StoreTransient: it cannot be read now.
        """

    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        """A part of the bytes of a handle; not checked against the checksum."""

    def read_ranges(self, wanted: Iterable[HandleRange]) -> Generator[bytes]:
        """``read_range`` for several, in order; of those whose store is far away the next ones are on their way
        meanwhile, so that who checks and decodes them does not wait for each.

        Raises:
            StoreNotFound, StoreCorrupt, StoreTransient: as ``read_range``.
        """
        for one in wanted:
            yield self.read_range(*one)

    def fetch(self, handle: checkpoint_pb2.StateHandle, target: Path) -> None:
        """Puts the bytes of a handle, checked, into a file that is new and that nobody will change: it may
        be a second name of another file.

        Raises:
            StoreNotFound, StoreCorrupt, StoreTransient: as ``read``.
            OSError: the file cannot be written.
        """
        target.write_bytes(self.read(handle))

    def fetch_all(self, wanted: Mapping[Path, checkpoint_pb2.StateHandle]) -> None:
        """``fetch`` for many files whose parts have checksums of their own; several at once where their store is
        far away. Those of copies on the local disk are left to who reads them: see ``remove_damaged``.

        Raises:
            StoreNotFound, StoreCorrupt, StoreTransient, OSError: of any of them; others may be there.
        """
        for target, handle in wanted.items():
            self.fetch(handle, target)

    def remove_damaged(self) -> bool:
        """Removes the copies among what ``fetch_all`` gave that are not what was written: the store has it.

        Returns:
            There was one.
        """
        return False


def list_items(held: checkpoint_pb2.OperatorStateSnapshot, reader: SnapshotReader) -> list[bytes]:
    """The items of a list of operator state as they are stored, also where they are in a file.

    Raises:
        StoreCorrupt, StoreNotFound, StoreTransient: they cannot be read.
    """
    if not held.HasField("handle"):
        return list(held.items)
    items = checkpoint_pb2.OperatorStateItems.FromString(reader.read(held.handle)).items
    return list(items)[held.first_item : held.first_item + (held.item_count or len(items))]
