"""Which files of the database are in which checkpoint, and under which names.

The checkpoint store knows a file as (operator, subtask, instance, name). A database that was opened from
a checkpoint goes on with that checkpoint's files, and gives new files the numbers that follow, as a
killed predecessor may have done with other content. So a file's name carries what was minted when the
database that made it was opened,

    <opening>/000012.sst

and ``instance`` stays that of the first opening as long as the database goes on with all its files (the
same key-groups restored from one snapshot). A restored file keeps its name, and is not uploaded again.

Invariant: a snapshot refers to a file it does not upload only when a completed checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from penstock.pb import checkpoint_pb2
from penstock.storage.entries.file_names import SHARED_SUFFIX, local_name


class FileLedger:
    """Names and handles of the files of one database.

    Args:
        opening: unique to this opening of the database.
        instance: of the first opening.
        lock: not held by anyone; snapshots are described on I/O threads, all else happens on the mailbox thread.
        restored: files that the database was opened with, from a completed checkpoint.
        is_incremental: snapshots refer to files of completed checkpoints.
    """

    def __init__(
        self,
        opening: str,
        instance: str,
        lock: AbstractContextManager[object],
        restored: Iterable[checkpoint_pb2.StateFile] = (),
        *,
        is_incremental: bool = True,
    ) -> None:
        self.instance = instance
        self._opening = opening
        self._is_incremental = is_incremental
        # By the name that the file has in the database's directory.
        self._confirmed: dict[str, checkpoint_pb2.StateFile] = {}
        self._restored_names: dict[str, str] = {}
        for file in restored:
            if file.name.endswith(SHARED_SUFFIX):
                self._restored_names[local_name(file)] = file.name
                if file.shared and is_incremental:
                    self._confirmed[local_name(file)] = file
        self._pending: dict[int, dict[str, checkpoint_pb2.StateFile]] = {}
        self._lock = lock
        self._newest_confirmed = 0

    def to_upload(
        self, names: Iterable[str], *, is_full: bool = False
    ) -> tuple[dict[str, checkpoint_pb2.StateFile], list[str]]:
        """What a snapshot with these files refers to by name, and what it must upload.

        Args:
            is_full: it refers to nothing.
        """
        confirmed = {} if is_full else self._confirmed
        names = sorted(names)
        known = {name: confirmed[name] for name in names if name in confirmed}
        return known, [name for name in names if name not in known]

    def uploaded(self, name: str, handle: checkpoint_pb2.StateHandle) -> checkpoint_pb2.StateFile:
        """The entry for a file that was uploaded."""
        if not name.endswith(SHARED_SUFFIX):
            return checkpoint_pb2.StateFile(name=name, shared=False, handle=handle)
        stored_name = self._restored_names.get(name, f"{self._opening}/{name}")
        return checkpoint_pb2.StateFile(
            name=stored_name, shared=self._is_incremental, handle=handle
        )

    def described(self, checkpoint_id: int, files: Iterable[checkpoint_pb2.StateFile]) -> None:
        """The snapshot for a checkpoint consists of these files; any thread."""
        if self._is_incremental:
            shared = {local_name(file): file for file in files if file.shared}
            with self._lock:
                self._pending[checkpoint_id] = shared

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete. Of copies of one file, the first that was confirmed counts."""
        with self._lock:
            files = self._pending.pop(checkpoint_id, None)
            for older in [known for known in self._pending if known < checkpoint_id]:
                del self._pending[older]
        if files is not None and checkpoint_id > self._newest_confirmed:
            self._newest_confirmed = checkpoint_id
            before = self._confirmed
            self._confirmed = {name: before.get(name, file) for name, file in files.items()}

    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete."""
        with self._lock:
            self._pending.pop(checkpoint_id, None)
