"""What survives the JobManager: the graphs of its jobs, and one record per job with all that was decided of it.

A job is stored before it is acknowledged: its graph first, then its record, then a look at LEADER. A leader that
takes over lists the jobs behind its swap of LEADER, so it finds every job that any leader has acknowledged. It
makes a record its own before it goes on with the job; from then on who led before can change nothing of it. The
record of a job that has ended stays as long as the job is listed. One that was never acknowledged may be stored yet,
by a swap that nobody has answered: its record says that it never began, for so long that none comes later.

Invariants: a record is only ever replaced by the leader whose epoch it has, or by a newer one; when a method that
notes something returns, that is safe; nothing of an earlier JobManager's job is deleted before it was noted that
it has ended and is clean, or that is not there at all.

Every method blocks and may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from common.pb import job_record_pb2
from jobmanager.stores.leader_store import LeaderStore
from jobmanager.stores.record_store import RECORD_NAME, NoRecordError, RecordStore
from jobmanager.stores.starts_store import StartsStore, start_path
from jobmanager.stores.stored_job import (
    GRAPH_PREFIX,
    StoredJob,
    decode_graph,
    digest_of,
    graph_name,
    is_unstored,
    mark_removed,
    may_come_late,
    unreadable,
)
from penstock.errors import Fenced, StoreNotFound, StoreTransient, StreamError
from penstock.pb import graph_pb2
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.swapped_object import NewerLeader


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
        self._records: dict[str, RecordStore] = {}
        self._unstored: set[str] = set()
        self._lock = threading.Lock()
        self.starts = StartsStore(store, uri, leader)

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
        record = self._record(
            job_id
        )  # known from here on: who gives this call up withdraws what comes of it yet
        try:
            self._store.put(f"{job_id}/{graph_name(digest)}", (content,))
        except StreamError:
            self._forget(job_id, record)
            raise
        first = job_record_pb2.StoredJob(
            job_id=job_id, submitted_at_ms=submitted_at_ms, graph_digest=digest
        )
        record.create(first)
        try:
            self._leader.verify()
        except Fenced:
            # Who leads may not have seen it, and nobody was told of it: nobody is to run it later.
            with suppress(StreamError):
                record.withdraw(_now_ms())
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
            return unreadable(job_id, error)

    def _read(self, job_id: str) -> StoredJob | None:
        try:
            record = self._record(job_id).own()
            if record.HasField("end") and not record.end.state:
                if not is_unstored(record):
                    self._delete_files(job_id)
                elif self._has_claims(job_id, keeps_record=may_come_late(record, _now_ms())):
                    self._unstored.add(job_id)
                return None
            name = f"{job_id}/{graph_name(record.graph_digest)}"
            content = self._store.get(name)
            graph = decode_graph(content, record.graph_digest, f"{self._uri}/{name}")
        except NoRecordError:
            return self._remove_unacknowledged(job_id)
        except NewerLeader:
            raise
        except StreamError as error:
            return unreadable(job_id, error)
        return StoredJob(job_id, graph, record)

    def _remove_unacknowledged(self, job_id: str) -> StoredJob | None:
        """Who was storing it has not acknowledged it, and is refused by LEADER now. What else lies there is somebody's."""
        try:
            self._leader.verify()
            found = self._store.sizes([f"{job_id}/{RECORD_NAME}", start_path(job_id)])
            if f"{job_id}/{RECORD_NAME}" in found:
                raise StoreTransient(f"the record of job {job_id} was away for a moment")
            graphs = [one.path for one in self._store.list(f"{job_id}/{GRAPH_PREFIX}")]
            graphs = [path for path in graphs if path.count("/") == 1]
            if graphs or found:
                self._record(job_id).withdraw(_now_ms())
            delete_all(self._store, graphs)
            self._forget(job_id)
            if found:
                self._unstored.add(job_id)
        except NewerLeader:
            raise
        except StreamError as error:
            return unreadable(job_id, error)
        return None

    def remove(self, job_id: str) -> None:
        """Nobody asks for the job any more. May be repeated.

        Raises:
            Fenced: the job is another leader's.
            StoreTransient: it cannot be removed now.
        """
        # Only who can still replace the record may delete it; half removed, it says so.
        with suppress(NoRecordError):
            self._record(job_id).change(mark_removed)
        self._delete_files(job_id)

    def unstored(self) -> list[str]:
        """Jobs without a record that may have claimed what they were to start from, as far as they were found since the
        last call."""
        found = list(self._unstored)
        self._unstored.clear()
        return found

    def may_have(self, job_id: str) -> bool:
        """Whether a job is stored, or was to be: also where ``save`` has failed."""
        return job_id in self._records

    def withdraw(self, job_id: str) -> None:
        """Nobody runs a job whose ``save`` has failed, also where what was to store it comes yet; what it has claimed can
        still be given back. May be repeated.

        Raises: as ``remove``.
        """
        self._leader.verify()
        self._record(job_id).withdraw(_now_ms())
        self._has_claims(job_id, keeps_record=True)

    def _has_claims(self, job_id: str, *, keeps_record: bool) -> bool:
        """Of a job that was never acknowledged; all else of it is deleted."""
        start, record = start_path(job_id), f"{job_id}/{RECORD_NAME}"
        return start in self._delete_files(job_id, {start, record} if keeps_record else {start})

    def _delete_files(self, job_id: str, kept: AbstractSet[str] = frozenset()) -> set[str]:
        """What it has claimed goes first, which without a record would be given back.

        Returns:
            What is there of what is kept.
        """
        for path in (start_path(job_id), f"{job_id}/{RECORD_NAME}"):
            if path not in kept:
                self._store.delete(path)
        paths = {one.path for one in self._store.list(f"{job_id}/")}
        delete_all(self._store, paths - kept)
        self._forget(job_id)
        return paths & kept

    def _forget(self, job_id: str, record: RecordStore | None = None) -> None:
        with self._lock:
            if record is None or self._records.get(job_id) is record:
                self._records.pop(job_id, None)

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

    def _record(self, job_id: str) -> RecordStore:
        with self._lock:
            record = self._records.get(job_id)
            if record is None:
                record = RecordStore(self._store, self._uri, job_id, self._leader)
                self._records[job_id] = record
            return record


def _now_ms() -> int:
    return int(1000 * time.time())  # noqa: TID251 - as old as what lies in the store
