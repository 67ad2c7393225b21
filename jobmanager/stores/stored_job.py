"""A job as its record and its graph keep it for the next JobManager (pure)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from common.pb import job_record_pb2
from penstock.errors import StoreCorrupt, StreamError
from penstock.pb import graph_pb2
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame

FORMAT: Final = FrameFormat("a job's record", b"PSTKJOBR", 1)

GRAPH_PREFIX: Final = "graph-"
_DIGITS_OF_NAME: Final = 16
_LATE_MAX_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job of an earlier JobManager.

    Attributes:
        record: what was noted of it.
        graph: what it runs; only its name where it cannot be read.
        problem: what of it cannot be read; "" = all of it can.
    """

    job_id: str
    graph: graph_pb2.JobGraph
    record: job_record_pb2.StoredJob = field(default_factory=job_record_pb2.StoredJob)
    problem: str = ""

    @property
    def has_ended(self) -> bool:
        """It is only here to be shown, to be started from, or for what is left of it to be deleted."""
        return self.record.HasField("end")

    @property
    def is_clean(self) -> bool:
        """Nothing is left of it that is still to be deleted."""
        return self.record.end.is_clean


def unreadable(job_id: str, error: StreamError) -> StoredJob:
    """A job of which something cannot be read."""
    graph = graph_pb2.JobGraph(name=f"job {job_id[:8]}, unreadable")
    return StoredJob(job_id, graph, problem=str(error))


def mark_removed(record: job_record_pb2.StoredJob) -> None:
    """Nothing of the job is needed any more."""
    record.end.Clear()
    record.end.is_clean = True


def mark_unstored(record: job_record_pb2.StoredJob, now_ms: int) -> None:
    """The job was never acknowledged; what it has claimed may have to be given back. While its record says so, no call that
    was to make it, and comes late, does."""
    record.end.Clear()
    record.end.ended_at_ms = now_ms
    record.end.SetInParent()


def is_unstored(record: job_record_pb2.StoredJob) -> bool:
    """Whether it says that."""
    return record.HasField("end") and not record.end.state and not record.end.is_clean


def may_come_late(record: job_record_pb2.StoredJob, now_ms: int) -> bool:
    """Whether such a call may be under way yet. S3 takes none that was signed more than 15 minutes before."""
    return is_unstored(record) and now_ms < record.end.ended_at_ms + _LATE_MAX_MS


def encode_record(record: job_record_pb2.StoredJob) -> bytes:
    """A record as it is stored."""
    return encode_frame(FORMAT, record.SerializeToString(deterministic=True))


def decode_record(content: bytes, path: str) -> job_record_pb2.StoredJob:
    """Inverse of ``encode_record``.

    Args:
        path: where it comes from, for messages.

    Raises:
        StoreCorrupt: it is damaged, no record, or of a newer format.
    """
    _, payload = decode_frame(FORMAT, content, path)
    try:
        return job_record_pb2.StoredJob.FromString(payload)
    except DecodeError as error:
        raise StoreCorrupt(f"{path} is not {FORMAT.noun}: {error}") from error


def digest_of(graph: bytes) -> str:
    """What a record names its graph by."""
    return hashlib.sha256(graph).hexdigest()


def graph_name(digest: str) -> str:
    """The name of a graph's object: two that differ never overwrite each other."""
    return f"{GRAPH_PREFIX}{digest[:_DIGITS_OF_NAME]}"


def decode_graph(content: bytes, digest: str, path: str) -> graph_pb2.JobGraph:
    """A graph as its record names it.

    Args:
        path: where it comes from, for messages.

    Raises:
        StoreCorrupt: it is another, or damaged.
    """
    if digest_of(content) != digest:
        raise StoreCorrupt(f"{path} does not hold the graph of its job: restore it from a backup")
    return graph_pb2.JobGraph.FromString(content)
