"""Ends of jobs: noted before anybody is told, cleaned up behind, and forgotten when newer ones have taken their place.

A job that has ended is "ended, dirty" in its record until nothing is left of it that is to be deleted: its
checkpoints, and hidden output that nobody will commit. Then it is clean, and its record stays as long as the job is
listed, so that the next JobManager still knows how it ended. Where the record is damaged, the job ends all the same, and
nothing of it is deleted: with the record restored from a backup it is gone on with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

import structlog

from common.clock import Clock
from common.pb import job_record_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.dispatcher.recovery import restorable_from, still_restorable_from
from jobmanager.job.ended_checkpoints_runner import delete_checkpoints
from jobmanager.job.job_record import JobRecord
from jobmanager.job.swept_output_runner import sweep_output
from jobmanager.messages.job_state import JobState
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.job_store import JobStore
from penstock.errors import Fenced, StoreCorrupt, StreamError
from penstock.pb import graph_pb2

FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 60.0
ALONE_PATIENCE_S: Final = 10.0
LOOK_TIMEOUT_MS: Final = 5_000
"""How long who lists jobs waits for what has become of their checkpoints."""
_WITH_DAMAGED: Final = (
    "nothing of the job is deleted; restore the record from a backup while no JobManager runs, or remove it: the job is "
    "forgotten then"
)


class EndedJobsRunner:
    """What is done for jobs that have ended.

    Args:
        store: has their records.
        calls: to that store, which may hang.
        cluster: removes hidden output.
        start: runs something beside, until the JobManager ends.
        forget: a job is not listed any more.
        is_alone: no other JobManager can have its jobs.
    """

    def __init__(
        self,
        jobs: KnownJobs,
        store: JobStore,
        calls: StoreCallsRunner,
        cluster: ClusterRunner,
        clock: Clock,
        start: Callable[[Coroutine[None, None, None]], None],
        forget: Callable[[str], None],
        *,
        is_alone: bool,
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._calls = calls
        self._cluster = cluster
        self._clock = clock
        self._start = start
        self._forget = forget
        self._is_alone = is_alone
        self._looks = StoreCallsRunner("what jobs have left", LOOK_TIMEOUT_MS, lambda: None)
        self._noting: dict[str, asyncio.Future[None]] = {}
        """Jobs whose end is not stored yet; done once it is."""
        self._damaged: set[str] = set()
        """Jobs whose record is."""
        self._log = structlog.get_logger(__name__)

    async def note_end(self, record: JobRecord, state: JobState) -> None:
        """Returns when the job's end is safe: who is told of it can rely on it.

        Where JobManagers are elected that may take as long as it takes, since another may have the job. One that is
        alone has waited long enough after ``ALONE_PATIENCE_S``: it goes on trying, and says so.

        Raises:
            Fenced: the job is another leader's.
        """
        noting = asyncio.get_running_loop().create_future()
        self._noting[record.job_id] = noting

        async def note() -> None:
            try:
                await self._note_end(record, state)
            finally:
                del self._noting[record.job_id]
                noting.set_result(None)

        self._start(note())
        await asyncio.wait([noting], timeout=ALONE_PATIENCE_S if self._is_alone else None)

    async def _note_end(self, record: JobRecord, state: JobState) -> None:
        failure = record.failure
        record.ended_at_ms = self._clock.now_ms()
        end = job_record_pb2.StoredEnd(
            state=state.name,
            reason=failure.message if state is JobState.FAILED and failure is not None else "",
            ended_at_ms=record.ended_at_ms,
            details=record.details_at_end(),
        )
        history = record.history()

        def note() -> None:
            self._store.note_end(record.job_id, end, record.operations.kept(), history)

        await self._at_last("note the end", record, "job.end_not_stored", note)

    def keep(self, record: JobRecord) -> None:
        """Nothing of the job is to be deleted."""
        self._start(self._note_clean(record))

    def clean_up(
        self,
        record: JobRecord,
        graph: graph_pb2.JobGraph,
        directory: str,
        writers: StoreCallsRunner | None = None,
        slots_end_s: float = 0.0,
        *,
        has_hidden_output: bool = False,
        is_restorable: bool = False,
    ) -> None:
        """Begins to delete what is left of a job; see ``delete_checkpoints``.

        Args:
            directory: of its checkpoints; "" = there are none.
            has_hidden_output: there may be hidden output that nobody will commit.
            is_restorable: what it can be started again from stays.
        """
        if record.job_id in self._damaged:
            return
        if not directory and not has_hidden_output:
            self.keep(record)
            return

        async def clean() -> None:
            await delete_checkpoints(
                record.job_id,
                graph,
                directory,
                self._store,
                self._clock.now_ms,
                writers=writers,
                slots_end_s=slots_end_s,
                sweep=partial(sweep_output, record.job_id, graph, self._cluster)
                if has_hidden_output
                else None,
                is_restorable=is_restorable,
            )
            await self._note_clean(record)

        self._start(clean())

    async def look_for_remains(self, record: JobRecord, directory: str) -> None:
        """Finds out what an ended job can be started from."""

        def look() -> None:
            try:
                record.left = restorable_from(directory, record.job_id)
            except StoreCorrupt as error:  # of its checkpoints, and not of its record
                self._log.error("job.remains_damaged", job_id=record.job_id, reason=str(error))

        await self._at_last("look for checkpoints", record, "job.remains_unreadable", look)

    async def look_again(self) -> None:
        """Finds out which ended jobs can still be started again; what is not known in time stays as it was."""
        known = [
            (one.record, path)
            for one in self._jobs.values()
            if (path := one.record.restorable_from())
        ]

        def look() -> None:
            for record, path in known:
                is_others = record.begins_with == path
                left = still_restorable_from(path, record.job_id, is_others=is_others)
                found.append((record, path, left))

        found: list[tuple[JobRecord, str, str]] = []
        if known:
            try:
                await self._looks.run("look for checkpoints", look)
            except StreamError as error:
                self._log.warning("jobs.remains_unreadable", reason=str(error))
        for record, path, left in found:
            if record.restorable_from() == path:  # else it has been claimed meanwhile
                record.left = left

    def evict(self) -> bool:
        """Forgets the jobs that ended first, where too many are kept; True when there were such."""
        evicted = self._jobs.surplus()
        for job_id in evicted:
            job = self._jobs.pop(job_id)
            self._forget(job_id)
            self._damaged.discard(job_id)
            if job.is_clean:
                self._start(self._remove(job.record))
        self._jobs.count()
        return bool(evicted)

    async def _note_clean(self, record: JobRecord) -> None:
        if (noting := self._noting.get(record.job_id)) is not None:
            await noting

        def note() -> None:
            self._store.note_clean(record.job_id, record.operations.kept())

        await self._at_last("note that it is clean", record, "job.not_clean", note)
        if record.job_id in self._damaged:
            return
        job = self._jobs.get(record.job_id)
        if job is None or job.record is not record:  # newer ones have taken its place
            await self._remove(record)
        else:
            job.is_clean = True

    async def _remove(self, record: JobRecord) -> None:
        def remove() -> None:
            self._store.remove(record.job_id)

        await self._at_last("remove", record, "job.not_removed", remove)

    async def _at_last(
        self, what: str, record: JobRecord, event: str, work: Callable[[], None]
    ) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._calls.run(what, work)
            except Fenced:
                raise
            except StoreCorrupt as error:
                self._damaged.add(record.job_id)
                record.unstored = f"{error}; {_WITH_DAMAGED}"
                self._log.error(event, job_id=record.job_id, reason=record.unstored)
                return
            except StreamError as error:
                self._log.warning(event, job_id=record.job_id, retry_s=pause_s, reason=str(error))
                record.unstored = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                record.unstored = ""
                return
