"""What a start of one job, or of a part of it, goes on from.

attempt numbers are reserved -> what is being stored is waited for -> the newest checkpoint is found, and whether one
is stored of which that was not known -> what goes back behind output is noted -> each subtask gets its state ->
``StartPrepared``; what dead attempts have left is swept behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from common.clock import Clock
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.claimed_head_store import CheckpointsUnreadable
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.failover.rebuilt_regions import rebuilt_vertices
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.job.checkpoint_reports_runner import CheckpointReportsRunner
from jobmanager.job.checkpoint_storing_runner import CheckpointStoringRunner
from jobmanager.job.collect_sinks import CollectSinks
from jobmanager.job.job_calls_runner import JobCallsRunner, pause_s
from jobmanager.job.job_description import JobDescription
from jobmanager.job.job_record_runner import JobRecordRunner
from jobmanager.job.repeated_output_runner import RepeatedOutputRunner
from jobmanager.job.restored_tasks import RestoredTasks, restored_checkpoint, restored_tasks
from jobmanager.job.savepoints_runner import SavepointsRunner
from jobmanager.job.sweeps_runner import SweepsRunner
from jobmanager.job.user_operations_runner import UserOperationsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.results.collect_buffer import Sequences
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import plan_of
from penstock.errors import Fenced, StoreTransient, StreamError


class StartPreparationRunner:
    """Prepares starts.

    Args:
        store: of its checkpoints; None = it takes none, and ``storing`` and ``savepoints`` are None as well.
        savepoints: its savepoints.
        operations: are gone on with behind the first start.
        reports: what has become of its checkpoints.
        calls: to the store.
        sweeps: of what dead attempts have left.
        repeated: output that may be there twice.
        post: takes events for the job's machine.
        is_recovered: the job was another JobManager's: until it has been prepared once, what cannot be read
            is tried again, and fails nothing.

    Attributes:
        restored: what the next attempt of each subtask starts from.
        problem: why the job cannot be gone on with yet.
    """

    def __init__(
        self,
        job: JobDescription,
        record: JobRecordRunner,
        store: CheckpointStoreRunner | None,
        storing: CheckpointStoringRunner | None,
        savepoints: SavepointsRunner | None,
        operations: UserOperationsRunner,
        reports: CheckpointReportsRunner,
        calls: JobCallsRunner,
        sweeps: SweepsRunner,
        repeated: RepeatedOutputRunner,
        collects: CollectSinks,
        results: ResultsStore,
        clock: Clock,
        post: Callable[[job_events.JobEvent], None],
        *,
        is_recovered: bool,
    ) -> None:
        self._job_id = job.job_id
        self._graph = job.graph
        self._leaves_output = job.config.execution_state_recovery_in_doubt == "leave"
        self._checkpoint_root = job.settings.directory
        self._record = record
        self._store = store
        self._storing = storing
        self._savepoints = savepoints
        self._operations = operations
        self._reports = reports
        self._calls = calls
        self._sweeps = sweeps
        self._repeated = repeated
        self._collects = collects
        self._results = results
        self._clock = clock
        self._post = post
        self._rebuilt = (
            rebuilt_vertices(RegionGraph(plan_of(job.graph))) if store is not None else frozenset()
        )
        self._may_be_unreadable = is_recovered
        self.restored: RestoredTasks = {}
        self.problem = ""
        self._undecided: tuple[int, Sequences] | None = None
        """Where collect sinks begin if nothing of an earlier JobManager goes on."""
        self._log = structlog.get_logger(__name__).bind(job_id=job.job_id)

    async def prepare(self, effect: job_effects.PrepareStart) -> None:
        """Finds out what a start goes on from, and posts it."""
        attempt = effect.attempt
        try:
            event = await self._prepared_at_last(effect)
        except StreamError as error:
            if not isinstance(error, Fenced):
                self._log.warning("job.start_not_prepared", attempt=attempt, reason=str(error))
            cause = self._record.cause_of(error, self._clock.now_ms())
            self._post(job_events.StartNotPrepared(attempt, cause))
        else:
            sequences = self._collects.restored(self.restored, effect.subtasks)
            if effect.may_run:
                self._undecided = attempt, sequences
            else:
                self._results.restart(self._job_id, attempt, sequences)
            if event.restored is not None:
                self._log.info(
                    "job.restoring", attempt=attempt, checkpoint_id=event.restored.checkpoint_id
                )
            self._post(event)

    def note_takeover(self, heard: Iterable[AttemptKey], *, go_on: bool) -> None:
        """What an earlier JobManager has deployed was looked for: rows of the attempts that count are taken now."""
        if self._undecided is not None and not go_on:
            self._results.restart(self._job_id, *self._undecided)
        self._undecided = None
        self._results.release(self._job_id, self._collects.attempts_of(heard))

    async def _prepared_at_last(self, effect: job_effects.PrepareStart) -> job_events.StartPrepared:
        """Where storage that is not there yet is no end of the job, it is waited for."""
        attempt = 0
        while True:
            try:
                event = await self._prepared(effect)
            except (CheckpointsUnreadable, StoreTransient) as error:
                if not self._may_be_unreadable or self._calls.ended.is_set():
                    raise
                self.problem = f"the job cannot be gone on with yet: {error}"
                self._log.warning("job.unreadable", retry_s=pause_s(attempt), reason=str(error))
                await self._calls.pause_after(attempt)
                attempt += 1
            else:
                self._may_be_unreadable, self.problem = False, ""
                return event

    async def _prepared(self, effect: job_effects.PrepareStart) -> job_events.StartPrepared:
        attempt = effect.attempt
        await self._record.reserve_attempts(attempt)
        store, storing = self._store, self._storing
        if store is None or storing is None:
            return job_events.StartPrepared(attempt)
        await storing.wait()
        found = await self._found(store, effect)
        await storing.settle()  # before tasks go on from it, and may end with it
        restored, brought = None, list[str]()
        if self._savepoints is not None:
            restored_id = found.newest.checkpoint_id if found.newest else 0
            await self._operations.operations.keep_taken_back(
                self._savepoints.note_restored(restored_id, found.open_savepoints)
            )
            self._operations.resume(found)
        await self._repeated.note(found.repeated)
        tasks: RestoredTasks = {}
        if found.newest is not None:
            tasks = restored_tasks(
                found.newest,
                self._graph,
                effect.subtasks,
                self._rebuilt,
                is_of_another=found.is_of_another,
                leaves_output=self._leaves_output,
            )
            if found.is_of_another:
                of_another = tasks
                brought = await self._calls.run(
                    "bring lists", lambda: store.starts.bring_lists(of_another)
                )
            if found.retained and found.retained[-1].is_stop:
                for task in tasks.values():
                    task.stopped = True
            restored = restored_checkpoint(
                found.newest.checkpoint_id, tasks, self._graph, found.done
            )
        # What is about to be deployed goes on from what it was prepared for.
        kept = {s: task for s, task in self.restored.items() if s in effect.kept}
        others = {s: task for s, task in tasks.items() if s not in effect.kept}
        self.restored = others | kept
        if (sweep := found.sweep) is not None:
            # Behind the start, which waits for no listing.
            self._sweeps.begin(lambda: sweep(brought))
        return job_events.StartPrepared(
            attempt, restored, found.retained, found.next_checkpoint_id, found.goes_back
        )

    async def _found(
        self, store: CheckpointStoreRunner, effect: job_effects.PrepareStart
    ) -> PreparedCheckpoints:
        must_exist = await self._record.has_checkpoints()
        preparation = store.starts.begin_preparation()
        found = await self._calls.run(
            "prepare",
            lambda: store.starts.prepare(
                effect.unusable,
                must_exist=must_exist,
                alone=effect.subtasks,
                preparation=preparation,
                ended_id=self._reports.ended_id,
                first_attempt=effect.first_attempt,
            ),
        )
        await self._record.note_checkpoints(self._checkpoint_root)
        return found
