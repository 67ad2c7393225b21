"""The actor of one job: owns its ``JobMaster``, runs ``step``, then the effects.

Calls to one TaskManager are made one after the other, in the order of the effects; calls to different
TaskManagers run side by side.

An exception in here is a bug; it ends this actor only. Whoever runs it (``DispatcherRunner``)
fails the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from common.clock import Clock
from common.pb import internal_pb2
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.graph.deployment import TaskPlan
from jobmanager.graph.slot import Slot
from jobmanager.installed_version import penstock_version
from jobmanager.job.attempt_search_runner import AttemptSearchRunner
from jobmanager.job.freed_slots_runner import free_slots
from jobmanager.job.history_runner import HistoryRunner
from jobmanager.job.inbox_runner import Inbox
from jobmanager.job.job_checkpoints_runner import JobCheckpointsRunner
from jobmanager.job.job_description import JobDescription
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_trace import JobTrace
from jobmanager.job.kept_partitions_runner import KeptPartitionsRunner
from jobmanager.job.lanes_runner import LanesRunner
from jobmanager.job.persisted_inputs_runner import PersistedInputsRunner
from jobmanager.job.promotion_runner import PromotionRunner
from jobmanager.job.rival_runner import RivalRunner
from jobmanager.job.slot_lease import by_taskmanager
from jobmanager.job.swept_output_runner import OutputSweepsRunner
from jobmanager.job.taskmanagers_in_use_runner import TaskManagersInUseRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import ENDING, JobState, is_terminal
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.graph_convert import (
    DeploymentMessages,
    cause_of_error,
    endpoint_of,
)
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.admission import admission_problem
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.job_store import JobStore
from jobmanager.traces.span import Value
from penstock.errors import StreamError
from penstock.storage.object_store import ObjectStore

_CANCELLATION_MARGIN_MS = 5_000
_OPERATIONS_PATIENCE_S = 1.5
"""How long the end of a job that is FINISHED waits for those of its operations, which the next JobManager knows by it;
less than a JobManager that is told to end waits for its jobs."""
_END = "end"
_PROMOTION = "promotion"
"""Lane of work that concerns several TaskManagers."""


class _Left(Exception):  # noqa: N818 - named after what happened
    """The job is left to another JobManager."""


class JobMasterRunner:
    """Runs one job.

    Args:
        job: what to run.
        cluster: where slots come from.
        publish: called at each change of the job's state, but for its end.
        end: called with the state that the job ends in; returns when that is safe, and published.
        jobs: keeps the job's attempt numbers.
        results: rows of its collect sinks.
        options: how it is run.
    """

    def __init__(
        self,
        job: JobDescription,
        cluster: ClusterRunner,
        leader_epoch: int,
        clock: Clock,
        publish: Callable[[JobState], None],
        end: Callable[[JobState], Awaitable[None]],
        jobs: JobStore,
        results: ResultsStore,
        options: JobOptions,
    ) -> None:
        self.master = JobMaster(job.plan, options)
        self._job = job
        self._cluster = cluster
        self._clock = clock
        self._publish = publish
        self._end = end
        self._log = structlog.get_logger(__name__).bind(job_id=job.job_id)
        self._kept = KeptPartitionsRunner(job.job_id, job.plan, cluster, self._log)
        self._messages = DeploymentMessages(
            job.job_id,
            job.graph,
            leader_epoch,
            takes_checkpoints=job.settings.checkpoints is not None,
            checkpoint_directory=job.checkpoint_directory,
            shared_spill=self._kept.shared_uri,
        )
        self._promotion = PromotionRunner(job.job_id, job.graph, cluster.partitions, clock)
        self._persisted_inputs = PersistedInputsRunner(
            job.graph,
            cluster.partitions,
            lambda taskmanager_id: cluster.client(taskmanager_id).partition_endpoint,
        )
        self._inbox = Inbox()
        self._lanes = LanesRunner(f"job {job.job_id}")
        self._locating: asyncio.Task[None] | None = None
        self._oldest_epoch = leader_epoch
        """Of whoever has deployed any of the job's attempts that run."""
        self._overdue_timers: dict[int, asyncio.TimerHandle] = {}
        """Group -> when its cancelled attempts have had their time."""
        self._later: set[asyncio.TimerHandle] = set()
        self.has_lost_slots = False
        """Slot processes of it may run that it could not end."""
        self._is_end_safe: asyncio.Event | None = None
        """None = the job has not ended."""
        self._sweeps = OutputSweepsRunner(job.job_id, job.graph, cluster, self._lanes.run)
        self._rivals = self._make_rivals()
        self.checkpoints = self._make_checkpoints(leader_epoch, jobs, results, options)
        self.history = self._make_history(jobs, options)
        self._trace = self._make_trace(leader_epoch, options)
        self._search = self._make_search(options) if options.seeks_attempts else None
        self._in_use = TaskManagersInUseRunner(
            job.job_id,
            options.taskmanagers,
            cluster,
            jobs if job.outlives_jobmanager else None,
            self._lanes.run,
        )

    def _make_rivals(self) -> RivalRunner:
        return RivalRunner(
            self._job,
            self._cluster,
            self._messages,
            self._allocate_slots,
            self._deploy,
            self.post,
            self._lanes.run,
            self._clock.now_ms,
        )

    def _make_history(self, jobs: JobStore, options: JobOptions) -> HistoryRunner:
        return HistoryRunner(
            self._job.job_id,
            self.master,
            self._job.checkpoint_directory,
            self.checkpoints.gauges,
            options.history,
            jobs if self._job.outlives_jobmanager else None,
            self._lanes.run,
        )

    def _make_trace(self, leader_epoch: int, options: JobOptions) -> JobTrace | None:
        if options.report_span is None:
            return None
        facts: dict[str, Value] = {
            "penstock.job.id": self._job.job_id,
            "penstock.job.name": self._job.graph.name,
            "penstock.leader_epoch": leader_epoch,
        }
        return JobTrace(options.report_span, self.master, facts, is_recovered=options.is_recovered)

    def _make_search(self, options: JobOptions) -> AttemptSearchRunner:
        config = self._job.config
        return AttemptSearchRunner(
            self._job.job_id,
            sum(vertex.parallelism for vertex in self._job.plan.vertices),
            options.taskmanagers,
            self._cluster,
            self._kept,
            self._clock,
            self.checkpoints.asked.operations,
            (config.heartbeat_timeout_ms + config.jobmanager_grace_ms) / 1000,
            self.post,
        )

    def _make_checkpoints(
        self, leader_epoch: int, jobs: JobStore, results: ResultsStore, options: JobOptions
    ) -> JobCheckpointsRunner:
        store = self._job.checkpoint_store()
        return JobCheckpointsRunner(
            self._job,
            None if store is None else self._checkpoint_store(store, leader_epoch),
            jobs,
            results,
            self._clock,
            self.post,
            self._lanes.run,
            options,
        )

    def _checkpoint_store(self, store: ObjectStore, leader_epoch: int) -> CheckpointStoreRunner:
        job = self._job
        return CheckpointStoreRunner(
            job.job_id,
            job.graph,
            store,
            leader_epoch=leader_epoch,
            version=penstock_version(),
            now_ms=self._clock.now_ms,
            plan=job.plan if job.config.execution_checkpointing_mode == "exactly-once" else None,
            starts_from=job.config.execution_state_recovery_path,
        )

    @property
    def outlives_jobmanager(self) -> bool:
        """True when another JobManager can go on with the job."""
        return self._job.outlives_jobmanager

    @property
    def has_unswept_output(self) -> bool:
        """Hidden output of the job stays on some TaskManager."""
        return self._sweeps.are_given_up

    @property
    def dropped(self) -> dict[str, int]:
        """What was dropped, by part."""
        return self.master.dropped | {"after its end": self._inbox.dropped_events}

    def post(self, event: job_events.JobEvent) -> None:
        """Takes an event of the cluster or of the actor's own; never waits."""
        self._inbox.post(event)

    async def report(self, event: job_events.JobEvent) -> None:
        """Takes an event from a TaskManager; waits for room."""
        await self._inbox.report(event)

    async def run(self) -> None:
        """Drives the job to its end; returns when its slots are back, or were asked for in vain.

        Where another JobManager goes on with it, what is under way for it here ends as if this process had been killed.
        """
        self._cluster.join(self._job.job_id, self)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._lanes.tasks = tasks
                await self._drive()
        except* _Left:
            pass
        finally:
            self._inbox.close()
            for timer in (*self._overdue_timers.values(), *self._later):
                timer.cancel()
            self.history.close()
            self.checkpoints.close()
            self._cluster.leave(self._job.job_id)

    async def _drive(self) -> None:
        self.post(job_events.JobStarted())
        # After the end the inbox may still hold a grant that must be given back.
        while not self.master.ended or len(self._inbox):
            await self._step(await self._inbox.get())
        self._stop_locating()
        self.checkpoints.end(is_finished=self.master.state is JobState.FINISHED)
        if self.master.state is JobState.SUSPENDED:
            self.checkpoints.asked.operations.leave()
            raise _Left
        self._end_search()

    async def _step(self, event: job_events.JobEvent) -> None:
        if isinstance(event, job_events.TaskManagerGone):
            self.has_lost_slots = True
            lost = self._persisted_inputs.loss(self.master.graph)
            if lost is not None:
                cause = cause_of_error(lost, self._clock.now_ms(), event.taskmanager_id)
                await self._step(job_events.FailureRequested(cause))
        if isinstance(event, job_events.SuspendRequested):
            await self.history.leave()
        if isinstance(event, job_events.AttemptsFound):
            self._oldest_epoch = min(
                (self._oldest_epoch, *(one.leader_epoch for one in event.found))
            )
        effects = self.master.step(event, self._clock.now_ms())
        for effect in effects:
            self._perform(effect)
        if self._trace is not None:
            self._trace.note(event, effects, self._clock.now_ms())
        if isinstance(event, job_events.AttemptsFound) and not self._is_ending:
            heard, goes_on = self.master.oldest_heard(), self.master.was_taken_over
            self.checkpoints.note_takeover(heard, go_on=goes_on)
        self.history.note()
        if isinstance(event, job_events.SlotsGranted):
            # Jobs that were accepted while no TaskManager was there are checked now.
            ids = {slot.taskmanager_id for slot in event.slots}
            problem = admission_problem(self._job.stamp, self._cluster.facts(sorted(ids)))
            if problem is not None:
                self.post(
                    job_events.FailureRequested(cause_of_error(problem, self._clock.now_ms()))
                )

    @property
    def _is_ending(self) -> bool:
        state = self.master.state
        return state in ENDING or is_terminal(state)

    # ------------------------------------------------------------ effects

    def _perform(self, effect: job_effects.JobEffect) -> None:  # noqa: C901 - one case per effect
        job_id = self._job.job_id
        match effect:
            case job_effects.RequestSlots():
                timeout_ms = self._job.config.slot_request_timeout_ms
                self._cluster.request_slots(job_id, effect, timeout_ms)
            case job_effects.WithdrawRequest():
                self._cluster.withdraw_request(job_id, effect.group)
            case job_effects.AllocateSlots():
                self._call(effect.taskmanager_id, lambda client: self._allocate(client, effect))
            case job_effects.DeployTasks():
                self._in_use.note({a.taskmanager_id for a in self.master.graph.current()})
                tasks = [self._deployment(task, effect) for task in effect.tasks]
                self._call(effect.taskmanager_id, lambda client: self._deploy(client, tasks))
            case job_effects.SendCommands():
                commands = self._messages.commands(effect.commands)
                self._call(effect.taskmanager_id, lambda client: client.send_commands(commands))
            case job_effects.CancelTasks():
                if effect.is_final:
                    self.checkpoints.note_discarded_output()
                ends = self._messages.commands([effect])
                self._call(effect.taskmanager_id, lambda client: client.send_commands(ends))
            case job_effects.SweepOutput():
                self.checkpoints.note_discarded_output()
                self._end_search()
                self._sweeps.begin()
            case job_effects.AwaitCancellation(group):
                self._start_overdue_timer(group)
            case job_effects.ReleasePartitions():
                self._lanes.run(effect.taskmanager_id, lambda: self._release(effect))
            case job_effects.ReleaseOutputs():
                for release in self._kept.lying(effect.partitions):
                    self._perform(release)
            case job_effects.FindAttempts():
                self._begin_to_find(effect)
            case job_effects.PromotePartitions():
                self._lanes.run(_PROMOTION, lambda: self._promote(effect))
            case job_effects.FreeSlots():
                self._lanes.run(effect.slots[0].taskmanager_id, lambda: self._free(effect.slots))
            case job_effects.PublishState() if is_terminal(effect.state):
                self._is_end_safe = asyncio.Event()
                self._lanes.run(_END, lambda: self._note_end(effect.state))
            case job_effects.PublishState():
                self._publish(effect.state)
                if effect.state is JobState.RUNNING:
                    self.checkpoints.note_running()
            case job_effects.PostLater():
                self._post_later(effect)
            case (
                job_effects.RequestSpareSlots()
                | job_effects.StartRival()
                | job_effects.ReportRival()
            ):
                self._rivals.perform(effect)
            case _:
                self.checkpoints.perform(effect)

    def _start_overdue_timer(self, group: int) -> None:
        def post() -> None:
            del self._overdue_timers[group]
            self.post(job_events.CancellationOverdue(group))

        delay_ms = self._job.config.task_cancellation_timeout_ms + _CANCELLATION_MARGIN_MS
        if (timer := self._overdue_timers.pop(group, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._overdue_timers[group] = loop.call_later(delay_ms / 1000, post)

    def _post_later(self, effect: job_effects.PostLater) -> None:
        def post() -> None:
            self._later.discard(timer)
            self.post(effect.event)

        timer = asyncio.get_running_loop().call_later(effect.delay_ms / 1000, post)
        self._later.add(timer)

    def _call(
        self, taskmanager_id: str, action: Callable[[TaskManagerClient], Awaitable[None]]
    ) -> None:
        """Makes a call in its turn; a failure becomes an event."""
        attempt = self.master.attempt

        async def call() -> None:
            try:
                await action(self._cluster.client(taskmanager_id))
            except StreamError as error:
                cause = cause_of_error(error, self._clock.now_ms(), taskmanager_id)
                self._log.warning(
                    "call.failed", taskmanager_id=taskmanager_id, reason=cause.message
                )
                self.post(job_events.CallFailed(taskmanager_id, cause, attempt))

        self._lanes.run(taskmanager_id, call)

    def _deployment(
        self, task: TaskPlan, effect: job_effects.DeployTasks
    ) -> internal_pb2.TaskDeployment:
        subtask = task.attempt.subtask
        is_new = subtask in effect.from_nothing
        restored = None if is_new else self.checkpoints.restored(subtask)
        coordinator = self.master.coordinator
        first_checkpoint_id = 0 if coordinator is None else coordinator.next_checkpoint_id
        return self._messages.task(task, restored, first_checkpoint_id)

    async def _allocate_slots(
        self, client: TaskManagerClient, slot_ids: tuple[str, ...]
    ) -> internal_pb2.AllocateSlotsResponse:
        job, graph = self._job, self._job.graph
        return await client.allocate_slots(
            job.job_id,
            slot_ids,
            graph.artifacts,
            job.slot_config,
            graph.requirements,
            self._oldest_epoch,
        )

    async def _allocate(self, client: TaskManagerClient, effect: job_effects.AllocateSlots) -> None:
        response = await self._allocate_slots(client, effect.slot_ids)
        partitions = response.partition_endpoint
        self.post(
            job_events.SlotsAllocated(
                client.taskmanager_id,
                tuple(map(endpoint_of, response.endpoints)),
                effect.call,
                endpoint_of(partitions) if response.HasField("partition_endpoint") else None,
            )
        )

    async def _deploy(
        self, client: TaskManagerClient, tasks: list[internal_pb2.TaskDeployment]
    ) -> None:
        await self._in_use.until_noted(is_needed=not self._job.settings.begins_again)
        await self._persisted_inputs.connect(tasks)
        await client.deploy_tasks(tasks)

    def _begin_to_find(self, effect: job_effects.FindAttempts) -> None:
        tasks = self._lanes.tasks
        assert tasks is not None, "effects are performed while the actor runs"
        assert self._search is not None, "who looks for attempts has been told to"
        self._stop_locating()
        self._locating = tasks.create_task(self._search.find(effect))

    def _end_search(self) -> None:
        """Ends what an earlier JobManager has deployed, if the job has ended before that was found."""
        for slots in by_taskmanager(self._search.abandon() if self._search else ()).values():
            self._perform(job_effects.FreeSlots(slots))

    def _stop_locating(self) -> None:
        if self._locating is not None:
            self._locating.cancel()

    async def _promote(self, effect: job_effects.PromotePartitions) -> None:
        try:
            await self._promotion.promote(effect.partitions)
        except StreamError as error:
            self._log.warning("partitions.not_promoted", reason=str(error))
            self.post(job_events.PartitionsNotPromoted(cause_of_error(error, self._clock.now_ms())))
        else:
            self.post(job_events.PartitionsPromoted())

    async def _note_end(self, state: JobState) -> None:
        if state is JobState.FINISHED:
            await self.checkpoints.asked.operations.until_ended(_OPERATIONS_PATIENCE_S)
        await self._end(state)
        assert self._is_end_safe is not None, "it is made where the end begins"
        self._is_end_safe.set()

    async def _until_end_is_safe(self) -> None:
        """What a job that ends has is given back behind its end: a JobManager that does not know of that finds all of
        it as it was, and has nothing to do again."""
        if self._is_end_safe is not None:
            await self._is_end_safe.wait()

    async def _release(self, effect: job_effects.ReleasePartitions) -> None:
        await self._until_end_is_safe()
        await self._kept.release(effect)

    async def _free(self, slots: tuple[Slot, ...]) -> None:
        await self._until_end_is_safe()
        if not await free_slots(self._cluster, self._job.job_id, slots, self._log):
            self.has_lost_slots = True

    def story(self) -> list[str]:
        """The last events, for the log."""
        return list(self.master.story)
