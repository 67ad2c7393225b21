"""What an attempt has written for consumers that begin when it is complete, told to the JobManager."""

from __future__ import annotations

from common.pb import internal_pb2
from taskmanager.task.subtask import Subtask


def written_by(subtask: Subtask | None) -> list[internal_pb2.WrittenPartition]:
    """Its complete blocking partitions; None = it has not been built."""
    sizes = {} if subtask is None else subtask.sealed_bytes
    return [internal_pb2.WrittenPartition(edge_id=id, size_bytes=n) for id, n in sizes.items()]
