"""LEADER: the object that says which JobManager leads, and under which epoch.

Who wants to lead replaces it, and leads while it is what it wrote. Invariant: every takeover has an epoch that is
larger than those of all takeovers before, and that no other takeover has.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from common.pb import job_record_pb2
from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.object_store import ObjectStore
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import NewerLeader, SwappedObject

LEADER_PATH: Final = "LEADER"
FORMAT: Final = FrameFormat("the name of a leader", b"PSTKLEAD", 1)

JOBS_PREFIX: Final = "jobs/"

_ATTEMPTS: Final = 16


class LeaderStore:
    """LEADER of one cluster, seen by a JobManager that wants to lead it."""

    def __init__(self, store: ObjectStore, uri: str) -> None:
        self._store = store
        self._object = SwappedObject(store, LEADER_PATH, SwappedKind.LEADER, self._lost)
        self._path = f"{uri}/{LEADER_PATH}"
        self.epoch = 0
        """Of this leader; 0 before it leads."""
        self.cluster_id = ""
        """Stays the same over all leaders."""
        self.address = self.election = ""
        """Where this one is called, and where it is elected; "" = it is alone."""
        self.followed = job_record_pb2.StoredLeader()
        """Who led before."""
        self.when_deposed: Callable[[NewerLeader], None] = _nothing
        """Called, by any thread, where something shows that another JobManager leads; it may not return."""

    def take_over(self, epoch_min: int = 0) -> None:
        """Leads from then on, and nobody who led before does. To be repeated after an error.

        Args:
            epoch_min: an epoch that was met elsewhere; the new one is larger.

        Raises:
            StoreCorrupt: there is a LEADER that cannot be understood; it stays.
            StoreNotFound: somebody has led, and nothing of what he kept is there.
            StoreTransient: it cannot be read or written now.
        """
        for _ in range(_ATTEMPTS):
            content = self._object.content()
            if content is None and epoch_min:
                self._check_is_there(epoch_min)
            found = job_record_pb2.StoredLeader() if content is None else self._decode(content)
            leader = job_record_pb2.StoredLeader(
                cluster_id=found.cluster_id or uuid.uuid4().hex,
                epoch=max(found.epoch, epoch_min) + 1,
                token=os.urandom(16),
                address=self.address,
                election=self.election,
            )
            if self._object.take_over(content, encode_frame(FORMAT, leader.SerializeToString())):
                self.epoch, self.cluster_id, self.followed = leader.epoch, leader.cluster_id, found
                return
        raise StoreTransient(
            f"{self._path} changed {_ATTEMPTS} times while this JobManager took over: how many of them are there?"
        )

    def _check_is_there(self, epoch: int) -> None:
        """A directory that is not mounted looks as one in which nothing has been kept yet."""
        if not self._store.list(JOBS_PREFIX):
            raise StoreNotFound(
                f"{self._path} is gone, and all jobs with it, although leader epoch {epoch} has led, as ZooKeeper knows: is "
                "the storage there? Nobody leads until it is. To begin with an empty one, remove the nodes of the "
                "cluster from ZooKeeper"
            )

    def met(self, error: NewerLeader) -> None:
        """Something is that of a leader with a larger epoch."""
        self.when_deposed(error)

    def verify(self) -> None:
        """Makes sure that nobody has taken over so far.

        Raises:
            Fenced: another JobManager leads.
            StoreNotFound, StoreCorrupt: LEADER is gone, or damaged.
            StoreTransient: it cannot be read now.
        """
        self._object.verify()

    def _decode(self, content: bytes) -> job_record_pb2.StoredLeader:
        try:
            _, payload = decode_frame(FORMAT, content, self._path)
            return job_record_pb2.StoredLeader.FromString(payload)
        except (StoreCorrupt, DecodeError) as error:
            raise StoreCorrupt(
                f"{error}; restore it from a backup, or remove it: the epochs in the records of the jobs are "
                "respected then"
            ) from error

    def _lost(self, content: bytes | None) -> StreamError:
        if content is None:
            return StoreNotFound(
                f"{self._path} is gone: {self._object.why_absent}; somebody has removed it, or the storage is not "
                "there any more"
            )
        try:
            leader = self._decode(content)
        except StoreCorrupt as error:
            return error
        who = f", {named(leader)}" if leader.address else ""
        newer = NewerLeader(
            f"leader epoch {self.epoch} is over: epoch {leader.epoch} leads{who}", leader.epoch
        )
        self.met(newer)
        return newer


def named(leader: job_record_pb2.StoredLeader) -> str:
    """A JobManager that leads, for people."""
    elected = f", elected at {leader.election}" if leader.election else ""
    return f"the JobManager at {leader.address}{elected}"


def _nothing(_error: NewerLeader) -> None:
    """Alone in its directory, it has been deposed by nobody: who asked is told."""
