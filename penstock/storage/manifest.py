"""The manifest of a checkpoint: everything that a restore needs, in one object.

It is self-describing (format version, schemas, fingerprints of the graph) and framed with a checksum.
A manifest alone does not make a checkpoint: HEAD must name it.

A manifest's path contains the epoch of the leader that wrote it. A leader that has been deposed without
knowing it may still write or delete manifests, under the number of a checkpoint that its successor has
taken meanwhile: their paths must differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame

FORMAT: Final = FrameFormat("a checkpoint manifest", b"PSTKMANI", 2)
"""Version 1 has no ``done_splits``: who reads no more than that would read these splits again."""

_PATH: Final = re.compile(r"chk-(?P<checkpoint_id>\d{1,18})/manifest(-(?P<leader_epoch>\d{1,18}))?")

_DONE_SPLITS_PATH: Final = re.compile(
    r"shared/done-splits-(?P<checkpoint_id>\d{1,18})-(?P<leader_epoch>\d{1,18})"
)

_DONE_SPLITS: Final = "done splits"
"""In the place of a backend's instance: chunks are the job's, not a subtask's."""


@dataclass(frozen=True, slots=True)
class SharedIdentity:
    """What one backend instance calls a file that later checkpoints may refer to."""

    operator_uid: str
    subtask_index: int
    instance: str
    name: str


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Where bytes lie in the store.

    Attributes:
        path: relative to the job's directory; several ranges may lie in one file.
        checksum: CRC-32 of the bytes.
    """

    path: str
    offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class StoredReference:
    """A range that a snapshot refers to; ``identity`` is None where no other checkpoint may."""

    identity: SharedIdentity | None
    location: StoredRange


def properties_message(properties: CheckpointProperties) -> checkpoint_pb2.CheckpointProperties:
    """The properties as they travel and are stored."""
    return checkpoint_pb2.CheckpointProperties(
        kind=checkpoint_pb2.CheckpointKind.ValueType(properties.kind.value),
        target=properties.target,
        full=properties.is_full,
        behind=checkpoint_pb2.BehindBarrier.ValueType(properties.behind.value),
        format=checkpoint_pb2.SavepointFormat.ValueType(properties.format.value),
    )


def properties_of(message: checkpoint_pb2.CheckpointProperties) -> CheckpointProperties:
    """Inverse of ``properties_message``.

    Raises:
        ValueError: this version does not know a value.
    """
    return CheckpointProperties(
        CheckpointKind(message.kind),
        message.target,
        message.full,
        BehindBarrier(message.behind),
        SavepointFormat(message.format),
    )


def encode_manifest(manifest: checkpoint_pb2.CheckpointManifest) -> bytes:
    """The bytes of a manifest; its ``format_version`` is set to the one that is written."""
    stamped = checkpoint_pb2.CheckpointManifest()
    stamped.CopyFrom(manifest)
    stamped.format_version = FORMAT.version
    return encode_frame(FORMAT, stamped.SerializeToString(deterministic=True))


def decode_manifest(content: bytes, path: str = "manifest") -> checkpoint_pb2.CheckpointManifest:
    """The manifest that these bytes are.

    Args:
        path: where they come from, for messages.

    Raises:
        StoreCorrupt: they are truncated, altered, no manifest, or of a newer format.
    """
    _, payload = decode_frame(FORMAT, content, path)
    try:
        return checkpoint_pb2.CheckpointManifest.FromString(payload)
    except DecodeError as error:
        raise StoreCorrupt(f"{path} is not a checkpoint manifest: {error}") from error


def manifest_path(checkpoint_id: int, leader_epoch: int | None = None) -> str:
    """Where a manifest lies, relative to the job's directory.

    Args:
        leader_epoch: of the leader that writes it; to be given wherever there may be another leader.
    """
    suffix = "" if leader_epoch is None else f"-{leader_epoch}"
    return f"chk-{checkpoint_id}/manifest{suffix}"


def parse_manifest_path(path: str) -> tuple[int, int] | None:
    """Checkpoint id and leader epoch (0 where there is none) of a path; None = no manifest's."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return int(found["checkpoint_id"]), int(found["leader_epoch"] or 0)


def done_splits_path(checkpoint_id: int, leader_epoch: int) -> str:
    """Where the splits lie that a checkpoint was the first to know as done, relative to the job's directory."""
    return f"shared/done-splits-{checkpoint_id}-{leader_epoch}"


def parse_done_splits_path(path: str) -> int | None:
    """The checkpoint that has written a file of done splits; None = it is another file."""
    found = _DONE_SPLITS_PATH.fullmatch(path)
    return None if found is None else int(found["checkpoint_id"])


def references(
    manifest: checkpoint_pb2.CheckpointManifest,
) -> tuple[StoredReference, ...]:
    """Every range of a file that a manifest refers to, in its order; inline state is none."""
    snapshots = (one for snapshot in manifest.subtasks for one in snapshot_references(snapshot))
    return (*snapshots, *done_split_references(manifest.done_splits))


def file_ends(manifest: checkpoint_pb2.CheckpointManifest) -> dict[str, int]:
    """By path of a file: the bytes that it has at least."""
    ends: dict[str, int] = {}
    for reference in references(manifest):
        location = reference.location
        ends[location.path] = max(ends.get(location.path, 0), location.offset + location.size_bytes)
    return ends


def snapshot_references(snapshot: checkpoint_pb2.SubtaskSnapshot) -> Iterator[StoredReference]:
    """Every range of a file that the snapshot of a subtask refers to, in its order."""
    for operator in snapshot.operators:
        instance = operator.keyed.instance
        for file in operator.keyed.files:
            if file.handle.path:
                identity = SharedIdentity(
                    operator.operator_uid, snapshot.subtask_index, instance, file.name
                )
                yield StoredReference(identity if file.shared else None, _location(file.handle))
        for items in operator.lists:
            if items.handle.path:
                yield StoredReference(None, _location(items.handle))


def done_split_references(
    done_splits: Iterable[checkpoint_pb2.DoneSplits],
) -> Iterator[StoredReference]:
    """Every range of a file with splits that were read to their end."""
    for done in done_splits:
        for chunk in done.chunks:
            if chunk.path:
                name = f"{chunk.path}/{chunk.offset}"
                identity = SharedIdentity(done.operator_uid, 0, _DONE_SPLITS, name)
                yield StoredReference(identity, _location(chunk))


def take_done_names(
    manifest: checkpoint_pb2.CheckpointManifest, sources: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[str]]:
    """Takes the names of done splits out of what subtasks say of some sources.

    Args:
        manifest: changed in place.
        sources: (vertex, operator uid).

    Returns:
        Ids of splits by source, each as often as it is named.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            key = (subtask.vertex, operator.operator_uid)
            done = [split.id for split in operator.splits if split.done]
            if done and key in sources:
                found.setdefault(key, []).extend(done)
                left = [split for split in operator.splits if not split.done]
                del operator.splits[:]
                operator.splits.extend(left)
    return found


def _location(handle: checkpoint_pb2.StateHandle) -> StoredRange:
    return StoredRange(handle.path, handle.offset, handle.size_bytes, handle.checksum)
