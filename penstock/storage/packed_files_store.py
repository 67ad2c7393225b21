"""Reads the files of a checkpoint that lies far away with few requests: small ones are read whole, once.

A subtask's snapshot is many blobs in one file, and a state with windows has several in each: whoever looks at all of
them would otherwise ask for each.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Final

from typing_extensions import override

from penstock.pb import checkpoint_pb2
from penstock.storage.entries.file_names import SHARED_SUFFIX
from penstock.storage.manifest import file_ends
from penstock.storage.object_store import RANGE_BYTES, ObjectStore
from penstock.storage.snapshot_files import StoreSnapshotReader

_HELD_BYTES_MAX: Final = 64 << 20
"""What is held of all files together; others are read piece by piece."""


class PackedReader(StoreSnapshotReader):
    """Reads what a manifest names. May be used from any thread.

    Args:
        store: that the manifest's paths are relative to.
        manifest: of the checkpoint.
    """

    def __init__(self, store: ObjectStore, manifest: checkpoint_pb2.CheckpointManifest) -> None:
        super().__init__(store)
        self._place = store
        self._sizes = {} if store.files_at_once == 1 else packed_files(manifest)
        self._held: dict[str, bytes] = {}
        self._lock = Lock()

    @override
    def fetch(self, handle: checkpoint_pb2.StateHandle, target: Path) -> None:
        if self._is_packed(handle):
            target.write_bytes(self.read(handle))
        else:
            super().fetch(handle, target)

    @override
    def _stored(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        if not self._is_packed(handle):
            return super()._stored(handle, offset, size_bytes)
        return self._files()[handle.path][offset : offset + size_bytes]

    @override
    def _far_store(self, handle: checkpoint_pb2.StateHandle) -> ObjectStore | None:
        return None if self._is_packed(handle) else super()._far_store(handle)

    def _is_packed(self, handle: checkpoint_pb2.StateHandle) -> bool:
        return not handle.store and handle.path in self._sizes

    def _files(self) -> dict[str, bytes]:
        """The files; several of them are on their way at once, when the first is asked for."""
        with self._lock:
            if not self._held:
                wanted = ((path, 0, size_bytes) for path, size_bytes in self._sizes.items())
                with closing(self._place.ranges(wanted)) as contents:
                    self._held = dict(zip(self._sizes, contents, strict=True))
            return self._held


def packed_files(manifest: checkpoint_pb2.CheckpointManifest) -> dict[str, int]:
    """The files that are best read whole, with their sizes in bytes: those that hold anything but tables of a
    database, which are read whole anyway; the smallest first, as far as they may be held.

    >>> manifest = checkpoint_pb2.CheckpointManifest()
    >>> operator = manifest.subtasks.add().operators.add()
    >>> for name, path in (("run-1", "packed"), ("7.sst", "table"), ("run-2", "large")):
    ...     handle = operator.keyed.files.add(name=name).handle
    ...     handle.path, handle.size_bytes = path, RANGE_BYTES + 1 if path == "large" else 10
    >>> packed_files(manifest)
    {'packed': 10}
    """
    packed: set[str] = set()
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            packed.update(held.handle.path for held in operator.lists)
            for file in operator.keyed.files:
                if not file.name.endswith(SHARED_SUFFIX):
                    packed.add(file.handle.path)
    found: dict[str, int] = {}
    left = _HELD_BYTES_MAX
    for path, end in sorted(file_ends(manifest).items(), key=lambda one: one[1]):
        if path in packed and 0 < end <= min(left, RANGE_BYTES):
            found[path] = end
            left -= end
    return found
