"""What the machine of a job wants done about checkpoints: preparing starts, storing, deleting, answering.

Calls to the store are bounded by the checkpoint's timeout. What prepares a start, what stores (and settles)
a checkpoint and what deletes go on beside each other, each in its own order. Everything that comes back is an event
in the job's inbox.

Invariants: attempt numbers are reserved, in blocks, before ``StartPrepared`` is posted; each request of
a user is answered once, at the latest when the job's actor ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, assert_never

import structlog

from common.clock import Clock
from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.repeated_output import RepeatedOutput
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.checkpoint_reports_runner import CheckpointReportsRunner
from jobmanager.job.checkpoint_requests_runner import CheckpointRequestsRunner
from jobmanager.job.checkpoint_storing_runner import CheckpointStoringRunner
from jobmanager.job.collect_sinks import CollectSinks
from jobmanager.job.job_calls_runner import JobCallsRunner
from jobmanager.job.job_description import JobDescription
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_record_runner import JobRecordRunner
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.job.repeated_output_runner import RepeatedOutputRunner
from jobmanager.job.savepoints_runner import SavepointsRunner
from jobmanager.job.start_preparation_runner import StartPreparationRunner
from jobmanager.job.sweeps_runner import SweepsRunner
from jobmanager.job.user_operations_runner import UserOperationsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import cause_of_error
from jobmanager.stores.job_store import JobStore
from penstock.errors import StreamError
from penstock.pb import checkpoint_pb2

_RECORD_LANE: Final = "job record"
_START_LANE: Final = "checkpoint starts"
_STORE_LANE: Final = "checkpoint store"
_DELETION_LANE: Final = "checkpoint deletions"
_SAVEPOINT_LANE: Final = "savepoints"

CheckpointEffect = (
    job_effects.PrepareStart
    | job_effects.ReserveAttempts
    | job_effects.NoteCommit
    | job_effects.WriteManifest
    | job_effects.DiscardCheckpoints
    | job_effects.CheckpointEffect
)


class JobCheckpointsRunner:
    """The checkpoints of one job, as its actor sees them.

    Args:
        store: where its checkpoints are kept; None = it takes none.
        jobs: has its record.
        results: rows of its collect sinks.
        post: takes events for the job's machine.
        in_order: runs actions of one lane one after the other.
        options: how it is run.

    Attributes:
        asked: what users ask for, with its ``operations``.
        is_discarded: the job has ended, and its checkpoints are to be deleted once nobody writes any.
    """

    def __init__(
        self,
        job: JobDescription,
        store: CheckpointStoreRunner | None,
        jobs: JobStore,
        results: ResultsStore,
        clock: Clock,
        post: Callable[[job_events.JobEvent], None],
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
        options: JobOptions,
    ) -> None:
        job_id = job.job_id
        timeout_ms = 0 if job.settings.checkpoints is None else job.settings.checkpoints.timeout_ms
        self._store = store
        self._clock = clock
        self._post = post
        self._in_order = in_order
        self._collects = CollectSinks(job.graph)
        self.gauges = CheckpointGauges()
        self._reports = CheckpointReportsRunner(job_id, self.gauges)
        self._record = JobRecordRunner(job_id, jobs if job.outlives_jobmanager else None)
        self._calls = JobCallsRunner(job_id, timeout_ms, self.gauges)
        self._requests = CheckpointRequestsRunner(job_id, clock, self._calls, post)
        self._repeated = RepeatedOutputRunner(job_id, self._record, self.gauges)
        self._storing = self._make_storing(job_id, results)
        self._savepoints = self._make_savepoints(job_id, options)
        keep = self._keep_operations if job.outlives_jobmanager else None
        self.asked = UserOperationsRunner(
            job_id,
            OperationsRunner(f"job {job_id}", in_order, keep, options.operations),
            self._requests,
            self._savepoints,
            self._calls,
            savepoint_directory=job.config.execution_checkpointing_savepoint_dir,
            is_recovered=options.is_recovered,
        )
        self._starts = StartPreparationRunner(
            job,
            self._record,
            store,
            self._storing,
            self._savepoints,
            self.asked,
            self._reports,
            self._calls,
            SweepsRunner(job_id, self._calls.run, in_order, self._calls.ended),
            self._repeated,
            self._collects,
            results,
            clock,
            post,
            is_recovered=options.is_recovered,
        )
        self._timer: asyncio.TimerHandle | None = None
        self.is_discarded = False
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def _make_storing(self, job_id: str, results: ResultsStore) -> CheckpointStoringRunner | None:
        if self._store is None:
            return None
        return CheckpointStoringRunner(
            job_id,
            self._store,
            self._calls,
            self._collects,
            results,
            self._clock,
            self._post,
            self._fail,
        )

    def _make_savepoints(self, job_id: str, options: JobOptions) -> SavepointsRunner | None:
        if self._store is None:
            return None
        return SavepointsRunner(
            job_id,
            self._store,
            self._calls.calls,
            self._clock,
            request=self._requests.request,
            post=self._post,
            fail=self._fail,
            pause=self._calls.pause,
            seeks_attempts=options.seeks_attempts,
        )

    @property
    def calls(self) -> StoreCallsRunner:
        """Calls to the store, among them those that hang."""
        return self._calls.calls

    @property
    def problem(self) -> str:
        """Why the job cannot be gone on with yet."""
        return self._starts.problem

    @property
    def repeated(self) -> deque[RepeatedOutput]:
        """Output that may be there twice, the newest last."""
        return self._repeated.repeated

    @property
    def started_from(self) -> checkpoint_pb2.StartedFrom | None:
        """What the job was started from; None = from nothing."""
        return None if self._store is None else self._store.started_from

    @property
    def published(self) -> str | None:
        """A savepoint of the job whose output another one commits, behind which it had gone back; "" = which is gone;
        None = there is none."""
        return None if self._store is None else self._store.published

    def restored(self, subtask: SubtaskId) -> internal_pb2.RestoredTask | None:
        """What the next attempt of a subtask starts from; None = from nothing."""
        return self._starts.restored.get(subtask)

    def end(self, *, is_finished: bool = False) -> None:
        """The job has ended: what it was still storing matters to nobody; who still waits is told so.

        Args:
            is_finished: with all that it had to do.
        """
        self._give_up()
        if self._savepoints is not None:
            self._savepoints.end(is_finished=is_finished)
        self._requests.end()
        self._calls.end()
        if self._store is not None:
            self._store.stop()

    def _give_up(self, checkpoint_id: int | None = None) -> None:
        """What is being stored, this one or any, is waited for no longer."""
        is_savepoint = self._savepoints is not None and self._savepoints.give_up(checkpoint_id)
        if self._storing is not None and not (is_savepoint and checkpoint_id is not None):
            self._storing.give_up()

    def close(self) -> None:
        """Nothing more will be asked."""
        if self._timer is not None:
            self._timer.cancel()
        self.end()
        self._record.close()

    def note_running(self) -> None:
        """The job's tasks run."""
        self.asked.note_running()
        if self._store is not None:
            self.gauges.note_started(self._clock.now_ms())

    def note_takeover(self, heard: Iterable[AttemptKey], *, go_on: bool) -> None:
        """What an earlier JobManager has deployed was looked for: whether it goes on, and which attempts count."""
        self._starts.note_takeover(heard, go_on=go_on)
        if self._savepoints is not None:
            self._savepoints.note_takeover(go_on=go_on)

    async def _keep_operations(self, content: bytes) -> None:
        if not self._calls.ended.is_set():
            # Else it went with the job, or with this JobManager, behind which the next one goes on with them.
            await self._record.note_operations(content)

    # ------------------------------------------------------------ effects

    def note_discarded_output(self) -> None:
        """The job is cancelled for good: its tasks throw away what they have prepared."""
        if self._savepoints is not None:
            self._savepoints.is_output_discarded = True

    def perform(self, effect: CheckpointEffect) -> None:  # noqa: C901 - one case per effect
        """Begins to do what the machine wants."""
        match effect:
            case job_effects.PrepareStart():
                self._in_order(_START_LANE, lambda: self._starts.prepare(effect))
            case job_effects.ReserveAttempts(attempt):
                self._in_order(_RECORD_LANE, lambda: self._reserve(attempt))
            case job_effects.NoteCommit():
                self._in_order(_RECORD_LANE, self._note_commit)
            case job_effects.WriteManifest():
                self._store_manifest(effect)
            case job_effects.DiscardCheckpoints():
                self.is_discarded = True
            case c.SettleCheckpoint():
                self._reports.note_unsettled(effect)
                self._give_up(effect.checkpoint_id)
            case c.ReserveIds():
                # In the order of starts, which claim HEAD as well.
                assert self._storing is not None, "ids are reserved where there is a store"
                self._in_order(_START_LANE, self._storing.reserve_ids)
            case c.DeleteFiles():
                assert self._storing is not None, "files are deleted where there is a store"
                delete = self._storing.delete
                self._in_order(_DELETION_LANE, lambda: delete(effect))
            case c.DiscardSavepoint():
                assert self._savepoints is not None, "savepoints are taken where there is a store"
                discard = self._savepoints.discard
                self._in_order(_SAVEPOINT_LANE, lambda: discard(effect))
            case c.CallAt():
                self._call_at(effect.at_ms)
            case c.AnswerRequest():
                self._requests.answer(effect)
            case c.ReportAborted():
                self._reports.note_aborted(effect)
            case c.ReportCompleted():
                self._reports.note_completed(effect)
                if self._savepoints is not None:
                    self._savepoints.note_completed(effect.checkpoint.checkpoint_id)
            case job_effects.ReportCommitted():
                assert self._savepoints is not None, (
                    "checkpoints are complete where there is a store"
                )
                self._savepoints.note_committed(effect.checkpoint_id)
            case _:
                assert_never(effect)

    async def _reserve(self, attempt: int) -> None:
        try:
            end = await self._record.reserve_attempts(attempt)
        except StreamError as error:
            # Who needs the number asks again.
            self._log.warning("attempts.not_reserved", attempt=attempt, reason=str(error))
        else:
            self._post(job_events.AttemptsReserved(end))

    async def _note_commit(self) -> None:
        try:
            await self._record.note_commit()
        except StreamError as error:
            self._post(job_events.FailureRequested(cause_of_error(error, self._clock.now_ms())))
        else:
            self._post(job_events.CommitNoted())

    def _store_manifest(self, effect: job_effects.WriteManifest) -> None:
        storing, savepoints = self._storing, self._savepoints
        assert storing is not None, "checkpoints are stored where there is a store"
        assert savepoints is not None, "savepoints are taken where there is a store"
        if effect.stored.properties.target:
            savepoints.begin(effect.stored)
        if effect.stored.properties.is_savepoint:
            self._in_order(_SAVEPOINT_LANE, lambda: self._store_savepoint(effect))
            return
        storing.begin(effect.stored.checkpoint_id)
        self._in_order(_STORE_LANE, lambda: storing.store(effect))

    async def _store_savepoint(self, effect: job_effects.WriteManifest) -> None:
        assert self._savepoints is not None, "savepoints are taken where there is a store"
        states = self._collects.last_states(key.subtask for key in effect.stored.finished)
        await self._savepoints.store(effect, states)

    def _fail(self, error: StreamError) -> None:
        cause = self._record.cause_of(error, self._clock.now_ms())
        self._post(job_events.FailureRequested(cause))

    def _call_at(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ms - self._clock.now_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._post(c.TimeReached(self._clock.now_ms()))
        )
