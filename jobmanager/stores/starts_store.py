"""What submitted jobs claim of what they start from, as the next JobManager must know it: one object per job, beside the
place of its record.

Invariant: it is there before the first claim, and as long as there is no record; beside a record it counts no more.

Every method blocks and may be called from any thread.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from common.pb import job_record_pb2
from jobmanager.stores.leader_store import LeaderStore
from penstock.errors import StoreCorrupt, StoreNotFound
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.object_store import ObjectStore

START_NAME: Final = "start"
FORMAT: Final = FrameFormat("what a job claims", b"PSTKSTRT", 1)


class StartsStore:
    """Those of a cluster's jobs, written by the JobManager that leads it.

    Args:
        store: as that of the jobs' records.
        uri: its name, for messages.
        leader: who writes; it leads already.
    """

    def __init__(self, store: ObjectStore, uri: str, leader: LeaderStore) -> None:
        self._store = store
        self._uri = uri
        self._leader = leader

    def note(self, start: job_record_pb2.StoredStart) -> None:
        """When this returns, a later leader finds it: it may be claimed.

        Raises:
            Fenced: another JobManager leads, and may not have seen it.
            StoreTransient: it cannot be noted now.
        """
        self.leave(start)
        self._leader.verify()

    def leave(self, start: job_record_pb2.StoredStart) -> None:
        """As ``note``, for whoever leads next.

        Raises:
            StoreTransient: it cannot be noted now.
        """
        content = encode_frame(FORMAT, start.SerializeToString(deterministic=True))
        self._store.put(start_path(start.job_id), (content,))

    def read(self, job_id: str) -> job_record_pb2.StoredStart | None:
        """What a job claims, or has claimed; None = nothing.

        Raises:
            StoreCorrupt: it is damaged.
            StoreTransient: it cannot be read now.
        """
        path = start_path(job_id)
        name = f"{self._uri}/{path}"
        try:
            _, payload = decode_frame(FORMAT, self._store.get(path), name)
            return job_record_pb2.StoredStart.FromString(payload)
        except StoreNotFound:
            return None
        except DecodeError as error:
            raise StoreCorrupt(f"{name} is damaged: {error}") from error

    def remove(self, job_id: str) -> None:
        """It is the job's for good, or given back. May be repeated.

        Raises:
            StoreTransient: it cannot be removed now.
        """
        self._store.delete(start_path(job_id))


def start_path(job_id: str) -> str:
    """Where it lies in the store of the records."""
    return f"{job_id}/{START_NAME}"
