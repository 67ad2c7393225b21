"""Whether the files of a savepoint or checkpoint hold what was written, before anything starts from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.errors import JobRejected, StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.entries.file_names import SHARED_SUFFIX
from penstock.storage.restore_point import RestorePoint

READ_BYTES_MAX: Final = 256 << 20
"""Of more than that nothing is read: ``penstock fsck`` does."""


def check_content(point: RestorePoint, reader: SnapshotReader, *, has_tables: bool = True) -> bool:
    """Reads what a savepoint or checkpoint names, where that is not much.

    Args:
        has_tables: tables of databases are read, too.

    Returns:
        It has been read, and is what was written.

    Raises:
        JobRejected: something of it is not.
        StoreNotFound, StoreTransient: it cannot be read.
    """
    found = _handles(point.manifest, has_tables=has_tables)
    handles = {(one.path, one.offset, one.inline): one for one in found}.values()
    if sum(one.size_bytes for one in handles) > READ_BYTES_MAX:
        return False
    try:
        for one in handles:
            reader.read(one)
    except StoreCorrupt as error:
        raise JobRejected(f"{point.uri} is damaged: {error}") from error
    return True


def _handles(
    manifest: checkpoint_pb2.CheckpointManifest, *, has_tables: bool
) -> Iterator[checkpoint_pb2.StateHandle]:
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            for file in operator.keyed.files:
                if has_tables or not file.name.endswith(SHARED_SUFFIX):
                    yield file.handle
            yield from (one.handle for one in operator.lists if one.HasField("handle"))
    for done in manifest.done_splits:
        yield from done.chunks
