"""Goes on with the jobs of an earlier JobManager, or tells how they have ended; what cannot be read is tried again.

What runs of a job that cannot be read yet goes on meanwhile: as TaskManagers register, its slots are the job's. They
are freed where the job turns out to have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from common.clock import Clock
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.dispatcher.claimed_starts_runner import ClaimedStartsRunner
from jobmanager.dispatcher.ended_jobs_runner import EndedJobsRunner
from jobmanager.dispatcher.known_jobs import KnownJob, KnownJobs, Unreadable
from jobmanager.dispatcher.recovery import (
    JobEndedError,
    JobUnreadableError,
    cause_of_end,
    recovered,
)
from jobmanager.job.freed_slots_runner import free_slots
from jobmanager.job.job_description import JobDescription
from jobmanager.job.job_record import JobRecord
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.messages.job_state import JobState
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.stored_job import StoredJob
from penstock.config import Configuration
from penstock.errors import StreamError

FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 60.0


class RecoveryRunner:
    """Recovery of jobs.

    Args:
        config: of the cluster.
        store: has their records.
        calls: to that store, which may hang.
        starts: gives back what was claimed for jobs that have no record.
        artifacts: their code.
        cluster: where TaskManagers tell what they run of them.
        ends: takes those that have ended.
        begin: runs a job again, and returns its record.
        start: runs something beside, until the JobManager ends.
        slots_end_s: for how long slot processes may run on that this JobManager cannot end.
    """

    def __init__(
        self,
        config: Configuration,
        jobs: KnownJobs,
        store: JobStore,
        calls: StoreCallsRunner,
        starts: ClaimedStartsRunner,
        artifacts: ArtifactStore,
        cluster: ClusterRunner,
        ends: EndedJobsRunner,
        clock: Clock,
        begin: Callable[[JobDescription, StoredJob], JobRecord],
        start: Callable[[Coroutine[None, None, None]], None],
        slots_end_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._store = store
        self._calls = calls
        self._starts = starts
        self._artifacts = artifacts
        self._cluster = cluster
        self._ends = ends
        self._clock = clock
        self._begin = begin
        self._start = start
        self._slots_end_s = slots_end_s
        self._log = structlog.get_logger(__name__)
        self._is_over = False

    async def run(self) -> None:
        """Takes over all jobs that an earlier JobManager has left.

        Raises:
            StoreTransient: it cannot be found out which there are.
        """
        found = await self._calls.run("find the jobs", self._store.stored)
        await self._starts.give_back_all(self._store.unstored())
        for stored in await self._with_artifacts(found):
            self._recover(stored)

    async def _with_artifacts(self, found: Sequence[StoredJob]) -> Sequence[StoredJob]:
        """Looks for the code of all of them at once; where that cannot be done, says so."""
        unended = [stored for stored in found if not stored.has_ended]
        wanted = {artifact.id for stored in unended for artifact in stored.graph.artifacts}
        try:
            if wanted:
                await self._artifacts.find_missing(wanted)
        except StreamError as error:
            return [
                one if one.has_ended or one.problem else replace(one, problem=str(error))
                for one in found
            ]
        return found

    def stop(self) -> None:
        """Nothing is begun any more."""
        self._is_over = True

    def _recover(self, stored: StoredJob) -> None:
        job_id = stored.job_id
        before = self._jobs.get(job_id)
        try:
            job = recovered(stored, self._config, self._artifacts)
        except JobUnreadableError as error:
            if before is None:
                self._keep_unreadable(stored)
            unreadable = self._jobs[job_id].unreadable
            assert unreadable is not None, "it has been kept as such"
            unreadable.problem = f"the job cannot be gone on with yet: {error}"
            self._log.warning("job.unreadable", job_id=job_id, reason=str(error))
            return
        except JobEndedError as end:
            self._keep_ended(stored, end)
        else:
            self._begin(job, stored)
            self._log.info("job.recovered", job_id=job_id, name=stored.graph.name)
        if before is not None:  # another record has taken its place
            before.record.changed.set()

    def _keep_ended(self, stored: StoredJob, end: JobEndedError) -> None:
        now_ms = self._clock.now_ms()
        operations = OperationsRunner(f"job {stored.job_id}", kept=stored.record.operations)
        operations.end_all()
        record = JobRecord(
            stored.job_id,
            stored.graph,
            None,
            stored.record.submitted_at_ms,
            operations=operations,
            stored=stored.record,
        )
        record.end_cause = cause_of_end(end, stored.record.end.details, now_ms)
        record.enter(end.state, stored.record.end.ended_at_ms or now_ms)
        self._jobs[stored.job_id] = KnownJob(record, None, is_clean=stored.is_clean)
        self._start(self._clean_up(stored, end, record))

    async def _clean_up(self, stored: StoredJob, end: JobEndedError, record: JobRecord) -> None:
        await self._free_found(stored.job_id)
        if not stored.has_ended:
            self._log.warning(
                "job.lost", job_id=stored.job_id, state=end.state.name, reason=str(end)
            )
            await self._ends.note_end(record, end.state)
        if end.retained_directory:
            await self._ends.look_for_remains(record, end.retained_directory)
        if not stored.is_clean:
            # Slots that it had under another JobManager may not know yet.
            self._ends.clean_up(
                record,
                stored.graph,
                end.checkpoint_directory or end.retained_directory,
                slots_end_s=self._slots_end_s(),
                has_hidden_output=bool(end.retained_directory) or _is_uncommitted(stored, end),
                is_restorable=bool(end.retained_directory),
            )

    async def _free_found(self, job_id: str) -> None:
        """Nothing goes on of what was kept running while the job could not be read."""
        self._cluster.sought.end(job_id)
        for slots in self._cluster.held_slots(job_id).values():
            await free_slots(self._cluster, job_id, slots, self._log)

    def _keep_unreadable(self, stored: StoredJob) -> None:
        """The job has not ended: it is tried again until it can be gone on with, or is cancelled."""
        unreadable = Unreadable()
        record = JobRecord(
            stored.job_id,
            stored.graph,
            None,
            stored.record.submitted_at_ms,
            problem=lambda: unreadable.problem,
        )
        record.enter(JobState.RESTARTING, self._clock.now_ms())
        self._jobs[stored.job_id] = KnownJob(record, None, unreadable)
        self._cluster.sought.seek(stored.job_id)
        self._start(self._recover_later(stored.job_id, unreadable))

    async def _recover_later(self, job_id: str, unreadable: Unreadable) -> None:
        pause_s = FIRST_PAUSE_S
        while self._jobs[job_id].unreadable is unreadable:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await unreadable.again.wait()
            unreadable.again.clear()
            if self._is_over:
                return
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            try:
                stored = await self._calls.run("read", lambda: self._store.read(job_id))
            except StreamError as error:
                unreadable.problem = f"the job cannot be gone on with yet: {error}"
                continue
            if stored is None:  # it was never acknowledged, or was being removed
                self._jobs.pop(job_id).record.changed.set()
                self._jobs.count()
                await self._free_found(job_id)
                await self._starts.give_back_all(self._store.unstored())
                return
            found = await self._with_artifacts([stored])
            if unreadable.again.is_set():
                continue  # something has been noted since
            for one in found:
                self._recover(one)
            self._jobs.count()


def _is_uncommitted(stored: StoredJob, end: JobEndedError) -> bool:
    """Whether nobody will commit what is hidden; what a job without checkpoints had begun to commit stays."""
    if end.is_retained or stored.record.has_committed:
        return False
    if end.state is JobState.FAILED:
        # It may have taken checkpoints under a configuration that was another.
        return stored.has_ended and not stored.record.has_checkpoints
    return end.state is JobState.CANCELED and stored.record.is_cancelled
