"""The splits that sources have read to their end, on their way into a manifest and back.

Subtasks name those that they have read since the last checkpoint they know to be complete. Here the names become
part of the set that the checkpoint before held, what is new goes into a file once it is enough, and the manifest
refers to it and to the files of checkpoints before (``common/done_splits.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from common.done_splits import DigestChunk, DoneSplits, digests_from_bytes
from jobmanager.checkpoint import messages as c
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.manifest import (
    StoredRange,
    StoredReference,
    done_split_references,
    done_splits_path,
    take_done_names,
)
from penstock.storage.object_store import ObjectStore


class DoneSplitsStore:
    """Puts done splits into the manifests of one job."""

    def __init__(self, store: ObjectStore, leader_epoch: int) -> None:
        self._store = store
        self._leader_epoch = leader_epoch

    def path(self, checkpoint_id: int) -> str:
        """Where a checkpoint puts what is new; nobody else writes there."""
        return done_splits_path(checkpoint_id, self._leader_epoch)

    def seal(
        self, manifest: checkpoint_pb2.CheckpointManifest, before: Iterable[c.SourceDone]
    ) -> tuple[c.SourceDone, ...]:
        """Puts the set in the place of names in a manifest, and writes what is new.

        A manifest that refers to no file of an earlier checkpoint has everything anew, and one that is not for
        the job's directory has it in itself.

        Args:
            manifest: changed in place.
            before: of the sources whose done splits are kept so, what the checkpoint before held.

        Returns:
            What the next checkpoint builds upon.

        Raises:
            StoreTransient: the file could not be written.
        """
        properties = manifest.properties
        sources = {(one.vertex, one.operator_uid): one.done for one in before}
        names = take_done_names(manifest, sources)
        path, written = self.path(manifest.checkpoint_id), b""
        after: list[c.SourceDone] = []
        for (vertex, uid), held in sources.items():
            ids = tuple(dict.fromkeys(names.get((vertex, uid), ())))
            done = held.with_ids(ids)
            is_savepoint = properties.kind == checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
            if properties.full or is_savepoint:
                done = done.unsealed()
            sealed = None if is_savepoint else done.to_seal()
            if sealed is not None:
                kept, digests = sealed
                content = digests.tobytes()
                location = StoredRange(path, len(written), len(content), zlib.crc32(content))
                done = DoneSplits((*kept, DigestChunk(digests, location)))
                written += content
            after.append(c.SourceDone(vertex, uid, done, ids))
        if written:
            self._store.put(path, [written])
        manifest.done_splits.extend(
            done_splits_message(one.operator_uid, one.done) for one in after if len(one.done)
        )
        return tuple(after)


def done_splits_message(operator_uid: str, done: DoneSplits) -> checkpoint_pb2.DoneSplits:
    """As a manifest holds it."""
    return checkpoint_pb2.DoneSplits(
        operator_uid=operator_uid,
        chunks=[
            checkpoint_pb2.StateHandle(
                path=chunk.location.path,
                offset=chunk.location.offset,
                size_bytes=chunk.location.size_bytes,
                checksum=chunk.location.checksum,
            )
            for chunk in done.chunks
        ],
        loose=done.loose.tobytes(),
    )


def done_references(done: Iterable[c.SourceDone]) -> tuple[StoredReference, ...]:
    """Every range of a file with such splits."""
    messages = (done_splits_message(one.operator_uid, one.done) for one in done)
    return tuple(done_split_references(messages))


def read_done_splits(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader
) -> Mapping[str, DoneSplits]:
    """What a manifest holds, by operator uid. Files of another store become the job's own with its next checkpoint.

    Raises:
        StoreNotFound, StoreCorrupt: a file is gone, or damaged.
        StoreTransient: it cannot be read now.
    """
    found: dict[str, DoneSplits] = {}
    for held in manifest.done_splits:
        done = DoneSplits((), digests_from_bytes(held.loose))
        chunks: list[DigestChunk] = []
        for handle in held.chunks:
            digests = digests_from_bytes(reader.read(handle))
            if handle.path and not handle.store:
                location = StoredRange(
                    handle.path, handle.offset, handle.size_bytes, handle.checksum
                )
                chunks.append(DigestChunk(digests, location))
            else:
                done = done.with_digests(digests)
        found[held.operator_uid] = DoneSplits(tuple(chunks), done.loose)
    return found
