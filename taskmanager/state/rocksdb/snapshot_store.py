"""A snapshot of the database on its way into the checkpoint store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from penstock.errors import CheckpointAborted
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from taskmanager.state.rocksdb.file_ledger import FileLedger
from taskmanager.state.rocksdb.write_queue_runner import Freeze, WriteQueue

_READ_BYTES: Final = 4 << 20


class LinkedSnapshot:
    """What snapshots of a database have in common: they are read from hard links, which go with them.

    Args:
        header: the snapshot without files; the tables and segments of the database.
        queue: where ``freeze`` is waiting.
        freeze: the changes that are to be written; has a directory for links.
    """

    def __init__(
        self,
        checkpoint_id: int,
        header: checkpoint_pb2.KeyedStateSnapshot,
        queue: WriteQueue,
        freeze: Freeze,
    ) -> None:
        assert freeze.link_to is not None
        self._checkpoint_id = checkpoint_id
        self._header = header
        self._queue = queue
        self._freeze = freeze
        self._directory = freeze.link_to
        self._is_discarded = False

    def discard(self) -> None:
        """See ``BackendSnapshot``."""
        self._is_discarded = True
        self._queue.discard(self._freeze)
        self._remove_links()

    def _gone(self) -> CheckpointAborted:
        return CheckpointAborted(self._checkpoint_id, "it was discarded while it was being written")

    def _remove_links(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class RocksDBSnapshot(LinkedSnapshot):
    """See ``BackendSnapshot``.

    Args:
        is_full: files of completed checkpoints are written again.
    """

    def __init__(
        self,
        checkpoint_id: int,
        header: checkpoint_pb2.KeyedStateSnapshot,
        queue: WriteQueue,
        freeze: Freeze,
        ledger: FileLedger,
        *,
        is_full: bool = False,
    ) -> None:
        super().__init__(checkpoint_id, header, queue, freeze)
        self._ledger = ledger
        self._is_full = is_full
        self._known: dict[str, checkpoint_pb2.StateFile] = {}
        self._uploaded: list[str] = []

    def blobs(self) -> Iterator[Blob]:
        """Writes what was frozen, then gives the files that no completed checkpoint holds.

        Raises:
            StreamError: it was discarded, or cannot be written.
        """
        self._queue.write_until(self._freeze)
        try:
            names = [path.name for path in self._directory.iterdir() if _belongs(path)]
        except FileNotFoundError as error:
            raise self._gone() from error
        self._known, self._uploaded = self._ledger.to_upload(names, is_full=self._is_full)
        for name in self._uploaded:
            yield Blob(name, partial(self._parts_of, name))

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """See ``BackendSnapshot``."""
        snapshot = checkpoint_pb2.KeyedStateSnapshot()
        snapshot.CopyFrom(self._header)
        snapshot.files.extend(self._known.values())
        for name in self._uploaded:
            snapshot.files.append(self._ledger.uploaded(name, handles[name]))
        self._ledger.described(self._checkpoint_id, snapshot.files)
        self._remove_links()
        return snapshot

    def _parts_of(self, name: str) -> Iterator[bytes]:
        try:
            file = (self._directory / name).open("rb")
        except FileNotFoundError as error:
            raise self._gone() from error
        with file:
            while part := file.read(_READ_BYTES):
                yield part


def _belongs(path: Path) -> bool:
    """Not an empty log: nothing is ever written to it."""
    return path.suffix != ".log"
