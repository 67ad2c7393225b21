"""The checkpoints that HEAD names, read back: which can be restored from, and what is written again where the newest
cannot.

Lists nothing: what is missing is found by looking at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

import structlog

from common.done_splits import DoneSplits
from jobmanager.checkpoint.done_splits_store import read_done_splits
from jobmanager.checkpoint.repeated_output import RepeatedOutput, repeated_output
from penstock.errors import StoreCorrupt, StoreNotFound, StreamError
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.manifest import decode_manifest, references
from penstock.storage.object_store import ObjectStore
from penstock.storage.snapshot_files import StoreSnapshotReader

ReadableCheckpoint = tuple[checkpoint_pb2.RetainedCheckpoint, checkpoint_pb2.CheckpointManifest]


class RetainedManifestsStore:
    """Reads what HEAD names."""

    def __init__(self, job_id: str, graph: graph_pb2.JobGraph, store: ObjectStore) -> None:
        self._graph = graph
        self._store = store
        self.damage: dict[str, str] = {}
        """What is wrong with manifests that were to be read, by their paths."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def readable(
        self, retained: Iterable[checkpoint_pb2.RetainedCheckpoint], unusable: Collection[int]
    ) -> list[ReadableCheckpoint]:
        """Those whose manifest can be read and whose files are there and long enough, oldest first.

        Args:
            retained: as HEAD names them.
            unusable: checkpoints that tasks could not restore.
        """
        self.damage = {}
        return [
            (one, manifest)
            for one in retained
            if (manifest := self._read(one, unusable)) is not None
        ]

    def newest_done(self, readable: list[ReadableCheckpoint]) -> Mapping[str, DoneSplits]:
        """Of the newest checkpoint that says it; those that do not are taken away from the list."""
        while readable:
            retained, manifest = readable[-1]
            try:
                return read_done_splits(manifest, StoreSnapshotReader(self._store))
            except (StoreCorrupt, StoreNotFound) as error:
                self._note_unreadable(retained, error)
                readable.pop()
        return {}

    def repeated(
        self,
        head: checkpoint_pb2.CheckpointHead,
        newest: checkpoint_pb2.CheckpointManifest,
    ) -> RepeatedOutput | None:
        """What is written again where ``newest`` is not what HEAD ends with; None = nothing."""
        damaged: list[
            tuple[checkpoint_pb2.RetainedCheckpoint, checkpoint_pb2.CheckpointManifest | None]
        ] = []
        for retained in head.retained:
            if retained.checkpoint_id > newest.checkpoint_id:
                manifest, path = None, retained.manifest_path
                with contextlib.suppress(StoreCorrupt, StoreNotFound):
                    manifest = decode_manifest(self._store.get(path), path)
                damaged.append((retained, manifest))
        if not damaged:
            return None
        return repeated_output(self._graph, newest, damaged, StoreSnapshotReader(self._store))

    def _read(
        self,
        retained: checkpoint_pb2.RetainedCheckpoint,
        unusable: Collection[int],
    ) -> checkpoint_pb2.CheckpointManifest | None:
        """A manifest whose files are there and long enough; None = there is something wrong."""
        path = retained.manifest_path
        try:
            manifest = decode_manifest(self._store.get(path), path)
            is_damaged = retained.is_damaged or retained.checkpoint_id in unusable
            self._check_files(manifest, is_damaged=is_damaged)
        except (StoreCorrupt, StoreNotFound) as error:
            self._note_unreadable(retained, error)
            return None
        return manifest

    def _note_unreadable(
        self, retained: checkpoint_pb2.RetainedCheckpoint, error: StreamError
    ) -> None:
        self.damage[retained.manifest_path] = str(error)
        self._log.error(
            "checkpoint.unreadable",
            checkpoint_id=retained.checkpoint_id,
            path=retained.manifest_path,
            reason=str(error),
        )

    def _check_files(
        self, manifest: checkpoint_pb2.CheckpointManifest, *, is_damaged: bool
    ) -> None:
        """Raises ``StoreCorrupt`` where a file is missing, too short, or was found damaged by a task."""
        if is_damaged:
            raise StoreCorrupt("a task could not restore its state from it")
        ends: dict[str, int] = {}
        for reference in references(manifest):
            location = reference.location
            end = location.offset + location.size_bytes
            ends[location.path] = max(end, ends.get(location.path, 0))
        sizes = self._store.sizes(ends)
        for path, end in ends.items():
            if sizes.get(path, -1) < end:
                raise StoreCorrupt(f"{path}, which it refers to, is missing or truncated")
