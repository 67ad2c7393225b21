"""What survives the JobManager: the graphs of its jobs, and one record per job with all that was decided of it.

A job is stored before it is acknowledged: its graph first, then its record, then a look at LEADER. A leader that
takes over lists the jobs behind its swap of LEADER, so it finds every job that any leader has acknowledged. It
makes a record its own before it goes on with the job; from then on who led before can change nothing of it. The
record of a job that has ended stays as long as the job is listed.

Invariants: a record is only ever replaced by the leader whose epoch it has, or by a newer one; when a method that
notes something returns, that is safe; nothing of an earlier JobManager's job is deleted before it was noted that
it has ended and is clean, or that is not there at all.

Every method blocks and may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from common.pb import job_record_pb2
from jobmanager.stores.leader_store import LeaderStore
from jobmanager.stores.stored_job import (
    GRAPH_PREFIX,
    StoredJob,
    decode_graph,
    decode_record,
    digest_of,
    encode_record,
    graph_name,
)
from penstock.errors import Fenced, StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.pb import graph_pb2
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import NewerLeader, SwappedObject

RECORD_NAME: Final = "record"

_CLAIM_ATTEMPTS: Final = 16

_Note = Callable[[job_record_pb2.StoredJob], None]


class JobStore:
    """The records of a cluster's jobs, written by the JobManager that leads it.

    Args:
        store: has them, each job's below its id.
        uri: its name, for messages.
        leader: who writes; it leads already.
    """

    def __init__(self, store: ObjectStore, uri: str, leader: LeaderStore) -> None:
        self._store = store
        self._uri = uri
        self._leader = leader
        self._records: dict[str, _Record] = {}
        self._lock = threading.Lock()

    @property
    def leader_epoch(self) -> int:
        """In whose name is written."""
        return self._leader.epoch

    def met(self, error: Fenced) -> None:
        """An object of a job is another's; where that is a newer leader, this JobManager's part is over."""
        if isinstance(error, NewerLeader):
            self._leader.met(error)

    # ------------------------------------------------------------ the life of a job

    def check_leads(self) -> None:
        """Makes sure that what is stored next is found by the next leader, before anything is made.

        Raises:
            Fenced: another JobManager leads.
            StoreNotFound: the storage is not there: what is made in its place would be hidden by it, or hide it.
            StoreTransient: it cannot be read now.
        """
        self._leader.verify()

    def save(self, job_id: str, graph: graph_pb2.JobGraph, submitted_at_ms: int) -> int:
        """Stores a job; when this returns, every later leader will find it. May be repeated.

        Returns:
            The first attempt number that nobody may have used: a leader that did not acknowledge the job may have
            begun it.

        Raises:
            Fenced: another JobManager leads: the job is not to be acknowledged.
            StoreTransient: it cannot be stored now.
        """
        content = graph.SerializeToString()
        digest = digest_of(content)
        self._store.put(f"{job_id}/{graph_name(digest)}", (content,))
        first = job_record_pb2.StoredJob(
            job_id=job_id, submitted_at_ms=submitted_at_ms, graph_digest=digest
        )
        record = self._record(job_id)
        record.create(first)
        try:
            self._leader.verify()
        except Fenced:
            # Who leads may not have seen it, and nobody was told of it: nobody is to run it later.
            with suppress(StreamError):
                record.change(_mark_removed)
            raise
        return record.own().attempts_end

    def stored(self) -> list[StoredJob]:
        """All jobs of earlier JobManagers, those submitted first before the others.

        Raises:
            StoreTransient: it cannot be found out now which they are.
        """
        try:
            job_ids = self._store.first_parts()
        except StoreNotFound:
            return []
        try:
            found = self._read_all(job_ids)
        except NewerLeader as error:
            # LEADER was lost, or comes from a backup: its word counts less than that of a record.
            self._leader.take_over(error.epoch)
            self._records.clear()
            found = self._read_all(job_ids)
        return sorted(found, key=lambda job: (job.record.submitted_at_ms, job.job_id))

    def _read_all(self, job_ids: Iterable[str]) -> list[StoredJob]:
        with ThreadPoolExecutor(self._store.files_at_once, "job-records") as threads:
            return [job for job in threads.map(self._read, job_ids) if job is not None]

    def read(self, job_id: str) -> StoredJob | None:
        """One of them, which is this leader's from then on; says where it cannot be read.

        Returns:
            None where it was never acknowledged, or was being removed: nothing of it is left then.
        """
        try:
            return self._read(job_id)
        except NewerLeader as error:
            return _unreadable(job_id, error)

    def _read(self, job_id: str) -> StoredJob | None:
        try:
            record = self._record(job_id).own()
            if record.HasField("end") and not record.end.state:
                self._delete_files(job_id)
                return None
            name = f"{job_id}/{graph_name(record.graph_digest)}"
            content = self._store.get(name)
            graph = decode_graph(content, record.graph_digest, f"{self._uri}/{name}")
        except _NoRecordError:
            return self._remove_unacknowledged(job_id)
        except NewerLeader:
            raise
        except StreamError as error:
            return _unreadable(job_id, error)
        return StoredJob(job_id, graph, record)

    def _remove_unacknowledged(self, job_id: str) -> StoredJob | None:
        """Who was storing it has not acknowledged it, and is refused by LEADER now. What else lies there is somebody's."""
        try:
            self._leader.verify()
            if self._store.sizes([f"{job_id}/{RECORD_NAME}"]):
                raise StoreTransient(f"the record of job {job_id} was away for a moment")
            graphs = [one.path for one in self._store.list(f"{job_id}/{GRAPH_PREFIX}")]
            delete_all(self._store, [path for path in graphs if path.count("/") == 1])
        except NewerLeader:
            raise
        except StreamError as error:
            return _unreadable(job_id, error)
        return None

    def remove(self, job_id: str) -> None:
        """Nobody asks for the job any more. May be repeated.

        Raises:
            Fenced: the job is another leader's.
            StoreTransient: it cannot be removed now.
        """
        # Only who can still replace the record may delete it; half removed, it says so.
        with suppress(_NoRecordError):
            self._record(job_id).change(_mark_removed)
        self._delete_files(job_id)
        with self._lock:
            self._records.pop(job_id, None)

    def withdraw(self, job_id: str) -> None:
        """Nobody runs a job whose ``save`` has failed. May be repeated.

        Raises: as ``remove``.
        """
        self._leader.verify()
        try:
            self._record(job_id).own()
        except _NoRecordError:  # its graph, if that is there, is removed by the next leader
            return
        self.remove(job_id)

    def _delete_files(self, job_id: str) -> None:
        self._store.delete(f"{job_id}/{RECORD_NAME}")
        delete_all(self._store, [one.path for one in self._store.list(f"{job_id}/")])

    # ------------------------------------------------------------ what is noted of it

    def reserve_attempts(self, job_id: str, end: int) -> None:
        """Attempt numbers below ``end`` may be used from now on.

        Raises:
            Fenced: the job is another leader's.
            StoreTransient: it cannot be noted now.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.attempts_end = end

        self._record(job_id).change(note)

    def note_checkpoints(self, job_id: str, root: str) -> None:
        """The job has a place for its checkpoints: from now on it must be found there.

        Args:
            root: of the checkpoint store.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.has_checkpoints, record.checkpoint_root = True, root

        self._record(job_id).change(note)

    def has_checkpoints(self, job_id: str) -> bool:
        """Whether that was noted.

        Raises: as ``reserve_attempts``.
        """
        return self._record(job_id).own().has_checkpoints

    def note_emptied(self, job_id: str) -> None:
        """Of the job's checkpoints nothing but HEAD is left, which goes next.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.is_emptied = True

        self._record(job_id).change(note)

    def is_emptied(self, job_id: str) -> bool:
        """Whether that was noted.

        Raises: as ``reserve_attempts``.
        """
        return self._record(job_id).own().is_emptied

    def note_repeated(self, job_id: str, content: bytes) -> None:
        """What of the job's output may be there twice.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.repeated_output = content

        self._record(job_id).change(note)

    def repeated(self, job_id: str) -> bytes:
        """What was noted of it last, b"" = nothing.

        Raises: as ``reserve_attempts``.
        """
        return self._record(job_id).own().repeated_output

    def note_operations(self, job_id: str, content: bytes) -> None:
        """What users have asked of the job under ids of their own, and what came of it.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.operations = content

        self._record(job_id).change(note)

    def note_taskmanagers(self, job_id: str, addresses: Mapping[str, str]) -> None:
        """Which TaskManagers run the job's attempts, and where they are called; of calls that wait for each other the newest
        counts.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.taskmanagers.clear()
            record.taskmanagers.update(addresses)

        self._record(job_id).change_to_newest("taskmanagers", note)

    def note_cancellation(self, job_id: str) -> None:
        """The job is not to be run again, however this JobManager ends.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.is_cancelled = True

        self._record(job_id).change(note)

    def note_commit(self, job_id: str) -> None:
        """The job, which takes no checkpoints, makes its output visible: run again it would do so twice.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.has_committed = True

        self._record(job_id).change(note)

    def note_history(self, job_id: str, history: job_record_pb2.StoredHistory) -> None:
        """What has become of the job so far; of calls that wait for each other the newest counts.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            if not record.HasField("end"):
                record.history.CopyFrom(history)

        self._record(job_id).change_to_newest("history", note)

    def note_end(
        self,
        job_id: str,
        end: job_record_pb2.StoredEnd,
        operations: bytes,
        history: job_record_pb2.StoredHistory | None = None,
    ) -> None:
        """The job has ended; what is to be deleted of it may be there yet.

        Args:
            operations: as ``note_operations``.
            history: what has become of it; None = what was noted.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.end.CopyFrom(end)
            record.operations = operations
            if history is not None:
                record.history.CopyFrom(history)

        self._record(job_id).change(note)

    def note_clean(self, job_id: str, operations: bytes) -> None:
        """Nothing is left of a job that has ended, but what it can be started from.

        Raises: as ``reserve_attempts``.
        """

        def note(record: job_record_pb2.StoredJob) -> None:
            record.end.is_clean = True
            record.operations = operations

        self._record(job_id).change(note)

    def _record(self, job_id: str) -> _Record:
        with self._lock:
            record = self._records.get(job_id)
            if record is None:
                record = _Record(self._store, self._uri, job_id, self._leader)
                self._records[job_id] = record
            return record


class _NoRecordError(StoreNotFound):
    """A job has no record."""


def _unreadable(job_id: str, error: StreamError) -> StoredJob:
    graph = graph_pb2.JobGraph(name=f"job {job_id[:8]}, unreadable")
    return StoredJob(job_id, graph, problem=str(error))


def _note_nothing(_record: job_record_pb2.StoredJob) -> None:
    """What is newest is written by itself."""


def _mark_removed(record: job_record_pb2.StoredJob) -> None:
    record.end.Clear()
    record.end.is_clean = True


class _Record:
    """The record of one job; its methods wait for each other."""

    def __init__(self, store: ObjectStore, uri: str, job_id: str, leader: LeaderStore) -> None:
        path = f"{job_id}/{RECORD_NAME}"
        self._object = SwappedObject(store, path, SwappedKind.RECORD, self._lost)
        self._object.name = self._path = f"{uri}/{path}"
        self._job_id = job_id
        self._leader = leader
        self._lock = threading.Lock()
        self._now: job_record_pb2.StoredJob | None = None
        """What it says; None = it is not this leader's yet."""
        self._newest: dict[str, _Note] = {}
        """What every change takes along, by what it is of."""

    def own(self) -> job_record_pb2.StoredJob:
        """What it says, which only this leader replaces from then on."""
        with self._lock:
            return self._claimed()

    def create(self, first: job_record_pb2.StoredJob) -> None:
        """Makes it, or makes it this leader's where there is one: of a submission that nobody acknowledged."""
        with self._lock:
            if self._now is not None:
                return

            def claimed(found: job_record_pb2.StoredJob | None) -> job_record_pb2.StoredJob:
                first.attempts_end = 0 if found is None else found.attempts_end
                return first

            self._take_over(claimed)

    def change_to_newest(self, what: str, note: _Note) -> None:
        """As ``change``; whatever is changed from now on takes it along, until a newer one of the same is asked for.

        So one whose call was given up on, and comes late, undoes nothing of what was asked for after it.
        """
        self._newest[what] = note
        self.change(_note_nothing)

    def change(self, note: _Note) -> None:
        """Replaces it by what ``note`` makes of it."""
        with self._lock:
            now, new = self._claimed(), job_record_pb2.StoredJob()
            new.CopyFrom(now)
            for one in (*self._newest.copy().values(), note):
                one(new)
            if new == now and not self._object.is_uncertain:
                return
            new.revision = now.revision = now.revision + 1
            self._object.swap(encode_record(new))
            self._now = new

    def _claimed(self) -> job_record_pb2.StoredJob:
        if self._now is not None:
            return self._now

        def claimed(found: job_record_pb2.StoredJob | None) -> job_record_pb2.StoredJob:
            if found is None:
                raise _NoRecordError(f"job {self._job_id} has no record: {self._object.why_absent}")
            return found

        return self._take_over(claimed)

    def _take_over(
        self, claimed: Callable[[job_record_pb2.StoredJob | None], job_record_pb2.StoredJob]
    ) -> job_record_pb2.StoredJob:
        for _ in range(_CLAIM_ATTEMPTS):
            content, found, revision = self._object.content(), None, 0
            if content is not None:
                found = decode_record(content, self._path)
                revision = found.revision
                if found.leader_epoch > self._leader.epoch:
                    raise self._lost(content)
            record = claimed(found)
            record.leader_epoch, record.revision = self._leader.epoch, revision + 1
            if self._object.take_over(content, encode_record(record)):
                self._now = record
                return record
        raise StoreTransient(f"{self._path} changes all the time: do several JobManagers lead?")

    def _lost(self, content: bytes | None) -> StreamError:
        if content is None:
            return StoreNotFound(
                f"{self._path} is gone: {self._object.why_absent}; somebody has removed it, or the storage is not "
                "there any more"
            )
        try:
            epoch = decode_record(content, self._path).leader_epoch
        except StoreCorrupt as error:
            return error
        newer = NewerLeader(
            f"job {self._job_id} is no longer that of leader epoch {self._leader.epoch}: epoch {epoch} has it",
            epoch,
        )
        self._leader.met(newer)
        return newer
