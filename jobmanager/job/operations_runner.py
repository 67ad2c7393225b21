"""What users have asked for under an id of their own: checkpoints and savepoints of a job, drains of TaskManagers.

Asked for twice under one id, a thing is done once, and whoever asks later waits for the same end. What has ended
can be asked for as long as it is among the last ones; nobody's going away ends an operation. They are kept, in a
job's record or in one of their own, before anything is done and again at the end, so that the next JobManager knows them and goes on with
what has not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from jobmanager.job.job_operation import JobOperation, OperationStatus
from jobmanager.job.kept_operations import decode_operations, encode_operations
from penstock.errors import JobNotFound, JobRejected, NotLeader, StreamError

ENDED_MAX: Final = 64
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class OperationsRunner:
    """The operations of one job, or of the cluster.

    Args:
        owner: whose they are, for messages.
        in_order: runs actions of one lane one after the other.
        keep: writes what is kept; None = it ends with this JobManager.
        kept: what an earlier JobManager has written there.
        when_over: what those are told who wait when nobody works on it here any more.
    """

    def __init__(
        self,
        owner: str,
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None] = lambda _lane, _action: (
            None
        ),
        keep: Callable[[bytes], Awaitable[None]] | None = None,
        kept: bytes = b"",
        *,
        when_over: Callable[[], StreamError] | None = None,
    ) -> None:
        self._owner = owner
        self._when_over = when_over or (lambda: StreamError(f"{owner} has ended"))
        self._in_order = in_order
        self._keep = keep
        self._log = structlog.get_logger(__name__).bind(owner=owner)
        self._operations = {one.operation_id: one for one in self._known(kept)}

    def _known(self, kept: bytes) -> list[JobOperation]:
        """Damaged ones are no reason to hold the job back."""
        try:
            return decode_operations(kept)
        except StreamError as error:
            self._log.error("operations.unreadable", reason=str(error))
            return []

    def begin(
        self, wanted: JobOperation, work: Callable[[JobOperation], Awaitable[None]]
    ) -> JobOperation:
        """The operation of this id; where there is none yet, begins it.

        Args:
            work: does it; a StreamError of it is what the operation fails with.

        Raises:
            JobRejected: the id cannot be one, or is another operation's.
            StreamError: nothing is begun any more.
        """
        known = self.known(wanted)
        if known is not None:
            return known

        async def keep_and_work(operation: JobOperation) -> None:
            await self.keep()
            await work(operation)

        self.go_on(wanted, keep_and_work)
        self._operations[wanted.operation_id] = wanted
        self._forget_old()
        return wanted

    def known(self, wanted: JobOperation) -> JobOperation | None:
        """The operation of this id, also when its job has ended; None = nothing was asked for under it.

        Raises:
            JobRejected: the id cannot be one, or is another operation's.
        """
        if not _ID.fullmatch(wanted.operation_id):
            raise JobRejected(
                f"{wanted.operation_id[:80]!r} is no operation id: it must be up to 64 letters, digits, '-' "
                "and '_'"
            )
        known = self._operations.get(wanted.operation_id)
        if known is not None and not known.is_as(wanted):
            raise JobRejected(
                f"operation {known.operation_id} of {self._owner} is a {known.what}, and no {wanted.what}: choose "
                "another id"
            )
        return known

    def leave(self) -> None:
        """The JobManager ends, and its successor goes on with what has not ended."""
        self._when_over = left

    def end_all(self) -> None:
        """The job has ended, and nobody goes on with what had not."""
        for operation in self.under_way():
            place = f": look at {operation.path}" if operation.path else ""
            operation.error = StreamError(
                f"{self._owner} and its JobManager ended before it was known what came of it{place}"
            )
            operation.status = OperationStatus.FAILED
            operation.has_ended.set()

    def under_way(self) -> list[JobOperation]:
        """Those that have not ended."""
        return [one for one in self._operations.values() if not one.has_ended.is_set()]

    async def until_ended(self, limit_s: float) -> None:
        """Waits for the ends of all, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for operation in self.under_way():
                    await operation.has_ended.wait()

    def go_on(
        self, operation: JobOperation, work: Callable[[JobOperation], Awaitable[None]]
    ) -> None:
        """Begins, or begins again, what has not ended, and is kept."""
        self._in_order(f"operation {operation.operation_id}", lambda: self._do(operation, work))

    async def keep_taken_back(self, paths: Iterable[str]) -> None:
        """The job goes back behind savepoints whose output it has not committed: it is known before that happens.

        Raises:
            StoreTransient: it cannot be written now.
        """
        gone = set(paths)
        for operation in self.under_way():
            operation.is_taken_back = operation.is_taken_back or operation.path in gone
        if any(operation.is_taken_back for operation in self.under_way()):
            await self.keep()  # again, where it could not be

    async def keep(self) -> None:
        """Writes them all into the job's record.

        Raises:
            StoreTransient: it cannot be written now.
        """
        if self._keep is not None:
            await self._keep(self.kept())

    def kept(self) -> bytes:
        """All of them, as the job's record has them."""
        return encode_operations(self._operations.values())

    def find(self, operation_id: str) -> JobOperation:
        """The operation of this id.

        Raises:
            JobNotFound: there is none, or it ended long ago.
        """
        known = self._operations.get(operation_id)
        if known is None:
            raise JobNotFound(f"{self._owner} knows no operation {operation_id!r}")
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
            await self._keep_end(operation)
        else:
            operation.status = OperationStatus.COMPLETED
            self._log.info(
                f"{operation.kind.value}.taken", checkpoint_id=operation.checkpoint_id, **named
            )
            await self._keep_end(operation)
        finally:
            if operation.status is OperationStatus.IN_PROGRESS:  # ended from outside, or by a bug
                operation.error, operation.status = self._when_over(), OperationStatus.FAILED
            operation.has_ended.set()

    async def _keep_end(self, operation: JobOperation) -> None:
        """Where that fails, the next JobManager finds out again what has become of it."""
        try:
            await self.keep()
        except StreamError as error:
            self._log.warning(
                "operation.end_not_kept", operation_id=operation.operation_id, reason=str(error)
            )

    def _forget_old(self) -> None:
        ended = [id for id, one in self._operations.items() if one.has_ended.is_set()]
        for operation_id in ended[: max(0, len(ended) - ENDED_MAX)]:
            del self._operations[operation_id]


def left() -> StreamError:
    """What those are told who wait for what the next JobManager goes on with: that they ask again."""
    return NotLeader("the JobManager ends: its successor goes on with it", "")
