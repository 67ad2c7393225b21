"""The record of one job, seen by the leader that owns it or takes it over.

Invariant: it is only ever replaced by the leader whose epoch it has, or by a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from common.pb import job_record_pb2
from jobmanager.stores.leader_store import LeaderStore
from jobmanager.stores.stored_job import decode_record, encode_record, is_unstored, mark_unstored
from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.storage.object_store import ObjectStore, SwapUnanswered
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import NewerLeader, SwappedObject

RECORD_NAME: Final = "record"

_Note = Callable[[job_record_pb2.StoredJob], None]

_CLAIM_ATTEMPTS: Final = 16


class NoRecordError(StoreNotFound):
    """A job has no record."""


def _note_nothing(_record: job_record_pb2.StoredJob) -> None:
    """What is newest is written by itself."""


class RecordStore:
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
        self._may_come: bool | None = None
        """Whether a call may be under way that makes it; None = one of an earlier leader's."""
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

            if self._may_come is None:
                self._may_come = False
            try:
                self._take_over(claimed)
            except SwapUnanswered:
                self._may_come = True
                raise

    def withdraw(self, now_ms: int) -> None:
        """Has it say that the job was never acknowledged, where it is there, or may come yet.

        Raises:
            StoreTransient: it cannot be said now, or another leader has stored the job.
        """

        def claimed(found: job_record_pb2.StoredJob | None) -> job_record_pb2.StoredJob:
            record = found or job_record_pb2.StoredJob(job_id=self._job_id)
            if not is_unstored(record) and found and found.leader_epoch != self._leader.epoch:
                raise StoreTransient(f"{self._path} was away for a moment")
            mark_unstored(record, now_ms)
            return record

        with self._lock:
            if self._may_come is not False or self._object.content() is not None:
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
                raise NoRecordError(f"job {self._job_id} has no record: {self._object.why_absent}")
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
