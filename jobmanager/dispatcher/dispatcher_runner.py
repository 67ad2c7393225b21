"""Takes jobs in, runs one actor per job, answers questions about them.

A JobManager that stops suspends the jobs that its successor can go on with, and fails the others.

Invariants: an acknowledged job is stored; submitting an id again changes nothing; a bug in one job's actor ends it only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterable
from functools import partial

import structlog

from common.clock import Clock
from common.metrics import NamedMetrics
from common.pb import internal_pb2, job_record_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner, StoreSilent
from jobmanager.dispatcher.asked_operations_runner import AskedOperationsRunner
from jobmanager.dispatcher.claimed_starts_runner import ClaimedStartsRunner
from jobmanager.dispatcher.ended_jobs_runner import EndedJobsRunner
from jobmanager.dispatcher.job_start_runner import JobStart, check_takes_checkpoints
from jobmanager.dispatcher.known_jobs import KnownJob, KnownJobs
from jobmanager.dispatcher.recovery_runner import RecoveryRunner
from jobmanager.dispatcher.submission_checks_runner import SubmissionChecksRunner
from jobmanager.dispatcher.submissions_runner import HasGone, SubmissionsRunner
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.failure_enricher import FailureLabels
from jobmanager.job.checkpoint_gauges import JobCheckpointNumbers
from jobmanager.job.freed_slots_runner import free_slots
from jobmanager.job.job_causes import quarantine_cause
from jobmanager.job.job_description import JobDescription, describe
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_record import JobRecord
from jobmanager.job.kept_history import decode_history
from jobmanager.messages import job_events
from jobmanager.messages.job_state import JobState
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import cause_of_error, event_of
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.stored_job import StoredJob
from jobmanager.traces.span import ReportSpan
from penstock.config import Configuration
from penstock.errors import (
    Fenced,
    JobRejected,
    StoreCorrupt,
    StoreNotFound,
    StoreTransient,
    StreamError,
)
from penstock.graph.plan_text import what_grows
from penstock.pb import client_pb2, graph_pb2
from penstock.storage.object_store import SwapUnanswered

_OF_FAILURES = (JobState.RESTARTING, JobState.FAILING, JobState.FAILED)
_STOP_TIMEOUT_S = 2.0
_ABANDON_TIMEOUT_MS = 1_000
_SLOT_KILL_MARGIN_S = 10.0
_RECORD_TIMEOUT_MS = 20_000


class DispatcherRunner:
    """All jobs of the cluster.

    Args:
        config: of the cluster.
        cluster: TaskManagers and slots.
        artifacts: uploaded code and data.
        store: graphs of the jobs; names the leader epoch.
        results: rows of collect sinks.
        report_span: takes what is traced of jobs; None = nothing is.
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
        report_span: ReportSpan | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._artifacts = artifacts
        self._store = store
        self._results = results
        self._clock = clock
        self._labels, self._report_span = labels, report_span
        self._jitter = partial(random.Random().uniform, -1.0, 1.0)
        self._log = structlog.get_logger(__name__)
        self.jobs = KnownJobs(config.jobmanager_retained_jobs)
        cluster.partitions.jobs = self.jobs
        self.operations = AskedOperationsRunner(self.jobs)
        self._submissions = SubmissionsRunner(self._start)
        self._starts = ClaimedStartsRunner(self.jobs, store, self._submissions.turn, self._start)
        self._checks = SubmissionChecksRunner(config, self.jobs, self._starts)
        self._records = StoreCallsRunner("the jobs' records", _RECORD_TIMEOUT_MS, lambda: None)
        self._starts.writers.append(self._records)
        self.ends = EndedJobsRunner(
            self.jobs,
            store,
            self._records,
            cluster,
            clock,
            self._start,
            results.forget,
            is_alone=config.high_availability_type == "none",
        )
        self._recovery = RecoveryRunner(
            config,
            self.jobs,
            store,
            self._records,
            self._starts,
            artifacts,
            cluster,
            self.ends,
            clock,
            self._begin_again,
            self._start,
            lambda: self._slots_end_s,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.why_not_serving = "the JobManager is starting"
        """ "" while jobs are taken; any thread may read it."""
        self.dropped_reports = 0

    async def run(self, started: asyncio.Event) -> None:
        """Runs the actors until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._cluster.partitions.load_shared()
                await self._recovery.run()
                self.ends.evict()
                await self._sweep_artifacts()
                tasks.create_task(self._cluster.partitions.sweep_shared())
                self.why_not_serving = ""
                started.set()
                await asyncio.Event().wait()
        finally:  # what is being written is not written behind a successor's back
            await self._records.wait_for_all(_ABANDON_TIMEOUT_MS)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None, "jobs are known while the dispatcher runs"
        self._tasks.create_task(work)

    @property
    def _slots_end_s(self) -> float:
        """How long slot processes may run on that this JobManager cannot end."""
        silence_ms = self._config.heartbeat_timeout_ms + self._config.jobmanager_grace_ms
        return silence_ms / 1000 + _SLOT_KILL_MARGIN_S

    async def stop(self) -> None:
        """Suspends or fails what still runs, and waits a few seconds until it has ended."""
        self._stopping = True
        self._recovery.stop()
        self.why_not_serving = "the JobManager is stopping"
        for _, runner in self.jobs.running():
            if runner.outlives_jobmanager:
                runner.post(job_events.SuspendRequested())
            else:
                cause = FailureCause("Unrecoverable", "JobManager stopped")
                runner.post(job_events.FailureRequested(cause))
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._idle.wait()
        except TimeoutError:
            left = self.jobs.running()  # what others can go on with is theirs
            await self._abandon([id for id, one in left if not one.outlives_jobmanager])

    async def _abandon(self, job_ids: list[str]) -> None:
        """Ends the slot processes of jobs that did not end in time."""
        self._log.warning("dispatcher.jobs_abandoned", job_ids=job_ids)
        try:
            async with asyncio.timeout(_ABANDON_TIMEOUT_MS / 1000), asyncio.TaskGroup() as tasks:
                for job_id in job_ids:
                    for slots in self._cluster.held_slots(job_id).values():
                        tasks.create_task(free_slots(self._cluster, job_id, slots, self._log))
        except TimeoutError:
            self._log.warning("dispatcher.slots_abandoned", job_ids=job_ids)

    async def submit(self, job_id: str, graph: graph_pb2.JobGraph) -> None:
        """Accepts a job; a job id that is known already changes nothing.

        Raises:
            JobRejected: the graph, its configuration or its code cannot be accepted.
            ProtocolMismatch: a TaskManager cannot read the job's code.
        """
        if job_id in self.jobs:
            return
        self._check_not_stopping()
        await self._submissions.take(job_id, partial(self._submit, job_id, graph))

    async def _submit(self, job_id: str, graph: graph_pb2.JobGraph, has_gone: HasGone) -> None:
        if job_id in self.jobs:  # it has come once more meanwhile
            return
        start = await self._checks.find_start(job_id, graph)
        graph = graph if start is None else start.graph
        await self._artifacts.find_missing(artifact.id for artifact in graph.artifacts)
        job = describe(job_id, graph, self._config, self._artifacts, self._cluster.facts)
        if start is not None:
            check_takes_checkpoints(job)
        await self.check_storage()
        await self._checks.check_shared_spill(job, self._cluster.partitions.shared)
        await self._checks.check_directory(job)
        if has_gone():  # nothing has been claimed or stored yet
            return
        self._check_not_stopping()
        with self._cluster.partitions.checked(graph):
            if start is not None:
                await self._checks.claim(start, job.checkpoint_directory)
            now_ms = self._clock.now_ms()
            unused = await self._save(job_id, graph, now_ms, start)
            if self._stopping:  # nobody has been told of it
                await self._records.run("remove", partial(self._store.withdraw, job_id))
                if start is not None:
                    await self._starts.give_back(job_id)
                self._check_not_stopping()
            self._begin(job, now_ms, self._options(job, None, unused))
        await self._starts.settle(job_id)
        self._log.info("job.accepted", job_id=job_id, name=graph.name)
        if job.settings.warning:
            self._log.warning("job.without_checkpoints", job_id=job_id, reason=job.settings.warning)
        for line in what_grows(graph):
            self._log.warning("job.keeps_every_key", job_id=job_id, reason=line)

    async def _save(
        self, job_id: str, graph: graph_pb2.JobGraph, now_ms: int, start: JobStart | None
    ) -> int:
        """Stores a job; where that fails, nobody runs it later, and what it was to start from is given back."""
        try:
            return await self._records.run(
                "store", partial(self._store.save, job_id, graph, now_ms)
            )
        except StreamError as error:
            is_answered = not isinstance(error, Fenced | StoreSilent | SwapUnanswered)
            if start is not None and is_answered:
                await self._starts.give_back(job_id)
            elif start is not None or self._store.may_have(job_id):
                await self._starts.give_back_later(job_id, error)
            raise

    async def check_storage(self) -> None:
        """Makes sure that a job could be stored, before anything of it is.

        Raises:
            StoreNotFound: the storage is not there.
            StoreTransient: it cannot be found out now.
        """
        await self._records.run("store", self._store.check_leads)

    def _check_not_stopping(self) -> None:
        if self._stopping:
            raise JobRejected("the JobManager is stopping: submit the job to its successor")

    def _options(self, job: JobDescription, stored: StoredJob | None, unused: int) -> JobOptions:
        """How a job is run, that an earlier JobManager may have stored."""
        record = job_record_pb2.StoredJob() if stored is None else stored.record
        return job.options(
            unused,
            stored is not None,
            record.operations,
            record.taskmanagers,
            decode_history(record.history, job.checkpoint_directory),
            has_committed=record.has_committed,
            leader_epoch=self._store.leader_epoch,
            jitter=self._jitter,
            labels=self._labels,
            report_span=self._report_span,
            shares_spill=self._cluster.partitions.shared is not None,
        )

    def _begin(self, job: JobDescription, submitted_at_ms: int, options: JobOptions) -> JobRecord:
        job_id = job.job_id
        runner = JobMasterRunner(
            job,
            self._cluster,
            self._store.leader_epoch,
            self._clock,
            lambda state: self._publish(job_id, state),
            lambda state: self._end(job_id, state),
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
            operations=runner.checkpoints.asked.operations,
            has_discarded=lambda: runner.checkpoints.is_discarded,
            started_from=lambda: runner.checkpoints.started_from,
            published=lambda: runner.checkpoints.published,
            history=runner.history.encoded,
        )
        record.running_at_ms = options.history.running_at_ms
        runner.history.running_at_ms = lambda: record.running_at_ms
        self.jobs[job_id] = KnownJob(record, runner)
        commits, held = job.settings.checkpoints is not None, options.seeks_attempts
        self._results.open(job_id, record.collect_limits, commits, is_held=held)
        self._idle.clear()
        self.jobs.count()
        self._start(self._supervise(job, runner))
        return record

    def _begin_again(self, job: JobDescription, stored: StoredJob) -> JobRecord:
        options = self._options(job, stored, stored.record.attempts_end)
        record = self._begin(job, stored.record.submitted_at_ms, options)
        record.enter(options.first_state, self._clock.now_ms())
        return record

    async def _supervise(self, job: JobDescription, runner: JobMasterRunner) -> None:
        """Runs a job's actor; whatever goes wrong in it, or at its end, stays in here."""
        try:
            await self._run_to_end(job, runner)
        except Exception as error:  # noqa: BLE001 - the boundary of a job
            self._log.error("job.end_crashed", job_id=job.job_id, exc_info=error)

    async def _run_to_end(self, job: JobDescription, runner: JobMasterRunner) -> None:
        job_id = job.job_id
        known = self.jobs[job_id]
        record = known.record
        try:
            await runner.run()
        except Exception as error:  # noqa: BLE001 - the boundary of a job's actor
            self._log.error("job.quarantined", job_id=job_id, story=runner.story(), exc_info=error)
            await self._quarantine(record, error)
            self.ends.keep(record)
        else:
            if record.ended:
                is_kept = bool(job.checkpoint_directory) and not runner.checkpoints.is_discarded
                self.ends.clean_up(
                    record,
                    job.graph,
                    job.checkpoint_directory,
                    runner.checkpoints.calls,
                    self._slots_end_s if runner.has_lost_slots else 0.0,
                    has_hidden_output=runner.has_unswept_output or is_kept,
                    is_restorable=is_kept,
                )
        finally:
            known.forget_runner()
            if not any(self.jobs.running()):
                self._idle.set()
            has_evicted = self.ends.evict()
        if has_evicted:
            await self._sweep_artifacts()

    async def _sweep_artifacts(self) -> None:
        if (in_use := self.jobs.artifacts_in_use()) is not None:
            await self._artifacts.sweep(in_use)

    async def _quarantine(self, record: JobRecord, error: Exception) -> None:
        if not record.ended:
            record.end_cause = quarantine_cause(error, self._clock.now_ms())
            await self._end(record.job_id, JobState.FAILED)
        for slots in self._cluster.held_slots(record.job_id).values():
            await free_slots(self._cluster, record.job_id, slots, self._log)

    async def _end(self, job_id: str, state: JobState) -> None:
        """Nobody runs the job again: that is safe before anybody is told of it."""
        await self.ends.note_end(self.jobs[job_id].record, state)
        self._results.end(job_id, state is JobState.FINISHED)
        self._publish(job_id, state)

    def _publish(self, job_id: str, state: JobState) -> None:
        record = self.jobs[job_id].record
        record.enter(state, self._clock.now_ms())
        self._log.info(
            "job.state_changed",
            job_id=job_id,
            state=state.name,
            reason=record.failure.message if record.failure and state in _OF_FAILURES else "",
        )
        self.jobs.count()

    # ------------------------------------------------------------ questions and orders of clients

    def records(self) -> list[JobRecord]:
        """All jobs, in order of submission."""
        return [job.record for job in self.jobs.values()]

    def find(self, job_id: str) -> JobRecord:
        """The job of this id, or of this unique beginning of an id.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        return self.jobs.find(job_id).record

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

    async def cancel(self, job_id: str) -> None:
        """Begins to cancel a job; harmless for one that is ending or has ended.

        Raises:
            JobNotFound: there is no such job.
            StoreTransient, StoreNotFound, StoreCorrupt: that it is cancelled cannot be stored, and it cannot be read
                either.
        """
        job = self.jobs.find(job_id)
        job_id, is_noted = job.record.job_id, True
        if job.runner is None and job.unreadable is None:
            return
        try:
            note = partial(self._store.note_cancellation, job_id)
            await self._records.run("note the cancellation", note)
        except (StoreTransient, StoreNotFound, StoreCorrupt) as error:
            if job.unreadable is not None:
                raise
            # It is cancelled all the same; only a JobManager that dies now would run it again.
            self._log.warning("job.cancellation_not_stored", reason=str(error))
            is_noted = False
        now = self.jobs.get(job_id)  # it may have been gone on with meanwhile
        if now is not None and now.runner is not None:
            now.runner.post(job_events.CancelRequested(is_noted))
        elif now is not None and now.unreadable is not None:
            now.unreadable.again.set()

    def fail(self, job_id: str, error: StreamError) -> None:
        """Fails a job for a reason that lies outside of its tasks."""
        job = self.jobs.get(job_id)
        if job is not None and job.runner is not None:
            job.runner.post(
                job_events.FailureRequested(cause_of_error(error, self._clock.now_ms()))
            )

    def now_ms(self) -> int:
        """The wall clock."""
        return self._clock.now_ms()

    def checkpoint_numbers(self) -> tuple[JobCheckpointNumbers, ...]:
        """Checkpoints and restarts of jobs that run or ended within the last minute; any thread may ask."""
        return self.jobs.checkpoint_numbers(self._clock.now_ms())

    async def report(self, events: Iterable[internal_pb2.TaskEvent]) -> None:
        """Hands reports to their jobs, in order; returns when they have been taken over."""
        now_ms = self._clock.now_ms()
        for message in events:
            job = self.jobs.get(message.attempt.job_id)
            event = event_of(message, now_ms)
            if job is None or job.runner is None or event is None:
                self.dropped_reports += 1
                continue
            await job.runner.report(event)

    def note_metrics(self, metrics: Iterable[internal_pb2.AttemptMetrics]) -> None:
        """The latest counters of attempts."""
        for entry in metrics:
            job = self.jobs.get(entry.attempt.job_id)
            if job is not None:
                job.record.note_metrics(entry)

    def recent_metrics(self) -> tuple[NamedMetrics, ...]:
        """Counters of jobs that run or ended within the last minute; any thread may ask."""
        return self.jobs.recent_metrics(self._clock.now_ms())
