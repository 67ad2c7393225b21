"""What survives the JobManager: the graphs of its jobs, which of their attempt numbers may have been
used, its cluster id, and the leader epoch.

A graph is stored before its job is acknowledged and removed when the job has ended and its checkpoints
are deleted. A graph that is found at start belongs to a job that the last JobManager did not see to its
end, or behind which it did not clean up. Invariants: files
appear complete or not at all; ``leader_epoch`` grows with each start; one JobManager uses the
directory at a time; an attempt number is reserved before anything of it is deployed.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.errors import ConfigurationError, StoreCorrupt, StoreTransient
from penstock.pb import graph_pb2


@dataclass(frozen=True, slots=True)
class UnfinishedJob:
    """A job of an earlier JobManager.

    Attributes:
        first_attempt: every attempt number that may have been used is smaller.
        is_cancelled: its user had cancelled it.
        end: name of the state that it has ended in; "" = it has not.
        end_reason: why it has failed.
        ended_at_ms: when that was noted.
        has_committed: it takes no checkpoints, and its output was being made visible.
        problem: what of it cannot be read; "" = all of it can.
        operations: what was asked of it (``jobmanager/job/kept_operations.py``).
    """

    job_id: str
    graph: graph_pb2.JobGraph
    submitted_at_ms: int
    first_attempt: int = 0
    is_cancelled: bool = False
    end: str = ""
    has_committed: bool = False
    problem: str = ""
    operations: bytes = b""
    end_reason: str = ""
    ended_at_ms: int = 0


class JobStore:
    """The JobManager's directory.

    Args:
        directory: its own; made when missing, locked until ``close``.

    Raises:
        ConfigurationError: another JobManager uses the directory, or it cannot be written.
        StoreCorrupt: the leader epoch in it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._jobs = directory / "jobs"
        try:
            self._jobs.mkdir(parents=True, exist_ok=True)
            self._jobs.chmod(0o700)  # graphs hold the users' code
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"the JobManager cannot write to {directory}: {error.strerror}; choose another --dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigurationError(
                f"another JobManager is running in {directory}: stop it or choose another --dir"
            ) from error
        self.leader_epoch = _next_epoch(directory / "leader_epoch")
        self.cluster_id = _cluster_id(directory / "cluster_id")

    def close(self) -> None:
        """Lets another JobManager use the directory."""
        os.close(self._lock)

    def save(self, job_id: str, graph: graph_pb2.JobGraph) -> None:
        """Stores a job's graph; when this returns, it is safe.

        Blocks for two fsyncs (some milliseconds), so that acceptance is one step of the event loop.
        """
        _write(self._path(job_id), graph.SerializeToString())

    def reserve_attempts(self, job_id: str, end: int) -> None:
        """Attempt numbers below ``end`` may be used from now on; when this returns, it is safe.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._attempts_path(job_id)
        try:
            _write(path, str(end).encode())
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def note_checkpoints(self, job_id: str) -> None:
        """The job has a place for its checkpoints: from now on it must be found there.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._checkpoints_path(job_id)
        try:
            if not path.exists():
                _write(path, b"")
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def has_checkpoints(self, job_id: str) -> bool:
        """Whether that was noted."""
        return self._checkpoints_path(job_id).exists()

    def note_emptied(self, job_id: str) -> None:
        """Of the job's checkpoints nothing but HEAD is left, which goes next.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._emptied_path(job_id)
        try:
            _write(path, b"")
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def is_emptied(self, job_id: str) -> bool:
        """Whether that was noted."""
        return self._emptied_path(job_id).exists()

    def note_repeated(self, job_id: str, content: bytes) -> None:
        """What of the job's output may be there twice.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._repeated_path(job_id)
        try:
            _write(path, content)
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def repeated(self, job_id: str) -> bytes:
        """What was noted of it last, b"" = nothing.

        Raises:
            StoreTransient: it cannot be read now.
        """
        path = self._repeated_path(job_id)
        try:
            return path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise StoreTransient(f"{path} cannot be read: {error.strerror}") from error

    def note_operations(self, job_id: str, content: bytes) -> None:
        """What users have asked of the job under ids of their own, and what came of it.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._operations_path(job_id)
        try:
            _write(path, content)
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def note_cancellation(self, job_id: str) -> None:
        """The job is not to be run again, however this JobManager ends.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._cancelled_path(job_id)
        try:
            if self._path(job_id).exists():
                _write(path, b"")
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def note_end(self, job_id: str, state: str, reason: str = "") -> None:
        """The job has ended, and is only here for its checkpoints to be deleted, or to be started from.

        Args:
            job_id: the job.
            state: name of the state that it has ended in.
            reason: why it has failed.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._end_path(job_id)
        try:
            _write(path, f"{state}\n{reason}".encode())
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def note_commit(self, job_id: str) -> None:
        """The job, which takes no checkpoints, makes its output visible: run again it would do so twice.

        Raises:
            StoreTransient: it cannot be written now.
        """
        path = self._commit_path(job_id)
        try:
            _write(path, b"")
        except OSError as error:
            raise StoreTransient(f"{path} cannot be written: {error.strerror}") from error

    def remove(self, job_id: str) -> None:
        """The job has ended, and nothing of it is left to be deleted.

        Raises:
            StoreTransient: it cannot be removed now.
        """
        paths = (
            self._path(job_id),
            self._attempts_path(job_id),
            self._cancelled_path(job_id),
            self._checkpoints_path(job_id),
            self._commit_path(job_id),
            self._end_path(job_id),
            self._emptied_path(job_id),
            self._repeated_path(job_id),
            self._operations_path(job_id),
        )
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreTransient(f"{error.filename} cannot be removed: {error.strerror}") from error

    def unfinished(self) -> list[UnfinishedJob]:
        """Jobs that an earlier JobManager did not see to their end, oldest first."""
        found = [self.read(path.stem) for path in self._jobs.glob("*.pb")]
        return sorted(found, key=lambda job: (job.submitted_at_ms, job.job_id))

    def read(self, job_id: str) -> UnfinishedJob:
        """One of them; says where it cannot be read."""
        path, graph = self._path(job_id), graph_pb2.JobGraph()
        submitted_at_ms, first_attempt, problem, operations = 0, 0, "", b""
        end, end_reason, ended_at_ms = "", "", 0
        try:
            submitted_at_ms = path.stat().st_mtime_ns // 1_000_000
            end, end_reason, ended_at_ms = self._end(job_id)
            graph.ParseFromString(path.read_bytes())
            first_attempt = _number(self._attempts_path(job_id))
            if self._operations_path(job_id).exists():
                operations = self._operations_path(job_id).read_bytes()
        except DecodeError:
            problem = f"{path} does not hold the graph of a job: restore it from a backup"
        except OSError as error:
            problem = f"{error.filename} cannot be read: {error.strerror}"
        except StoreCorrupt as error:
            problem = str(error)
        graph.name = graph.name or f"job {job_id[:8]}, unreadable"
        return UnfinishedJob(
            job_id,
            graph,
            submitted_at_ms,
            first_attempt,
            self._cancelled_path(job_id).exists(),
            end,
            self._commit_path(job_id).exists(),
            problem,
            operations,
            end_reason,
            ended_at_ms,
        )

    def _end(self, job_id: str) -> tuple[str, str, int]:
        """State, reason and time; nothing where it has not ended."""
        path = self._end_path(job_id)
        try:
            state, _, reason = path.read_text(encoding="utf-8").partition("\n")
            return state, reason, path.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return "", "", 0

    def _path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.pb"

    def _attempts_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.attempts"

    def _checkpoints_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.checkpoints"

    def _commit_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.commit"

    def _end_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.end"

    def _emptied_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.emptied"

    def _repeated_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.repeated"

    def _operations_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.operations"

    def _cancelled_path(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.cancelled"


def _next_epoch(path: Path) -> int:
    epoch = _number(path) + 1
    _write(path, str(epoch).encode())
    return epoch


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise StoreCorrupt(
            f"{path} does not hold a number: write one there that is larger than any of its kind "
            "(leader_epoch, attempt) in the logs"
        ) from error


def _cluster_id(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        cluster_id = uuid.uuid4().hex
        _write(path, cluster_id.encode())
        return cluster_id


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
