"""The savepoints of one job: what their user has asked for, on its way through the coordinator into a directory.

asked for -> the directory is looked at -> the coordinator takes it, as a checkpoint -> its files are brought
together, its manifest is written -> the coordinator hears of it -> who asked is answered
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

import structlog

from common.clock import Clock
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner, LastStates
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.job.operations_runner import JobOperation
from jobmanager.messages import job_messages as m
from penstock.errors import Fenced, StoreTransient, StreamError, Unrecoverable
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.savepoint import MANIFEST_PATH

_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0


class SavepointsRunner:
    """Takes savepoints.

    Args:
        job_id: the job.
        store: of its own checkpoints.
        calls: makes calls that may hang.
        request: has the coordinator take one: request id, properties -> checkpoint id.
        post: takes events for the job's machine.
        fail: fails the job.
        pause: waits so many seconds; False where the job has ended meanwhile.
    """

    def __init__(
        self,
        job_id: str,
        store: CheckpointStoreRunner,
        calls: StoreCallsRunner,
        clock: Clock,
        *,
        request: Callable[[str, CheckpointProperties], Awaitable[int]],
        post: Callable[[m.JobEvent], None],
        fail: Callable[[StreamError], None],
        pause: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._store = store
        self._calls = calls
        self._clock = clock
        self._request = request
        self._post = post
        self._fail = fail
        self._pause = pause
        self._storing: tuple[int, asyncio.Future[None]] | None = None
        """The savepoint that is being written, and what is done once it is waited for no longer."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    async def take(self, operation: JobOperation, format: SavepointFormat) -> None:
        """Takes one into ``operation.path``.

        Raises:
            JobRejected: the job takes none, or the directory is not for it.
            CheckpointAborted: it began and did not complete; the job runs on.
            StreamError: it could not begin.
        """
        directory = self._store.savepoint(operation.path)
        begun = await self._calls.run("begin savepoint", directory.begin)
        if begun.checkpoint_id:
            operation.checkpoint_id = begun.checkpoint_id
            return
        operation.is_uploaded = begun.is_elsewhere
        properties = CheckpointProperties(
            CheckpointKind.SAVEPOINT, operation.path, is_full=begun.is_elsewhere, format=format
        )
        try:
            operation.checkpoint_id = await self._request(operation.operation_id, properties)
        except StreamError:
            await self._discard(operation.path)
            raise

    async def stop(self, operation: JobOperation, behind: BehindBarrier) -> None:
        """Stops the job with a savepoint in ``operation.path``.

        Raises:
            StreamError: it was not stopped, and runs on.
        """
        directory = self._store.savepoint(operation.path)
        begun = await self._calls.run("begin savepoint", directory.begin)
        if begun.checkpoint_id:
            operation.checkpoint_id = begun.checkpoint_id
            return
        operation.is_uploaded = begun.is_elsewhere
        properties = CheckpointProperties(target=operation.path, behind=behind)
        try:
            operation.checkpoint_id = await self._request(operation.operation_id, properties)
        except StreamError as error:
            await self._discard(operation.path)
            raise StreamError(f"the job was not stopped, and runs on: {error}") from error
        await self._mark_committed(operation.path)

    async def _mark_committed(self, path: str) -> None:
        directory = self._store.savepoint(path)
        for attempt in count():
            try:
                await self._calls.run("mark savepoint", directory.mark_committed)
            except StoreTransient as error:
                self._log.warning("savepoint.not_marked", path=path, reason=str(error))
            else:
                return
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(attempt, 16), _LAST_PAUSE_S)
            if not await self._pause(pause_s):
                raise StreamError(
                    f"the job has ended, and that its output is committed could not be noted beside {path}"
                )

    async def store(self, wanted: m.WriteManifest, states: LastStates) -> None:
        """Writes one that all tasks have acknowledged."""
        stored = wanted.stored
        checkpoint_id = stored.checkpoint_id
        directory = self._store.savepoint(stored.properties.target)
        given_up = asyncio.get_running_loop().create_future()
        self._storing = checkpoint_id, given_up

        def complete() -> None:
            self._store.verify()
            directory.complete(self._store.manifest(stored, wanted.done_splits, states))

        try:
            await self._calls.run("store savepoint", complete, given_up)
        except StoreSilent as error:
            self._post(c.StoreOutcomeUnknown(checkpoint_id, str(error), self._clock.now_ms()))
            await self._settle(stored)
        except (Fenced, Unrecoverable) as error:
            self._fail(error)
        except StreamError as error:
            self._post(c.CheckpointNotStored(checkpoint_id, str(error), self._clock.now_ms()))
        else:
            self._note_stored(checkpoint_id)
        finally:
            self._storing = None

    def give_up(self, checkpoint_id: int | None = None) -> bool:
        """What is being written, this one or any, is waited for no longer; False = it is not being written."""
        if self._storing is None or checkpoint_id not in (None, self._storing[0]):
            return False
        if not self._storing[1].done():
            self._storing[1].set_result(None)
        return True

    async def discard(self, effect: c.DiscardSavepoint) -> None:
        """Removes what was written for one that will not be complete."""
        await self._discard(effect.target, is_complete=effect.is_complete)

    async def _discard(self, path: str, *, is_complete: bool = False) -> None:
        directory = self._store.savepoint(path)
        try:
            await self._calls.run(
                "discard savepoint", lambda: directory.discard(is_complete=is_complete)
            )
        except StreamError as error:
            self._log.warning("savepoint.not_removed", path=path, reason=str(error))

    async def _settle(self, stored: c.StoreCheckpoint) -> None:
        """Finds out what has become of it, however long that takes; the job's tasks run on."""
        checkpoint_id = stored.checkpoint_id
        directory = self._store.savepoint(stored.properties.target)
        for attempt in count():
            with contextlib.suppress(StoreTransient):
                is_stored = await self._calls.run(
                    "settle savepoint", lambda: directory.settle(checkpoint_id)
                )
                self._log.info(
                    "savepoint.settled", checkpoint_id=checkpoint_id, is_stored=is_stored
                )
                if is_stored:
                    self._note_stored(checkpoint_id)
                else:
                    told = "its storage did not answer, and has not stored it"
                    now_ms = self._clock.now_ms()
                    self._post(c.CheckpointNotStored(checkpoint_id, told, now_ms))
                return
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(attempt, 16), _LAST_PAUSE_S)
            if not await self._pause(pause_s):
                return

    def _note_stored(self, checkpoint_id: int) -> None:
        self._post(c.CheckpointStored(checkpoint_id, MANIFEST_PATH, self._clock.now_ms()))
