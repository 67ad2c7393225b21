"""What users have asked of a job under an id of their own: checkpoints and savepoints.

Asked for twice under one id, a thing is done once, and whoever asks later waits for the same end. What has ended
can be asked for as long as it is among the last ones; nobody's going away ends an operation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import structlog

from penstock.errors import JobNotFound, JobRejected, StreamError

ENDED_MAX: Final = 64
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class OperationKind(Enum):
    """What is done."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    STOP = "stop"


class OperationStatus(Enum):
    """How far it is."""

    IN_PROGRESS = "in progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class JobOperation:
    """One of them.

    Attributes:
        path: of a savepoint: the directory that it is, or is to be.
        error: why it failed.
        checkpoint_id: what was taken; 0 = nothing yet.
        is_uploaded: all of it was written anew, since it lies in another store.
    """

    operation_id: str
    kind: OperationKind
    path: str = ""
    status: OperationStatus = OperationStatus.IN_PROGRESS
    error: StreamError | None = None
    checkpoint_id: int = 0
    is_uploaded: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def result(self) -> JobOperation:
        """Waits for its end.

        Raises:
            StreamError: it failed.
        """
        await self.has_ended.wait()
        if self.error is not None:
            raise self.error
        return self


class OperationsRunner:
    """The operations of one job.

    Args:
        job_id: the job.
        in_order: runs actions of one lane one after the other.
    """

    def __init__(
        self,
        job_id: str,
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None] = lambda _lane, _action: (
            None
        ),
    ) -> None:
        self._job_id = job_id
        self._in_order = in_order
        self._operations: dict[str, JobOperation] = {}
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def begin(
        self, wanted: JobOperation, work: Callable[[JobOperation], Awaitable[None]]
    ) -> JobOperation:
        """The operation of this id; where there is none yet, begins it.

        Args:
            work: does it; a StreamError of it is what the operation fails with.

        Raises:
            JobRejected: the id cannot be one, or is another operation's.
        """
        if not _ID.fullmatch(wanted.operation_id):
            raise JobRejected(
                f"{wanted.operation_id[:80]!r} is no operation id: it must be up to 64 letters, digits, '-' "
                "and '_'"
            )
        known = self._operations.get(wanted.operation_id)
        if known is None:
            self._operations[wanted.operation_id] = wanted
            self._forget_old()
            self._in_order(f"operation {wanted.operation_id}", lambda: self._do(wanted, work))
            return wanted
        if (known.kind, known.path) != (wanted.kind, wanted.path):
            raise JobRejected(
                f"operation {known.operation_id} of job {self._job_id} is a {known.kind.value} "
                f"{known.path}".rstrip()
            )
        return known

    def find(self, operation_id: str) -> JobOperation:
        """The operation of this id.

        Raises:
            JobNotFound: there is none, or it ended long ago.
        """
        known = self._operations.get(operation_id)
        if known is None:
            raise JobNotFound(f"job {self._job_id} knows no operation {operation_id!r}")
        return known

    async def _do(
        self, operation: JobOperation, work: Callable[[JobOperation], Awaitable[None]]
    ) -> None:
        named = {"operation_id": operation.operation_id, "path": operation.path}
        try:
            await work(operation)
        except StreamError as error:
            operation.error, operation.status = error, OperationStatus.FAILED
            self._log.warning(f"{operation.kind.value}.failed", reason=str(error), **named)
        except asyncio.CancelledError:
            operation.error = StreamError(f"job {self._job_id} has ended")
            operation.status = OperationStatus.FAILED
            raise
        else:
            operation.status = OperationStatus.COMPLETED
            self._log.info(
                f"{operation.kind.value}.taken", checkpoint_id=operation.checkpoint_id, **named
            )
        finally:
            operation.has_ended.set()

    def _forget_old(self) -> None:
        ended = [id for id, one in self._operations.items() if one.has_ended.is_set()]
        for operation_id in ended[: max(0, len(ended) - ENDED_MAX)]:
            del self._operations[operation_id]
