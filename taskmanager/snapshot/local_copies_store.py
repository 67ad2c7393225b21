"""Copies of a job's snapshots on the TaskManager's own disk.

    <root>/<job_id>/<vertex>-<subtask>/<snapshot file>/<offset>

One file per blob of a snapshot file, so that a database can take it over as a hard link; a directory gets
its name when the snapshot is in the checkpoint store, ``.part-<snapshot file>`` before. Copies are a cache:
what is missing, damaged or foreign is read from the checkpoint store. What a subtask's latest completed
checkpoint does not need is removed by the subtask; what nobody has touched for long by the daemon.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import structlog

from penstock.errors import InvariantViolation
from penstock.pb import checkpoint_pb2
from penstock.storage.private_directories import make_directories, open_private
from penstock.storage.snapshot_files import SnapshotFileName, parse_snapshot_file_name

_log = structlog.get_logger()
_PART = ".part-"
_SUBTASK = re.compile(r".+-\d{1,9}")
_OFFSET = re.compile(r"\d+")

Place = tuple[str, int]
"""Where a blob is: path of its snapshot file in the job's directory of the checkpoint store, offset."""


class LocalCopies:
    """The copies of one job on this TaskManager. May be used from any thread.

    Args:
        roots: directories that belong to this TaskManager; subtasks are spread over them.
        job_id: whose copies.
    """

    def __init__(self, roots: Sequence[Path], job_id: str) -> None:
        self._roots = roots
        self._job_id = job_id

    def directory(self, vertex: str, subtask_index: int) -> Path:
        """Where the copies of a subtask are."""
        name = f"{quote(vertex, safe='')}-{subtask_index}"
        root = self._roots[zlib.crc32(name.encode()) % len(self._roots)]
        return root / self._job_id / name

    def snapshot_directory(self, path: str) -> Path | None:
        """Where the copy of a snapshot file is, complete or not; None = the path names none."""
        found = parse_snapshot_file_name(path)
        if found is None:
            return None
        return self.directory(found.vertex, found.subtask_index) / path.rpartition("/")[2]

    def file_of(self, handle: checkpoint_pb2.StateHandle) -> Path | None:
        """The file with the copy of a blob, which may be missing or damaged."""
        directory = self.snapshot_directory(handle.path)
        return None if directory is None else directory / str(handle.offset)

    def begin(self, path: str, on_failure: Callable[[], None]) -> LocalCopy:
        """A copy of a snapshot file that is about to be written.

        Args:
            on_failure: called once when the copy cannot be written.
        """
        directory = self.snapshot_directory(path)
        if directory is None:
            raise InvariantViolation(f"{path} is no snapshot file")
        return LocalCopy(directory, on_failure)

    def retain(
        self, vertex: str, subtask_index: int, checkpoint_id: int, needed: Iterable[Place]
    ) -> None:
        """Removes the copies that neither a completed checkpoint nor a later one needs.

        Args:
            checkpoint_id: the latest completed checkpoint of the subtask.
            needed: where its blobs are.

        Raises:
            OSError: the disk does not let it.
        """
        directory = self.directory(vertex, subtask_index)
        if not directory.is_dir():
            return
        kept: dict[str, set[str]] = {}
        for path, offset in needed:
            kept.setdefault(path.rpartition("/")[2], set()).add(str(offset))
        for snapshot in directory.iterdir():
            name = _snapshot_of(snapshot)
            if name is not None and name.checkpoint_id > checkpoint_id:
                continue
            offsets = kept.get(snapshot.name)
            if offsets is None:
                shutil.rmtree(snapshot, ignore_errors=True)
                continue
            for file in snapshot.iterdir():
                if file.name not in offsets:
                    file.unlink(missing_ok=True)
        os.utime(directory)  # it is in use


def remove_copies(directory: Path) -> bool:
    """Removes a subtask's directory with its copies; what is none of them stays, and the directory with it.

    Returns:
        Whether the directory is gone.
    """
    if _SUBTASK.fullmatch(directory.name) is None:
        return False
    with suppress(OSError):
        for snapshot in list(directory.iterdir()):
            if _snapshot_of(snapshot) is not None and not snapshot.is_symlink():
                _remove_copy(snapshot)
        directory.rmdir()
    return not directory.exists()


def _remove_copy(snapshot: Path) -> None:
    with suppress(OSError):
        for file in list(snapshot.iterdir()):
            if _OFFSET.fullmatch(file.name):
                file.unlink()
        snapshot.rmdir()


def _snapshot_of(directory: Path) -> SnapshotFileName | None:
    """Which snapshot file a directory has copies of, complete or not; None = it is no such directory."""
    return parse_snapshot_file_name(directory.name.removeprefix(_PART))


class LocalCopy:
    """The copy of one snapshot file while it is written: a failure ends the copy, never the snapshot.

    Used by one thread at a time.
    """

    def __init__(self, directory: Path, on_failure: Callable[[], None]) -> None:
        self._directory = directory
        self._part = directory.with_name(_PART + directory.name)
        self._on_failure = on_failure
        self._has_failed = False
        self._file: BinaryIO | None = None

    def begin_blob(self, offset: int) -> None:
        """What is written next is the blob at this offset of the snapshot file."""
        if self._has_failed:
            return
        try:
            self._close_file()
            make_directories(self._part)
            self._file = open_private(self._part / str(offset))
        except OSError as error:
            self._fail(error)

    def write(self, chunk: bytes | memoryview) -> None:
        """Goes on with the blob."""
        if self._file is None:
            return
        try:
            self._file.write(chunk)
        except OSError as error:
            self._fail(error)

    def commit(self) -> None:
        """The snapshot file is in the checkpoint store."""
        if self._has_failed:
            return
        try:
            self._close_file()
            self._part.rename(self._directory)
        except OSError as error:
            self._fail(error)

    def abandon(self) -> None:
        """The snapshot file has not been written."""
        self._has_failed = True
        with suppress(OSError):
            self._close_file()
        shutil.rmtree(self._part, ignore_errors=True)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _fail(self, error: OSError) -> None:
        _log.warning("local_copy.failed", path=str(self._directory), reason=str(error))
        self.abandon()
        self._on_failure()
