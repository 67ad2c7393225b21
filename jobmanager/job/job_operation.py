"""What a user has asked for under an id: a checkpoint, a savepoint, a stop of a job; a drain of a TaskManager."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from penstock.errors import StreamError
from penstock.storage.checkpoint_properties import BehindBarrier, SavepointFormat
from penstock.storage.savepoint import savepoint_name
from penstock.storage.store_names import substore


class OperationKind(Enum):
    """What is done."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    STOP = "stop"
    DRAIN = "drain"


class OperationStatus(Enum):
    """How far it is."""

    IN_PROGRESS = "in progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class JobOperation:
    """One of them.

    Attributes:
        path: of a savepoint: the directory that it is, or is to be; of a drain: the TaskManager.
        wanted: format of a savepoint, what happens behind the barrier of a stop, what becomes of what a TaskManager
            keeps; by its name.
        format: of the savepoint of a stop, by its name; "" = an earlier version has not noted it.
        checkpoint_id: what was taken; 0 = nothing yet.
        is_uploaded: all of it was written anew, since it lies in another store.
        progress: what it waits for.
        is_taken_back: the job has gone back behind the savepoint before its output was committed.
    """

    operation_id: str
    kind: OperationKind
    path: str = ""
    wanted: str = ""
    format: str = ""
    status: OperationStatus = OperationStatus.IN_PROGRESS
    error: StreamError | None = None
    checkpoint_id: int = 0
    is_uploaded: bool = False
    is_taken_back: bool = False
    progress: str = ""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def what(self) -> str:
        """What was asked for, for messages: "savepoint /kept/savepoint-1 (native)"."""
        words = ", ".join(one.lower() for one in (self.wanted, self.format) if one)
        how = f" ({words})" if words else ""
        return f"{self.kind.value} {self.path}".rstrip() + how

    def is_as(self, wanted: JobOperation) -> bool:
        """Whether another one of this id asks for the same; without a path it is meant where this one is."""
        is_there = wanted.path in ("", self.path)
        is_same = (self.kind, self.wanted) == (wanted.kind, wanted.wanted)
        return is_there and is_same and self.format in ("", wanted.format)

    async def result(self) -> JobOperation:
        """Waits for its end.

        Raises:
            StreamError: it failed.
        """
        await self.has_ended.wait()
        if self.error is not None:
            raise self.error
        return self


def savepoint_operation(
    job_id: str, operation_id: str, directory: str, format: SavepointFormat
) -> JobOperation:
    """A savepoint that is asked for.

    Args:
        directory: gets a directory for it; "" = nobody has named one.
    """
    path = _savepoint_path(job_id, operation_id, directory)
    return JobOperation(operation_id, OperationKind.SAVEPOINT, path, format.name)


def stop_operation(
    job_id: str, operation_id: str, directory: str, format: SavepointFormat, *, drain: bool
) -> JobOperation:
    """A stop that is asked for.

    Args:
        directory: as of ``savepoint_operation``.
        drain: event time ends first, so that windows fire.
    """
    path = _savepoint_path(job_id, operation_id, directory)
    behind = BehindBarrier.DRAIN if drain else BehindBarrier.HOLD
    return JobOperation(operation_id, OperationKind.STOP, path, behind.name, format.name)


def _savepoint_path(job_id: str, operation_id: str, directory: str) -> str:
    return directory and substore(directory, savepoint_name(job_id, operation_id))
