"""Which TaskManagers are drained, and what was asked of them, as the next JobManager must know it.

There is no such object before the first drain. Invariant: it is only ever replaced by the leader whose epoch it has,
or by a newer one.

Every method blocks and may be called from any thread.
"""

from __future__ import annotations

import threading
from typing import Final

from google.protobuf.message import DecodeError

from common.pb import job_record_pb2
from jobmanager.stores.leader_store import LeaderStore
from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.object_store import ObjectStore
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import NewerLeader, SwappedObject

DRAINS_PATH: Final = "drains"
FORMAT: Final = FrameFormat("the drained TaskManagers", b"PSTKDRAN", 1)

_CLAIM_ATTEMPTS: Final = 16


class DrainsStore:
    """The drains of one cluster, written by the JobManager that leads it.

    Args:
        store: what the cluster keeps.
        uri: its name, for messages.
        leader: who writes; it leads already.
    """

    def __init__(self, store: ObjectStore, uri: str, leader: LeaderStore) -> None:
        self._object = SwappedObject(store, DRAINS_PATH, SwappedKind.DRAINS, self._lost)
        self._object.name = self._path = f"{uri}/{DRAINS_PATH}"
        self._leader = leader
        self._lock = threading.Lock()
        self._now = job_record_pb2.StoredDrains()

    def read(self) -> job_record_pb2.StoredDrains:
        """What it says, which only this leader replaces from then on.

        Raises:
            Fenced: another JobManager leads.
            StoreCorrupt: it is damaged; the next ``write`` replaces it.
            StoreTransient: it cannot be read or written now.
        """
        with self._lock:
            if self._object.content() is not None:
                self._claim()
            return self._now

    def write(self, new: job_record_pb2.StoredDrains) -> None:
        """Replaces it; when this returns, it is safe.

        Raises:
            Fenced: another JobManager leads.
            StoreTransient: it cannot be written now.
        """
        with self._lock:
            if not self._object.is_own:
                try:
                    self._claim()
                except StoreCorrupt:
                    self._claim(is_damaged=True)
            new.leader_epoch = self._leader.epoch
            new.revision = self._now.revision = self._now.revision + 1
            self._object.swap(_encoded(new))
            self._now = new

    def _claim(self, *, is_damaged: bool = False) -> None:
        for _ in range(_CLAIM_ATTEMPTS):
            content, found = self._object.content(), job_record_pb2.StoredDrains()
            if content is not None and not is_damaged:
                found = self._decode(content)
                if found.leader_epoch > self._leader.epoch:
                    raise self._lost(content)
            found.leader_epoch, found.revision = self._leader.epoch, found.revision + 1
            self._leader.verify()  # else it may be made in the place of storage that is away
            if self._object.take_over(content, _encoded(found)):
                self._now = found
                self._leader.verify()
                return
        raise StoreTransient(f"{self._path} changes all the time: do several JobManagers lead?")

    def _decode(self, content: bytes) -> job_record_pb2.StoredDrains:
        try:
            _, payload = decode_frame(FORMAT, content, self._path)
            return job_record_pb2.StoredDrains.FromString(payload)
        except DecodeError as error:
            raise StoreCorrupt(f"{self._path} is damaged: {error}") from error

    def _lost(self, content: bytes | None) -> StreamError:
        if content is None:
            return StoreNotFound(
                f"{self._path} is gone: {self._object.why_absent}; somebody has removed it, or the storage is not "
                "there any more"
            )
        try:
            epoch = self._decode(content).leader_epoch
        except StoreCorrupt as error:
            return error
        newer = NewerLeader(
            f"the drains are no longer those of leader epoch {self._leader.epoch}: epoch {epoch} has them",
            epoch,
        )
        self._leader.met(newer)
        return newer


def _encoded(drains: job_record_pb2.StoredDrains) -> bytes:
    return encode_frame(FORMAT, drains.SerializeToString(deterministic=True))
