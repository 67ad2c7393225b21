"""Tells the next JobManager what has become of a job: failures, restarts, checkpoints.

Nobody waits for it, nor for storage that hangs. What failed is noted at once, all else a second later at the earliest, together with whatever has
come until then; what is noted of the job meanwhile for other reasons takes it along. What an earlier JobManager has
left stays as it is until it is known what of the job goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from common.outage_log import OutageLog
from common.pb import job_record_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.job_history import JobHistory
from jobmanager.job.job_master import JobMaster
from jobmanager.job.kept_history import encode_history
from jobmanager.stores.job_store import JobStore
from penstock.errors import StreamError

_LANE: Final = "history"
_PAUSE_S: Final = 1.0
_LAST_TIMEOUT_S: Final = 1.0
_CALL_TIMEOUT_MS: Final = 20_000


class HistoryRunner:
    """The history of one job.

    Args:
        master: its machine.
        directory: its own in the checkpoint store; "" = the JobManager's memory.
        earlier: what is known from earlier JobManagers.
        jobs: keeps the record; None where the job ends with this JobManager.
        in_order: runs actions of one lane one after the other.
    """

    def __init__(
        self,
        job_id: str,
        master: JobMaster,
        directory: str,
        gauges: CheckpointGauges,
        earlier: JobHistory,
        jobs: JobStore | None,
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._job_id = job_id
        self._master = master
        self._directory = directory
        self._gauges = gauges
        gauges.numbers = earlier.numbers
        self.running_at_ms: Callable[[], int] = lambda: earlier.running_at_ms
        """When all of it ran for the first time; 0 = it has not."""
        self._jobs = jobs
        self._in_order = in_order
        self._calls = StoreCallsRunner(
            f"job {job_id}", _CALL_TIMEOUT_MS, lambda: None, hanging_max=1
        )
        self._seen = self._changes()
        self._timer: asyncio.TimerHandle | None = None
        self._is_noting = self._is_away = False
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self._notes = OutageLog(self._log, "history.not_noted", "history.noted_again", "warning")

    def _changes(self) -> tuple[int, ...]:
        own, numbers = self._master.history_changes, self._gauges.numbers
        return (*own, numbers.completed, numbers.failed) if own else ()

    def encoded(self) -> job_record_pb2.StoredHistory:
        """As it is noted."""
        return encode_history(
            self._master, self._directory, self._gauges.numbers, self.running_at_ms()
        )

    def note(self) -> None:
        """The job may have moved: begins to note what is new."""
        seen, now = self._seen, self._changes()
        if self._jobs is None or self._is_noting or not now or now == seen:
            return
        has_failed = now[0] != (seen[0] if seen else 0)
        if has_failed and not self._is_away:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._begin)

    def _begin(self) -> None:
        self.close()
        if not self._is_noting:
            self._is_noting = True
            self._in_order(_LANE, self._note)

    async def _note(self) -> None:
        jobs, changes = self._jobs, self._changes()
        try:
            if jobs is not None and changes:
                self._seen = changes
                await self._write(jobs)
                self._is_away = False
                self._notes.worked()
        except StreamError as error:
            self._seen, self._is_away = (), True  # what comes next tells it all
            self._notes.failed(reason=str(error))
        self._is_noting = False
        self.note()

    async def _write(self, jobs: JobStore) -> None:
        write = partial(jobs.note_history, self._job_id, self.encoded())
        await self._calls.run("note the history", write)

    async def leave(self) -> None:
        """This JobManager is about to end, and leaves the job to the next one."""
        self.close()
        jobs, changes = self._jobs, self._changes()
        if jobs is None or not changes or changes == self._seen:
            return
        try:
            async with asyncio.timeout(_LAST_TIMEOUT_S):
                await self._write(jobs)
        except (StreamError, TimeoutError) as error:
            self._log.warning("history.not_noted", reason=str(error))

    def close(self) -> None:
        """Waits for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
