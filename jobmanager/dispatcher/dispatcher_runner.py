"""Takes jobs in, runs one actor per job, answers questions about them.

A JobManager that stops suspends the jobs that its successor can go on with, and fails the others; one
that starts goes on with what it finds (``recovery.py``).

Invariants: a job that was acknowledged is stored; submitting a job id again changes nothing; a bug
in one job's actor ends that job only (quarantine: it fails, its story is logged, its slots are
freed); at most ``jobmanager.retained-jobs`` ended jobs are kept, those that ended first go first.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from common.clock import Clock
from common.metrics import NamedMetrics
from common.pb import internal_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.dispatcher.job_start_runner import (
    JobStart,
    check_takes_checkpoints,
    prepare_start,
    starts_from,
)
from jobmanager.dispatcher.recovery import (
    JobEndedError,
    JobUnreadableError,
    cause_of_end,
    recovered,
    restorable_from,
)
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.failure_enricher import FailureLabels
from jobmanager.job.checkpoint_gauges import JobCheckpointNumbers
from jobmanager.job.ended_checkpoints_runner import delete_checkpoints
from jobmanager.job.job_checkpoints_runner import JobCheckpointsRunner
from jobmanager.job.job_description import (
    JobDescription,
    check_checkpoint_directory,
    describe,
)
from jobmanager.job.job_master_runner import (
    JobMasterRunner,
    free_slots,
    quarantine_cause,
)
from jobmanager.job.job_operation import JobOperation
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_record import JobRecord
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.job.swept_output_runner import sweep_output
from jobmanager.messages import job_events
from jobmanager.messages.job_state import JobState
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import cause_of_error, event_of
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.job_store import JobStore, UnfinishedJob
from penstock.config import Configuration
from penstock.errors import JobNotFound, JobRejected, StoreTransient, StreamError
from penstock.graph.plan_text import what_grows
from penstock.pb import client_pb2, graph_pb2
from penstock.storage.checkpoint_properties import SavepointFormat

_T = TypeVar("_T")

_METRICS_AFTER_END_MS = 60_000
_OF_FAILURES = (JobState.RESTARTING, JobState.FAILING, JobState.FAILED)
_STOP_TIMEOUT_S = 2.0
_ABANDON_TIMEOUT_S = 1.0
_SLOT_KILL_MARGIN_S = 10.0
_UNREADABLE_FIRST_PAUSE_S = 1.0
_UNREADABLE_LAST_PAUSE_S = 60.0
_CHECK_TIMEOUT_MS = 20_000  # less than clients wait for an answer


@dataclass(slots=True)
class _Unreadable:
    """A job of an earlier JobManager that cannot be gone on with yet."""

    problem: str = ""
    again: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to be tried at once."""


@dataclass(slots=True)
class _Job:
    record: JobRecord
    runner: JobMasterRunner | None
    unreadable: _Unreadable | None = None
    last_numbers: JobCheckpointNumbers | None = None  # of a runner that is gone

    @property
    def numbers(self) -> JobCheckpointNumbers | None:
        runner = self.runner
        if runner is None:
            return self.last_numbers
        return JobCheckpointNumbers(
            self.record.job_id,
            self.record.name,
            self.record.ended,
            runner.master.restarts,
            runner.master.speculation.started,
            runner.master.speculation.won,
            runner.master.restarts_by_region,
            runner.dropped,
            runner.checkpoints.gauges.numbers,
        )

    def is_measured(self, now_ms: int) -> bool:
        """It runs, or ended within the last minute."""
        return not self.record.ended or self.record.ended_at_ms >= now_ms - _METRICS_AFTER_END_MS


class DispatcherRunner:
    """All jobs of the cluster.

    Args:
        config: of the cluster.
        cluster: TaskManagers and slots.
        artifacts: uploaded code and data.
        store: graphs of the jobs; names the leader epoch.
        results: rows of collect sinks.
        clock: where the time comes from.
        labels: of failures.
    """

    def __init__(
        self,
        config: Configuration,
        cluster: ClusterRunner,
        artifacts: ArtifactStore,
        store: JobStore,
        results: ResultsStore,
        clock: Clock,
        labels: FailureLabels,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._artifacts = artifacts
        self._store = store
        self._results = results
        self._clock = clock
        self._labels = labels
        self._jitter = partial(random.Random().uniform, -1.0, 1.0)
        self._log = structlog.get_logger(__name__)
        self._jobs: dict[str, _Job] = {}
        self._checks = StoreCallsRunner("submitted jobs", _CHECK_TIMEOUT_MS, lambda: None)
        self._kept_records: set[str] = set()
        """Jobs that have ended and can be started again: their records stay as long as they are listed."""
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.why_not_serving = "the JobManager is starting"
        """ "" while jobs are taken; any thread may read it."""
        self.dropped_reports = 0
        self.counts: dict[str, int] = {}
        """State's name -> jobs; replaced as a whole, so that any thread may read it."""

    # ------------------------------------------------------------ life

    async def run(self, started: asyncio.Event) -> None:
        """Runs the actors until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for unfinished in await asyncio.to_thread(self._store.unfinished):
                self._recover(unfinished)
            self._evict()
            await self._sweep_artifacts()
            self.why_not_serving = ""
            started.set()
            await asyncio.Event().wait()

    def _recover(self, unfinished: UnfinishedJob) -> None:
        """Goes on with a job of an earlier JobManager, or tells how it has ended."""
        job_id, graph, now_ms = unfinished.job_id, unfinished.graph, self._clock.now_ms()
        before = self._jobs.get(job_id)
        try:
            job = recovered(unfinished, self._config, self._artifacts)
        except JobUnreadableError as error:
            if before is None:
                self._keep_unreadable(unfinished)
            unreadable = self._jobs[job_id].unreadable
            assert unreadable is not None, "it has been kept as such"
            unreadable.problem = f"the job cannot be gone on with yet: {error}"
            self._log.warning("job.unreadable", job_id=job_id, reason=str(error))
            return
        except JobEndedError as end:
            operations = OperationsRunner(job_id, kept=unfinished.operations)
            operations.end_all()
            record = JobRecord(
                job_id, graph, None, unfinished.submitted_at_ms, operations=operations
            )
            record.end_cause = cause_of_end(end, now_ms)
            record.enter(end.state, unfinished.ended_at_ms or now_ms)
            self._jobs[job_id] = _Job(record, None)
            if end.retained_directory:
                self._kept_records.add(job_id)
                self._start(self._look_for_remains(record, end.retained_directory))
                self._wake_watchers(before)
                return
            # Slots that it had under another JobManager may not know yet.
            self._delete_checkpoints(
                job_id,
                graph,
                end.checkpoint_directory,
                slots_end_s=self._slots_end_s,
                # What a job without checkpoints had begun to commit stays, as that of a failed one.
                has_hidden_output=unfinished.is_cancelled
                and end.state is JobState.CANCELED
                and not end.is_retained
                and not unfinished.has_committed,
            )
            self._log.warning("job.lost", job_id=job_id, state=end.state.name, reason=str(end))
            self._wake_watchers(before)
            return
        options = self._options(
            job, unfinished.first_attempt, is_recovered=True, operations=unfinished.operations
        )
        record = self._begin(job, unfinished.submitted_at_ms, options)
        record.enter(JobState.RESTARTING, now_ms)
        self._log.info("job.recovered", job_id=job_id, name=graph.name)
        self._wake_watchers(before)

    @staticmethod
    def _wake_watchers(before: _Job | None) -> None:
        if before is not None:  # another record has taken its place
            before.record.changed.set()

    def _keep_unreadable(self, unfinished: UnfinishedJob) -> None:
        """The job has not ended: it is tried again until it can be gone on with, or is cancelled."""
        unreadable = _Unreadable()
        record = JobRecord(
            unfinished.job_id,
            unfinished.graph,
            None,
            unfinished.submitted_at_ms,
            problem=lambda: unreadable.problem,
        )
        record.enter(JobState.RESTARTING, self._clock.now_ms())
        self._jobs[unfinished.job_id] = _Job(record, None, unreadable)
        self._start(self._recover_later(unfinished.job_id, unreadable))

    async def _recover_later(self, job_id: str, unreadable: _Unreadable) -> None:
        pause_s = _UNREADABLE_FIRST_PAUSE_S
        while self._jobs[job_id].unreadable is unreadable:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await unreadable.again.wait()
            unreadable.again.clear()
            if self._stopping:
                return
            pause_s = min(2 * pause_s, _UNREADABLE_LAST_PAUSE_S)
            self._recover(await asyncio.to_thread(self._store.read, job_id))
            self._count()

    async def _look_for_remains(self, record: JobRecord, directory: str) -> None:
        """Finds out what an ended job can be started from; where nothing is left, its record goes."""
        pause_s = _UNREADABLE_FIRST_PAUSE_S
        while not self._stopping:
            try:
                look = partial(restorable_from, directory, record.job_id)
                record.left = await self._checks.run("look for checkpoints", look)
            except StreamError as error:
                self._log.warning(
                    "job.remains_unreadable",
                    job_id=record.job_id,
                    retry_s=pause_s,
                    reason=str(error),
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _UNREADABLE_LAST_PAUSE_S)
                continue
            if not record.left:
                self._forget_record(record.job_id)
            return

    def _forget_record(self, job_id: str) -> None:
        self._kept_records.discard(job_id)
        self._try_to_remove(job_id)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None, "jobs are known while the dispatcher runs"
        self._tasks.create_task(work)

    @property
    def _slots_end_s(self) -> float:
        """How long slot processes may run on that this JobManager cannot end."""
        silence_ms = (
            self._config.heartbeat_timeout_ms + self._config.taskmanager_jobmanager_grace_ms
        )
        return silence_ms / 1000 + _SLOT_KILL_MARGIN_S

    def _delete_checkpoints(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        directory: str,
        writers: StoreCallsRunner | None = None,
        slots_end_s: float = 0.0,
        *,
        has_hidden_output: bool = False,
    ) -> None:
        """The job's record goes once its checkpoints are gone, and hidden output that nobody will commit; "" =
        there are no checkpoints to delete."""
        if not directory and not has_hidden_output and self._try_to_remove(job_id):
            return
        assert self._tasks is not None, "jobs end while the dispatcher runs"
        sweep = partial(sweep_output, job_id, graph, self._cluster)
        self._tasks.create_task(
            delete_checkpoints(
                job_id,
                graph,
                directory,
                self._store,
                self._clock.now_ms,
                writers=writers,
                slots_end_s=slots_end_s,
                sweep=sweep if has_hidden_output else None,
            )
        )

    async def stop(self) -> None:
        """Suspends or fails what still runs, and waits a few seconds until it has ended."""
        self._stopping = True
        self.why_not_serving = "the JobManager is stopping"
        cause = FailureCause(
            "Unrecoverable", "JobManager stopped", timestamp_ms=self._clock.now_ms()
        )
        for job in self._jobs.values():
            if job.runner is not None and job.runner.outlives_jobmanager:
                job.runner.post(job_events.SuspendRequested())
            elif job.runner is not None:
                job.runner.post(job_events.FailureRequested(cause))
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._idle.wait()
        except TimeoutError:
            await self._abandon([id for id, job in self._jobs.items() if job.runner is not None])

    async def _abandon(self, job_ids: list[str]) -> None:
        """Ends the slot processes of jobs that did not end in time."""
        self._log.warning("dispatcher.jobs_abandoned", job_ids=job_ids)
        try:
            async with asyncio.timeout(_ABANDON_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for job_id in job_ids:
                    for slots in self._cluster.held_slots(job_id).values():
                        tasks.create_task(free_slots(self._cluster, job_id, slots, self._log))
        except TimeoutError:
            self._log.warning("dispatcher.slots_abandoned", job_ids=job_ids)

    # ------------------------------------------------------------ submission

    async def submit(self, job_id: str, graph: graph_pb2.JobGraph) -> None:
        """Accepts a job; a job id that is known already changes nothing.

        Raises:
            JobRejected: the graph, its configuration or its code cannot be accepted.
            ProtocolMismatch: a TaskManager cannot read the job's code.
        """
        if job_id in self._jobs:
            return
        self._check_not_stopping()
        start = await self._start_of(job_id, graph)
        graph = graph if start is None else start.graph
        job = describe(job_id, graph, self._config, self._artifacts, self._cluster.facts)
        await self._check_store(job)
        if start is not None:
            check_takes_checkpoints(job)
        # While that was waited for, it may have come once more.
        if job_id in self._jobs:
            return
        self._check_not_stopping()
        self._cluster.partitions.check_persisted(graph)
        if start is not None and start.is_claim:
            await self._check("claim", start.point.uri, graph.name, start.claim)
        self._store.save(job_id, graph)
        self._begin(job, self._clock.now_ms(), self._options(job))
        self._log.info("job.accepted", job_id=job_id, name=graph.name)
        if job.settings.warning:
            self._log.warning("job.without_checkpoints", job_id=job_id, reason=job.settings.warning)
        for line in what_grows(graph):
            self._log.warning("job.keeps_every_key", job_id=job_id, reason=line)

    async def _start_of(self, job_id: str, graph: graph_pb2.JobGraph) -> JobStart | None:
        """What the job starts from; None = from nothing."""
        path = starts_from(graph, self._config)
        if not path:
            return None
        look = partial(
            prepare_start, job_id, graph, self._config, self.has_unended, self._has_ended
        )
        return await self._check("start", path, graph.name, look)

    async def _check(self, what: str, path: str, name: str, work: Callable[[], _T]) -> _T:
        """Not on the event loop, as ``_check_store``."""
        try:
            return await self._checks.run(what, work)
        except StoreSilent as error:
            raise JobRejected(
                f"job {name!r}: {path}, which it is to start from, has not answered for "
                f"{_CHECK_TIMEOUT_MS // 1000} s: see whether its disk or its mount hangs, and submit the job "
                "again"
            ) from error

    def _check_not_stopping(self) -> None:
        if self._stopping:
            raise JobRejected("the JobManager is stopping: submit the job to its successor")

    async def _check_store(self, job: JobDescription) -> None:
        """Not on the event loop: a mount that hangs holds up nobody else."""
        if not job.checkpoint_directory:
            return
        try:
            await self._checks.run("check", partial(check_checkpoint_directory, job))
        except StoreSilent as error:
            raise JobRejected(
                f"job {job.graph.name!r}: {job.checkpoint_directory}, where its checkpoints are to be "
                f"kept, has not answered for {_CHECK_TIMEOUT_MS // 1000} s: see whether its disk or its "
                "mount hangs, and submit the job again"
            ) from error

    def _options(
        self,
        job: JobDescription,
        first_attempt: int = 0,
        *,
        is_recovered: bool = False,
        operations: bytes = b"",
    ) -> JobOptions:
        return job.options(
            first_attempt,
            is_recovered,
            operations,
            leader_epoch=self._store.leader_epoch,
            jitter=self._jitter,
            labels=self._labels,
        )

    def _begin(self, job: JobDescription, submitted_at_ms: int, options: JobOptions) -> JobRecord:
        job_id = job.job_id
        runner = JobMasterRunner(
            job,
            self._cluster,
            self._store.leader_epoch,
            self._clock,
            lambda state: self._publish(job_id, state),
            self._store,
            self._results,
            options,
        )
        record = JobRecord(
            job_id,
            job.graph,
            runner.master,
            submitted_at_ms,
            job.checkpoint_directory,
            slot_wait=lambda: self._cluster.slot_wait(job_id),
            problem=lambda: runner.checkpoints.problem,
            repeated=runner.checkpoints.repeated,
            operations=runner.checkpoints.operations,
            has_discarded=lambda: runner.checkpoints.is_discarded,
            started_from=lambda: runner.checkpoints.started_from,
        )
        self._jobs[job_id] = _Job(record, runner)
        self._results.open(job_id, record.collect_limits, job.settings.checkpoints is not None)
        self._idle.clear()
        self._count()
        assert self._tasks is not None, "jobs are run while the dispatcher runs"
        self._tasks.create_task(self._supervise(job, runner))
        return record

    async def _supervise(self, job: JobDescription, runner: JobMasterRunner) -> None:
        """Runs a job's actor; whatever goes wrong in it, or at its end, stays in here."""
        try:
            await self._run_to_end(job, runner)
        except Exception as error:  # noqa: BLE001 - the boundary of a job
            self._log.error("job.end_crashed", job_id=job.job_id, exc_info=error)

    async def _run_to_end(self, job: JobDescription, runner: JobMasterRunner) -> None:
        job_id = job.job_id
        try:
            await runner.run()
        except Exception as error:  # noqa: BLE001 - the boundary of a job's actor
            self._log.error("job.quarantined", job_id=job_id, story=runner.story(), exc_info=error)
            await self._quarantine(job_id, error)
            if self._jobs[job_id].record.restorable_from():
                self._kept_records.add(job_id)
            else:
                self._delete_checkpoints(job_id, job.graph, "")
        else:
            record = self._jobs[job_id].record
            if record.ended and record.restorable_from() and not runner.has_unswept_output:
                self._kept_records.add(job_id)
            elif record.ended:
                self._delete_checkpoints(
                    job_id,
                    job.graph,
                    job.checkpoint_directory if runner.checkpoints.is_discarded else "",
                    runner.checkpoints.calls,
                    self._slots_end_s if runner.has_lost_slots else 0.0,
                    has_hidden_output=runner.has_unswept_output,
                )
        finally:
            known = self._jobs[job_id]
            known.last_numbers, known.runner = known.numbers, None
            if all(job.runner is None for job in self._jobs.values()):
                self._idle.set()
            has_evicted = self._evict()
        if has_evicted:
            await self._sweep_artifacts()

    async def _sweep_artifacts(self) -> None:
        # What a job needs whose graph cannot be read is not known.
        if all(job.unreadable is None for job in self._jobs.values()):
            in_use = (job.record.artifact_ids for job in self._jobs.values())
            await self._artifacts.sweep(frozenset().union(*in_use))

    def _try_to_remove(self, job_id: str) -> bool:
        """Removes what is stored of a job that has ended; False = it cannot be removed now."""
        try:
            self._store.remove(job_id)
        except StoreTransient as error:
            self._log.warning("job.not_removed", job_id=job_id, reason=str(error))
            return False
        return True

    async def _quarantine(self, job_id: str, error: Exception) -> None:
        record = self._jobs[job_id].record
        if not record.ended:
            record.end_cause = quarantine_cause(error, self._clock.now_ms())
            self._publish(job_id, JobState.FAILED)
        for slots in self._cluster.held_slots(job_id).values():
            await free_slots(self._cluster, job_id, slots, self._log)

    def _publish(self, job_id: str, state: JobState) -> None:
        record = self._jobs[job_id].record
        record.enter(state, self._clock.now_ms())
        self._log.info(
            "job.state_changed",
            job_id=job_id,
            state=state.name,
            reason=record.failure.message if record.failure and state in _OF_FAILURES else "",
        )
        if record.ended:
            self._results.end(job_id, state is JobState.FINISHED)
            self._note_end(job_id, state)
        self._count()

    def _note_end(self, job_id: str, state: JobState) -> None:
        """Nobody runs the job again; where its checkpoints are to be deleted, a successor may have to."""
        record = self._jobs[job_id].record
        if state is not JobState.FAILED or record.restorable_from():
            failure = record.failure
            reason = failure.message if state is JobState.FAILED and failure is not None else ""
            try:
                self._store.note_end(job_id, state.name, reason)
            except StoreTransient as error:
                self._log.warning("job.end_not_stored", job_id=job_id, reason=str(error))
            else:
                return
        self._try_to_remove(job_id)  # again when its actor has ended

    def _evict(self) -> bool:
        """Forgets the jobs that ended first, where too many are kept; True when there were such."""
        ended = [id for id, job in self._jobs.items() if job.record.ended and job.runner is None]
        ended.sort(key=lambda job_id: self._jobs[job_id].record.ended_at_ms)
        evicted = ended[: max(0, len(ended) - self._config.jobmanager_retained_jobs)]
        for job_id in evicted:
            del self._jobs[job_id]
            self._results.forget(job_id)
            if job_id in self._kept_records:
                self._forget_record(job_id)
        self._count()
        return bool(evicted)

    def _count(self) -> None:
        self.counts = dict(Counter(job.record.state.name for job in self._jobs.values()))

    # ------------------------------------------------------------ questions and orders of clients

    def records(self) -> list[JobRecord]:
        """All jobs, in order of submission."""
        return [job.record for job in self._jobs.values()]

    def has_unended(self, job_id: str) -> bool:
        """True for a job that is known and has not ended."""
        job = self._jobs.get(job_id)
        return job is not None and not job.record.ended

    def _has_ended(self, job_id: str) -> bool:
        job = self._jobs.get(job_id)
        return job is not None and job.record.ended

    def find(self, job_id: str) -> JobRecord:
        """The job of this id, or of this unique beginning of an id.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        return self._find(job_id).record

    def _find(self, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is not None:
            return job
        matches = [id for id in self._jobs if job_id and id.startswith(job_id)]
        if len(matches) == 1:
            return self._jobs[matches[0]]
        if matches:
            raise JobNotFound(f"{job_id} is the beginning of {len(matches)} jobs: write more of it")
        raise JobNotFound(
            f"there is no job {job_id or '(empty id)'}; only the last "
            f"{self._config.jobmanager_retained_jobs} ended jobs are kept (jobmanager.retained-jobs)"
        )

    async def watch(self, job_id: str, interval_ms: int) -> AsyncIterator[client_pb2.JobDetails]:
        """Details at once, at each change of state and every ``interval_ms``, 0 = never."""
        job_id = self.find(job_id).job_id
        while True:
            record = self.find(job_id)
            # Taken before the yield: the job goes on while the client is being told.
            changed, has_ended = record.changed, record.ended
            yield record.details()
            if has_ended:
                return
            try:
                async with asyncio.timeout(interval_ms / 1000 if interval_ms > 0 else None):
                    await changed.wait()
            except TimeoutError:
                continue

    def cancel(self, job_id: str) -> None:
        """Begins to cancel a job; harmless for one that is ending or has ended."""
        job = self._find(job_id)
        if job.unreadable is not None:
            self._store.note_cancellation(job.record.job_id)
            job.unreadable.again.set()
        if job.runner is not None:
            is_noted = True
            try:
                self._store.note_cancellation(job.record.job_id)
            except StoreTransient as error:
                # It is cancelled all the same; only a JobManager that dies now would run it again.
                self._log.warning("job.cancellation_not_stored", reason=str(error))
                is_noted = False
            job.runner.post(job_events.CancelRequested(is_noted))

    def fail(self, job_id: str, error: StreamError) -> None:
        """Fails a job for a reason that lies outside of its tasks."""
        job = self._jobs.get(job_id)
        if job is not None and job.runner is not None:
            job.runner.post(
                job_events.FailureRequested(cause_of_error(error, self._clock.now_ms()))
            )

    async def checkpoint(self, job_id: str, operation_id: str = "") -> int:
        """Takes a checkpoint of a job now; returns its id when it is complete.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none, or has ended.
            StreamError: it could not be taken.
        """
        operation = self._checkpoints(job_id).checkpoint(operation_id)
        return (await operation.result()).checkpoint_id

    async def savepoint(
        self,
        job_id: str,
        operation_id: str,
        directory: str,
        format: SavepointFormat,
    ) -> JobOperation:
        """Takes a savepoint of a job; returns when it is complete.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none, or has ended; or the directory is not for it.
            StreamError: it could not be taken.
        """
        operation = self._checkpoints(job_id).savepoint(operation_id, directory, format)
        return await operation.result()

    async def stop_with_savepoint(
        self, job_id: str, operation_id: str, directory: str, *, drain: bool
    ) -> JobOperation:
        """Stops a job with a savepoint; returns when that is complete, and the job about to finish.

        Raises:
            JobNotFound: there is no such job.
            JobRejected: it takes none; or the directory is not for it.
            StreamError: it was not stopped, and runs on.
        """
        operation = self._checkpoints(job_id).stop(operation_id, directory, drain=drain)
        return await operation.result()

    def operation(self, job_id: str, operation_id: str) -> JobOperation:
        """What somebody has asked of a job, as it stands.

        Raises:
            JobNotFound: there is no such job, or it knows no such operation.
        """
        return self._find(job_id).record.operations.find(operation_id)

    def _checkpoints(self, job_id: str) -> JobCheckpointsRunner:
        job = self._find(job_id)
        if job.unreadable is not None:
            raise StreamError(f"no checkpoint was taken: {job.unreadable.problem}")
        if job.runner is None:
            raise JobRejected(f"job {job.record.job_id} has ended: {job.record.state.name}")
        return job.runner.checkpoints

    def now_ms(self) -> int:
        """The wall clock."""
        return self._clock.now_ms()

    def checkpoint_numbers(self) -> tuple[JobCheckpointNumbers, ...]:
        """Checkpoints and restarts of jobs that run or ended within the last minute; any thread may ask."""
        now_ms = self._clock.now_ms()
        jobs = [job for job in tuple(self._jobs.values()) if job.is_measured(now_ms)]
        return tuple(numbers for job in jobs if (numbers := job.numbers) is not None)

    # ------------------------------------------------------------ reports of TaskManagers

    async def report(self, events: Iterable[internal_pb2.TaskEvent]) -> None:
        """Hands reports to their jobs, in order; returns when they have been taken over."""
        now_ms = self._clock.now_ms()
        for message in events:
            job = self._jobs.get(message.attempt.job_id)
            event = event_of(message, now_ms)
            if job is None or job.runner is None or event is None:
                self.dropped_reports += 1
                continue
            await job.runner.report(event)

    def note_metrics(self, metrics: Iterable[internal_pb2.AttemptMetrics]) -> None:
        """The latest counters of attempts."""
        for entry in metrics:
            job = self._jobs.get(entry.attempt.job_id)
            if job is not None:
                job.record.note_metrics(entry)

    def recent_metrics(self) -> tuple[NamedMetrics, ...]:
        """Counters of jobs that run or ended within the last minute; any thread may ask."""
        now_ms = self._clock.now_ms()
        return tuple(
            named
            for job in tuple(self._jobs.values())
            if job.is_measured(now_ms)
            for named in job.record.named_metrics()
        )
