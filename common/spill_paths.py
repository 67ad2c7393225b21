"""How kept partitions are named below a spill directory, on a disk or on shared storage.

TaskManagers write and read them, and a JobManager removes what lies on shared storage.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import InvariantViolation
from penstock.partition_id import PartitionId

INDEX_NAME: Final = "index"
"""Of a partition that is complete."""

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


PROMOTED_PREFIX: Final = "promoted="
"""What lists of promoted partitions begin with on shared storage; no job id does."""


def promoted_path(name: str, job_id: str) -> str:
    """The list of the partitions that a job has left behind under a name, on shared storage.

    Example:
        >>> promoted_path("clean", "job")
        'promoted=clean/job'
    """
    if not _SAFE_NAME.fullmatch(name):
        raise InvariantViolation(f"{name!r} cannot be the name of a directory")
    return f"{PROMOTED_PREFIX}{name}/{job_path(job_id)}"


def can_be_kept(job_id: str, partition_id: PartitionId) -> bool:
    """Whether there may be a directory for these names, which a peer has told."""
    names = (job_id, partition_id.edge_id)
    return all(_SAFE_NAME.fullmatch(name) is not None for name in names)


def job_path(job_id: str) -> str:
    """Everything that is kept for a job."""
    if not _SAFE_NAME.fullmatch(job_id):
        raise InvariantViolation(f"{job_id!r} cannot be the name of a directory")
    return job_id


def partition_path(job_id: str, partition_id: PartitionId) -> str:
    """Everything that is kept of a partition.

    Example:
        >>> partition_path("job", PartitionId("e0", "v0", subtask_index=2, attempt=7))
        'job/e0-7/part=2'
    """
    if not _SAFE_NAME.fullmatch(partition_id.edge_id):
        raise InvariantViolation(f"{partition_id.edge_id!r} cannot be the name of a directory")
    result = f"{partition_id.edge_id}-{partition_id.attempt}"
    return f"{job_path(job_id)}/{result}/part={partition_id.subtask_index}"


def subpartition_path(partition: str, subpartition_index: int) -> str:
    """The files of a subpartition, below the path of its partition."""
    return f"{partition}/sub={subpartition_index}"


def index_path(job_id: str, partition_id: PartitionId) -> str:
    """What is there when the partition is complete."""
    return f"{partition_path(job_id, partition_id)}/{INDEX_NAME}"
