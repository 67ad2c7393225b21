"""A snapshot of the in-memory backend: what is written for it, and what it refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import pyarrow as pa

from penstock.errors import CheckpointAborted
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.run_writer import SegmentWriter
from taskmanager.kernels.record_versions import ReleasedError
from taskmanager.state.hashmap.chains import WHOLE, Chain, Export, Segment, extended
from taskmanager.state.hashmap.restored_rows import RestoredRows
from taskmanager.state.pacer_runner import Pacer
from taskmanager.state.snapshot_table import SealedTable, SnapshotTable

COPIED_TO: Final = 1
_Made = TypeVar("_Made")


@dataclass(slots=True)
class TableSlot:
    """A table and namespace of a backend. Only the mailbox thread changes it.

    Attributes:
        table: None as long as nobody has asked for what was restored.
        restored: what is in it then.
        chain: the segments of the newest confirmed snapshot.
        is_unwritten: the table holds restored rows that are in no chain.
    """

    table: SnapshotTable | None
    restored: list[RestoredRows] = field(default_factory=list)
    chain: Chain = ()
    is_unwritten: bool = False


@dataclass(slots=True)
class SnapshotItem:
    """A table and namespace in a snapshot.

    Attributes:
        chain: what it consists of; the confirmed chain, until what is new has been written.
        sealed: what is to be exported; None = nothing has changed.
        tier: of the segment that it becomes.
        copied: restored rows that are to be copied instead.
    """

    name: str
    namespace: int
    slot: TableSlot
    kind: str
    schema: pa.Schema
    chain: Chain
    sealed: SealedTable | None = None
    tier: int = 0
    copied: tuple[RestoredRows, ...] = ()

    @property
    def export(self) -> Export | None:
        """What is written of it; None = nothing."""
        if self.sealed is not None:
            return Export(self.sealed.since_version, self.tier)
        return WHOLE if self.copied else None


class HashMapSnapshot:
    """See ``taskmanager.state.backend.BackendSnapshot``.

    Args:
        header: the snapshot without its files, tables and segments.
        file_name: of the file that is written for it.
        blob_name: of that file's bytes.
        items: every table and namespace with state.
        files: of the chains, by name.
        pacer: of the thread that writes it.
        frozen_at_ms: wall-clock time.
        is_shared: later snapshots may refer to the file.

    Attributes:
        written_files: the files that ``describe`` refers to, by name.
    """

    def __init__(
        self,
        checkpoint_id: int,
        header: checkpoint_pb2.KeyedStateSnapshot,
        file_name: str,
        blob_name: str,
        items: list[SnapshotItem],
        files: Mapping[str, checkpoint_pb2.StateFile],
        pacer: Pacer,
        frozen_at_ms: int,
        *,
        is_shared: bool,
    ) -> None:
        self.items = items
        self.written_files: dict[str, checkpoint_pb2.StateFile] = {}
        self._checkpoint_id = checkpoint_id
        self._header = header
        self._file_name = file_name
        self._blob_name = blob_name
        self._files = files
        self._pacer = pacer
        self._frozen_at_ms = frozen_at_ms
        self._is_shared = is_shared
        self._is_discarded = False
        self._has_file = any(item.sealed is not None or item.copied for item in items)
        self.is_open = self._has_file
        """What was frozen for it has neither been written nor given back."""

    def blobs(self) -> Iterable[Blob]:
        """The bytes of the new segments."""
        if self._has_file:
            yield Blob(self._blob_name, self._chunks)

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """The snapshot with its tables, segments and files."""
        snapshot = checkpoint_pb2.KeyedStateSnapshot()
        snapshot.CopyFrom(self._header)
        tables: dict[tuple[str, str, bytes], int] = {}
        names: dict[str, None] = {}
        for item in self.items:
            if not item.chain:
                continue
            key = (item.name, item.kind, item.schema.serialize().to_pybytes())
            index = tables.setdefault(key, len(tables))
            for segment in item.chain:
                names[segment.file] = None
                snapshot.segments.append(_described(segment, index, item.namespace))
        for name, kind, schema in tables:
            snapshot.tables.add(name=name, kind=kind, schema=schema)
        self.written_files = {name: self._file(name, handles) for name in names}
        snapshot.files.extend(self.written_files.values())
        return snapshot

    def discard(self) -> None:
        """Gives back what was frozen. Repeatable, from any thread."""
        self._is_discarded = True
        self._pacer.hurry()
        self._release()

    def _file(
        self, name: str, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.StateFile:
        if name != self._file_name:
            return self._files[name]
        return checkpoint_pb2.StateFile(
            name=name, shared=self._is_shared, handle=handles[self._blob_name]
        )

    def _chunks(self) -> Iterator[bytes | memoryview]:
        # Whoever does not read to the end discards the snapshot: a generator that is collected may be so
        # while the locks that releasing takes are held.
        offset = 0
        try:
            for item in self.items:
                if item.sealed is None and not item.copied:
                    continue
                writer = SegmentWriter()
                for batches in _sources(item):
                    for part in writer.write(map(self._paced, batches)):
                        yield part
                        self._paced(part)
                self._check()
                item.chain = _new_chain(item, self._file_name, offset, writer)
                offset += writer.size_bytes
            self._release()
        except ReleasedError as error:
            raise CheckpointAborted(
                self._checkpoint_id, "it was discarded while it was being written"
            ) from error

    def _paced(self, made: _Made) -> _Made:
        """What was made, after a pause for the operators."""
        self._check()
        self._pacer.pause(self._frozen_at_ms)
        return made

    def _check(self) -> None:
        if self._is_discarded:
            raise ReleasedError

    def _release(self) -> None:
        self.is_open = False
        for item in self.items:
            if item.sealed is not None:
                item.sealed.release()


def _sources(item: SnapshotItem) -> Iterator[Iterable[pa.RecordBatch]]:
    """The rows, in pieces that are each sorted by itself, and hold each row once."""
    if item.sealed is not None:
        yield item.sealed.batches()
    # What a confirmed snapshot has copied meanwhile is read from there: the older file may be gone.
    for rows in (item.copied and item.slot.restored) or item.copied:
        yield (pa.RecordBatch.from_arrays(one.columns, schema=item.schema) for one in rows.latest())


def _new_chain(item: SnapshotItem, file: str, offset: int, written: SegmentWriter) -> Chain:
    since, version, tier = 0, COPIED_TO, 0
    if item.sealed is not None:
        since, version = item.sealed.since_version, item.sealed.version
        tier = item.tier if since else 0
    size_bytes, parts = written.size_bytes, tuple(written.parts)
    new = Segment(file, offset, size_bytes, written.row_count, since, version, tier, parts)
    return (new,) if item.sealed is None else extended(item.chain, new)


def _described(segment: Segment, table: int, namespace: int) -> checkpoint_pb2.StateSegment:
    """A segment as a snapshot names it."""
    return checkpoint_pb2.StateSegment(
        table=table,
        namespace=namespace,
        file=segment.file,
        offset=segment.offset,
        size_bytes=segment.size_bytes,
        row_count=segment.row_count,
        from_version=segment.from_version,
        to_version=segment.to_version,
        parts=segment.parts,
    )
