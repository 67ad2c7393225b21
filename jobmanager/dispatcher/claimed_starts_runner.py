"""Claims of jobs that never began are given back, whatever has ended in between: the submission, a call to the storage, or
the JobManager.

What is claimed is noted first (``StartsStore``). Invariant: the note goes behind the job's record, or once all is given
back and no call is under way that may still claim it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final

import structlog

from common.pb import job_record_pb2
from jobmanager.checkpoint.store_calls_runner import HANGING_MAX, StoreCallsRunner, StoreSilent
from jobmanager.dispatcher.claimed_start_store import withdraw
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.stores.job_store import JobStore
from penstock.errors import Fenced, StoreTransient, StreamError

CALL_TIMEOUT_MS: Final = 20_000
PATIENCE_S: Final = 1.0
AT_ONCE: Final = 4
FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 60.0


class ClaimedStartsRunner:
    """Those of one JobManager.

    Args:
        store: has the notes, beside the jobs' records.
        turn: of a job id; whoever calls ``give_back``, ``undo``, ``leave`` or ``settle`` has it.
        start: runs something beside, until the JobManager ends.
    """

    def __init__(
        self,
        jobs: KnownJobs,
        store: JobStore,
        turn: Callable[[str], AbstractAsyncContextManager[None]],
        start: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._turn = turn
        self._start = start
        self.writers: list[StoreCallsRunner] = []
        """Whose calls, where they were given up on, may claim something yet, or store the job."""
        self._calls = StoreCallsRunner("what jobs have claimed", CALL_TIMEOUT_MS, lambda: None)
        self._noted: dict[str, job_record_pb2.StoredStart] = {}
        self._trying: dict[str, StoreCallsRunner] = {}
        self._log = structlog.get_logger(__name__)

    def note(self, start: job_record_pb2.StoredStart) -> None:
        """Before anything of it is claimed; blocks, and may be called from any thread.

        Raises:
            Fenced: another JobManager leads.
            StoreTransient: it cannot be noted now: nothing is to be claimed.
        """
        self._noted[start.job_id] = start
        self._store.starts.note(start)

    def check_leads(self) -> None:
        """As ``note``, for what is noted already; blocks.

        Raises: as ``note``.
        """
        self._store.check_leads()

    async def settle(self, job_id: str) -> None:
        """The job is stored, and has what it has claimed; a note that stays does no harm."""
        if self._noted.pop(job_id, None) is not None:
            self._start(self._remove(job_id))

    async def undo(self, job_id: str) -> None:
        """An earlier submission of the same job may not have come to its end.

        Raises:
            StreamError: what that has claimed cannot be given back now.
        """
        await self._give_back(self._calls, job_id)

    async def give_back_all(self, job_ids: Collection[str]) -> None:
        """Begins with what earlier JobManagers have left; returns when each was tried once, or after ``PATIENCE_S``."""
        if not job_ids:
            return
        tried, places = asyncio.Event(), asyncio.Semaphore(AT_ONCE)

        async def give_back_each() -> None:
            async with asyncio.TaskGroup() as tasks:
                for job_id in job_ids:
                    tasks.create_task(self._give_back_in_turn(job_id, places))
            tried.set()

        self._start(give_back_each())
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await tried.wait()

    async def _give_back_in_turn(self, job_id: str, places: asyncio.Semaphore) -> None:
        try:
            async with places, self._turn(job_id):
                if job_id not in self._jobs:
                    await self.give_back(job_id)
        except Exception as error:  # noqa: BLE001 - what is left of one job holds up no other
            self._crashed(job_id, error)

    def _crashed(self, job_id: str, error: Exception) -> None:
        self._log.error("start.give_back_crashed", job_id=job_id, exc_info=error)

    async def give_back(self, job_id: str, *, may_come: bool = True) -> None:
        """All is as it was before; what cannot be given back is logged, and tried again.

        Args:
            may_come: as of ``claimed_start_store.give_back``.
        """
        try:
            await self._give_all_back(self._calls, job_id, may_come)
        except StreamError as error:
            await self.give_back_later(job_id, error)

    async def give_back_later(self, job_id: str, error: StreamError) -> None:
        """As ``give_back``, where that is of no use now; one that leads no more leaves it to whoever does next."""
        start = self._noted.get(job_id)
        if isinstance(error, Fenced):
            if start is not None:
                await self._leave(start, error)
        elif job_id not in self._trying:
            self._trying[job_id] = StoreCallsRunner(f"job {job_id}", CALL_TIMEOUT_MS, lambda: None)
            self._start(self._try_again(job_id, error))

    async def _leave(self, start: job_record_pb2.StoredStart, error: Fenced) -> None:
        self._tell(start.job_id, error, "the next JobManager does, when it is started")
        try:
            await self._calls.run("note", lambda: self._store.starts.leave(start))
        except StreamError as again:
            self._tell(start.job_id, again, "nobody does")

    async def _try_again(self, job_id: str, error: StreamError) -> None:
        calls, pause_s = self._trying[job_id], FIRST_PAUSE_S
        try:
            while isinstance(error, StoreTransient):
                self._tell(job_id, error, f"tried again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                if calls.hanging or self._are_many_hanging:
                    continue
                async with self._turn(job_id):
                    if job_id in self._jobs:  # it has come again, and was accepted
                        return
                    try:
                        await self._give_all_back(calls, job_id)
                    except StreamError as again:
                        error = again
                    else:
                        return
            self._tell(job_id, error, "the next JobManager tries it, when it is started")
        except Exception as crash:  # noqa: BLE001 - what is left of one job holds up no other
            self._crashed(job_id, crash)
        finally:
            del self._trying[job_id]

    @property
    def _are_many_hanging(self) -> bool:
        return sum(calls.hanging for calls in self._trying.values()) >= HANGING_MAX

    def _tell(self, job_id: str, error: StreamError, then: str) -> None:
        start = self._noted.get(job_id)
        event, path = "start.not_given_back", "" if start is None else start.uri
        if start is None and self._store.may_have(job_id):
            event = "job.not_withdrawn"
        self._log.warning(event, job_id=job_id, path=path, reason=str(error), then=then)

    async def _give_all_back(
        self, calls: StoreCallsRunner, job_id: str, may_come: bool = True
    ) -> None:
        """What may be claimed yet, or stored, is not given back."""
        self._check_settled()
        await self._give_back(calls, job_id, may_come)
        self._check_settled()

    def _check_settled(self) -> None:
        if self._may_be_claimed_yet:
            raise StoreSilent("a call to the storage that was given up on may claim it yet")

    async def _give_back(self, calls: StoreCallsRunner, job_id: str, may_come: bool = True) -> None:
        def work() -> tuple[job_record_pb2.StoredStart | None, str]:
            start = self._store.starts.read(job_id)
            if start is not None:
                self._noted[job_id] = start
            return start, withdraw(self._store, job_id, start, may_come=may_come)

        start, left = await calls.run("give back", work)
        if start is None:
            self._noted.pop(job_id, None)
            return
        original = self._jobs.get(start.owner)
        if left and original is not None and original.record.left == "":
            original.record.left = left
        if self._may_be_claimed_yet:
            return
        await calls.run("remove", lambda: self._store.starts.remove(job_id))
        self._noted.pop(job_id, None)
        self._log.info("start.given_back", job_id=job_id, path=start.uri)

    @property
    def _may_be_claimed_yet(self) -> bool:
        return any(calls.hanging for calls in self.writers)

    async def _remove(self, job_id: str) -> None:
        try:
            await self._calls.run("remove", lambda: self._store.starts.remove(job_id))
        except StreamError as error:
            self._log.info("start.not_removed", job_id=job_id, reason=str(error))
