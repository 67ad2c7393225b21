"""The machine of one job: events in, effects out.

    CREATED -> prepared -> slots -> slot processes -> attempts -> RUNNING -> end of data everywhere ->
    commit, or final checkpoint -> what outlives the job is promoted -> FINISHED
    a failure that may be mended: its regions stop -> delay -> prepared -> slots ... while the others run;
    RESTARTING only where none is left that runs
    any other failure: FAILING -> all attempts over -> FAILED; a cancellation likewise, also of what is FAILING;
    a JobManager that stops: SUSPENDED
    regions behind blocking edges begin when all that they read is there
    after another JobManager: prepared -> located, what was done before is adopted -> slots ...
    a subtask that is slow may have a second attempt beside the first, of which one counts (speculation.py)

Invariants (``check``):
- a job reaches at most one terminal state, when every attempt is over;
- one group of subtasks at a time is on its way (stops, waits, is prepared, scheduled): failures that come
  before it runs make it larger;
- nothing is deployed before every slot process it needs listens;
- a checkpoint that a task has found damaged is restored no more: there are only so many restarts for which
  the restart strategy is not asked;
- each granted slot is freed exactly once, unless it is lost with its TaskManager;
- without checkpoints output is committed once, and only when every attempt has finished or waits for it:
  whatever fails after that ends the job;
- reports for attempts that are unknown, neither current nor rivals, or already further are dropped and
  counted.

Source: Flink, JobMaster, DefaultScheduler and ExecutionGraph; FLIP-1; the commit at the end of the data is
Flink's final checkpoint (FLIP-147) for jobs that take none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.exceptions_history import ExceptionsHistory
from jobmanager.failover.failure_cause import FailureCause, more_telling
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.graph.deployment import DeploymentPlanner, TaskPlan
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    REPORTABLE,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import JobPlan
from jobmanager.job.checkpoint_wiring import (
    CheckpointWiring,
    Coordinator,
    WiredEffect,
)
from jobmanager.job.failover import ALL, Failover
from jobmanager.job.job_causes import (
    committed_already,
    lost_inputs,
    no_slots,
    not_cancelled,
    not_promoted,
    of_attempt,
    told,
)
from jobmanager.job.job_options import JobOptions, JobPhase
from jobmanager.job.slot_lease import SlotLease, free_stray
from jobmanager.job.source_splits import SourceSplits
from jobmanager.job.speculation import Speculation
from jobmanager.messages import job_messages as m
from jobmanager.messages.job_state import ENDING, TRANSITIONS, JobState, is_terminal
from jobmanager.partitions.partition_tracker import PartitionTracker
from penstock.errors import InvariantViolation, require_invariant

_STORY_LENGTH = 64
_DAMAGED = ("StoreCorrupt", "StoreNotFound")
"""A task that fails so has found the checkpoint damaged that it goes on from: another one is tried."""


class JobMaster:
    """Drives one job.

    Args:
        plan: shape of the job; ``plan_problem(plan)`` is None.
        options: how it is run.

    Example: what has begun asks for slots; what is cancelled before it has them is over.
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> master = JobMaster(JobPlan((VertexPlan("v1", parallelism=2),)))
        >>> master.step(m.JobStarted())
        [RequestSlots(count=2, group=0)]
        >>> for effect in master.step(m.CancelRequested()):
        ...     print(effect)
        PublishState(state=<JobState.CANCELLING: 5>)
        WithdrawRequest(group=0)
        PublishState(state=<JobState.CANCELED: 6>)
        >>> master.state.name
        'CANCELED'
    """

    def __init__(self, plan: JobPlan, options: JobOptions | None = None) -> None:
        self.plan = plan
        self.options = options or JobOptions()
        self.graph = ExecutionGraph(plan, self.options.first_attempt)
        self.state = JobState.RESTARTING if self.options.is_recovered else JobState.CREATED
        self.failure: FailureCause | None = None
        self.dropped_events = 0
        self.restored_checkpoint_id = 0
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._phase = JobPhase.NEW
        self._moving: frozenset[SubtaskId] = frozenset()
        """On their way: what stops, waits, is prepared or scheduled."""
        self._group = 0
        """Number of the group that is on its way, or was the last; none is used again."""
        self._now_ms = 0
        self._is_due = False
        """The delay of the restart is over."""
        regions = RegionGraph(plan)
        self._partitions = PartitionTracker(
            regions, self.graph, keeps_all=self.options.coordinator is not None
        )
        self._failover = Failover(self.options, regions, self.graph, self._partitions)
        self._lease = SlotLease(plan)
        self._deployments = DeploymentPlanner(self.graph, self._lease)
        self._splits = SourceSplits(plan)
        self.speculation = Speculation(
            self.options, regions, self.graph, self._lease, self._partitions, self._deployments
        )
        self._wiring = (
            CheckpointWiring(self.options.coordinator, self.graph)
            if self.options.coordinator is not None
            else None
        )
        self._unusable: set[int] = set()
        self._may_adopt = self.options.is_recovered
        self._found: RestoredCheckpoint | None = None
        """What the job goes on from, while it is asked for what was done before it."""
        self._committed = False
        self._is_final = False
        """It has been cancelled, and nobody ever goes on with it."""
        self._all_started = False
        self._effects: list[m.JobEffect] = []

    @property
    def ended(self) -> bool:
        """True when the job has reached its end, here at least."""
        return self._phase is JobPhase.ENDED

    @property
    def _is_over(self) -> bool:
        """True when nothing but the promotion decides about the end, or that has come."""
        return self._phase in (JobPhase.PROMOTING, JobPhase.ENDED)

    @property
    def attempt(self) -> int:
        """Number of the newest attempts."""
        return self.graph.attempt

    @property
    def restarts(self) -> int:
        """How often failures have restarted subtasks; going on after another JobManager is one."""
        return self._failover.restarts

    @property
    def restarts_by_region(self) -> Mapping[str, int]:
        """How often each region has begun again, named after its first subtask."""
        return self._failover.restarts_by_region

    @property
    def dropped(self) -> dict[str, int]:
        """What was dropped because it came too late, twice, or from nobody who was asked: part -> events."""
        dropped = {"job": self.dropped_events}
        if self._wiring is not None:
            dropped["stale checkpoint reports"] = self._wiring.stale_reports
        if self.coordinator is not None:
            dropped["checkpoints"] = self.coordinator.dropped_events
            dropped["checkpoint reports to other leaders"] = self.coordinator.fenced_events
        return dropped

    @property
    def exceptions(self) -> ExceptionsHistory:
        """The last failures, for views."""
        return self._failover.exceptions

    @property
    def coordinator(self) -> Coordinator | None:
        """For views; None where the job takes no checkpoints, or before HEAD is known."""
        return self._wiring.coordinator if self._wiring is not None else None

    def step(self, event: m.JobEvent, now_ms: int = 0) -> list[m.JobEffect]:
        """Takes one event and returns what is to be done, in order.

        Args:
            event: what has happened.
            now_ms: the wall clock.

        Raises:
            InvariantViolation: our bug; carries the last events.
        """
        self.story.append(told(event))
        self._effects = []
        self._now_ms = now_ms
        try:
            self._handle(event)
            self._effects += self.speculation.settle()
            self.check_step()
            key = getattr(event, "key", None)
            if key is not None:
                self.graph.check_step(key.subtask)
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        return self._effects

    def _handle(self, event: m.JobEvent) -> None:  # noqa: C901 - one case per event
        match event:
            case m.JobStarted():
                self._start()
            case m.StartPrepared() | m.StartNotPrepared():
                self._take_preparation(event)
            case m.PartitionsLocated():
                self._take_located(event)
            case m.RestartDue():
                self._take_due(event)
            case m.SlotsGranted():
                self._take_slots(event)
            case m.SlotsRefused():
                self._take_refusal(event)
            case m.SlotsAllocated():
                self._take_endpoints(event)
            case m.AttemptReported():
                self._take_report(event)
            case m.SplitsReported():
                self._assign_splits(event)
            case m.SideLoaded():
                self._take_side_loaded(event.key)
            case m.EndOfDataReported():
                self._take_end_of_data(event.key)
            case m.KeptRowsLost():
                if self._partitions.lose_attempt(event.key):
                    self._give_up_on([], event.cause)
            case m.CommitNoted():
                self._commit()
            case m.PartitionsPromoted() | m.PartitionsNotPromoted():
                self._take_promotion(event)
            case m.FinalCheckpointDue():
                self._retry_final(event)
            case m.CallFailed():
                self._take_failed_call(event)
            case m.TaskManagerGone():
                self._lose_taskmanager(event)
            case m.CancelRequested():
                is_ending = self.state in ENDING and self.state is not JobState.FAILING
                if not is_ending and not self._is_over:
                    self._is_final = event.is_noted and not self.options.retains_on_cancellation
                    self._stop(JobState.CANCELLING, is_final=self._is_final)
            case m.SuspendRequested():
                if self.state not in ENDING and not self._is_over:
                    self._stop(JobState.SUSPENDED)
            case m.FailureRequested():
                self._fail(event.cause, ALL)
            case m.CancellationOverdue():
                self._end_overdue(event)
            case (
                m.StragglersDue()
                | m.AttemptsReserved()
                | m.SpareSlotGranted()
                | m.RivalStarted()
                | m.RivalNotStarted()
            ):
                self._take_speculation(event)
            case (
                c.TimeReached()
                | c.CheckpointRequested()
                | c.AckReceived()
                | c.DeclineReceived()
                | c.CheckpointStored()
                | c.CheckpointNotStored()
                | c.StoreOutcomeUnknown()
                | c.FilesDeleted()
                | c.IdsReserved()
                | c.IdsNotReserved()
            ):
                self._take_checkpoint_event(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ the beginning of an attempt

    def _start(self) -> None:
        if self._phase is not JobPhase.NEW:
            self.dropped_events += 1  # cancelled before it began
            return
        self._prepare()

    def _prepare(self) -> None:
        """The first attempts, or all again after a restart that others may not notice."""
        if not self.options.survives and self.attempt == self.options.first_attempt:
            self._schedule()  # nothing is stored, and nothing of earlier attempts is held
            return
        self._phase = JobPhase.PREPARING
        alone = self._moving if self.graph.started else None
        self._effects.append(m.PrepareStart(self.attempt, tuple(sorted(self._unusable)), alone))

    def _take_preparation(self, event: m.StartPrepared | m.StartNotPrepared) -> None:
        if self._wiring is not None and isinstance(event, m.StartPrepared):
            # What it says of HEAD holds whether or not somebody still waits for it.
            self._wiring.open(event)
        if self._phase is not JobPhase.PREPARING or event.attempt != self.attempt:
            self.dropped_events += 1
            return
        if isinstance(event, m.StartNotPrepared):
            self._fail(event.cause, self._moving)
            return
        restored = event.restored
        self.restored_checkpoint_id = restored.checkpoint_id if restored else 0
        assert self.restored_checkpoint_id not in self._unusable, "what is damaged is skipped"
        pinned = self._failover.pinned(restored) if restored and self._may_adopt else ()
        if pinned:
            self._found = restored
            self._effects.append(m.LocatePartitions(self.attempt, pinned))
        else:
            self._begin_from(restored, is_whole=not self.graph.started)

    def _take_located(self, event: m.PartitionsLocated) -> None:
        """What was done under another JobManager, and is still there, is not done again."""
        is_awaited = self._phase is JobPhase.PREPARING and event.attempt == self.attempt
        if self._found is None or not is_awaited:
            self.dropped_events += 1
            return
        for located in event.located:
            self._lease.note_partition_endpoint(located.taskmanager_id, located.endpoint)
        self._failover.adopt(self._found, event.located)
        self._begin_from(self._found, is_whole=True)

    def _begin_from(self, restored: RestoredCheckpoint | None, *, is_whole: bool) -> None:
        self._may_adopt, self._found = False, None
        if restored is not None:
            restored = restored.without(self._failover.begins_from_nothing)
            problem = self._failover.unreadable(restored, self.graph.unstarted)
            if problem is not None:
                self._fail(problem, self._moving)
                return
            self.graph.resume(restored.subtasks)
        if is_whole:
            self._splits = SourceSplits(self.plan, restored)
        else:
            self._splits.restart(self._moving, restored)
        if self._wiring is not None:
            if restored is not None and not is_whole:
                restored = restored.without(self._failover.is_rebuilt)
            self._wiring.restored(restored, self._moving)
        self._schedule()

    def _schedule(self) -> None:
        """Asks for the slots of what can begin."""
        self._moving = self._failover.startable()
        for attempt in self.graph.attempts_of(self._moving):
            attempt.become(AttemptState.SCHEDULED)
        self._phase = JobPhase.SCHEDULING
        requests = self._lease.request(self._group, self._moving)
        if requests:
            self._effects += [*self.speculation.yield_slots(), *requests]
        else:
            self._allocate()

    def _take_slots(self, event: m.SlotsGranted) -> None:
        if not self._lease.waits_for(event.group):
            # The request was withdrawn while the grant was on its way.
            self._effects += free_stray(event.slots)
            return
        self._lease.take(event.slots, event.group, self.attempt)
        # Slots that it had may have been lost while it waited.
        missing = self._lease.request(self._group, self._moving)
        self._effects += missing
        if not missing:
            self._allocate()

    def _take_refusal(self, event: m.SlotsRefused) -> None:
        if not self._lease.waits_for(event.group):
            self.dropped_events += 1
            return
        self._lease.refuse(event.group)
        self._fail(no_slots(event), self._moving)

    def _allocate(self) -> None:
        for attempt in self.graph.attempts_of(self._moving):
            slot = self._lease.slot_of(attempt.key.subtask)
            attempt.slot_id, attempt.taskmanager_id = slot.slot_id, slot.taskmanager_id
        self._effects += self._lease.allocate(self._group, self._moving)

    def _take_endpoints(self, event: m.SlotsAllocated) -> None:
        group = self._lease.asked_by(event)
        if group is None:
            self.dropped_events += 1
            return
        self._partitions.lose_slots(self._lease.note_endpoints(group, event))
        if not self._lease.all_listen(group):
            return
        if missing := self._partitions.needed_and_missing():
            failed = self._moving | {partition.producer for partition in missing}
            self._fail(lost_inputs(missing), failed, missing)
        else:
            self._deploy()

    def _deploy(self) -> None:
        attempts = self.graph.attempts_of(self._moving)
        nowhere = self._lease.without_address(attempt.slot_id for attempt in attempts)
        if nowhere:
            message = f"slots {', '.join(nowhere)} were allocated without an address"
            self._fail(FailureCause("StreamError", message), self._moving)
            return
        deployed, self._moving = self._moving, frozenset()
        self._phase = JobPhase.DEPLOYED
        tasks: dict[str, list[TaskPlan]] = {}
        from_nothing = frozenset(filter(self._failover.begins_from_nothing, deployed))
        for attempt in attempts:
            attempt.become(AttemptState.DEPLOYING)
            attempt.deployed_at_ms = self._now_ms
            if attempt.key.subtask not in from_nothing:
                attempt.restored_from = self.restored_checkpoint_id
            task = self._deployments.task(attempt)
            tasks.setdefault(attempt.taskmanager_id, []).append(task)
        for taskmanager_id, own in tasks.items():
            self._effects.append(m.DeployTasks(taskmanager_id, tuple(own), from_nothing))
        self._send(self._splits.told_again(deployed, self.graph))
        self._send(
            m.ReplaceProducer(key, edge_id, channel)
            for key, edge_id, channel in self._deployments.replaced_producers(deployed)
        )
        self._effects += self.speculation.deployed(deployed)
        self._go_on()

    # ------------------------------------------------------------ reports of attempts

    def _find(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt, current or a rival, that a report is about; None (and counted) where it is stale."""
        attempt = self.graph.find(key)
        if attempt is None or attempt.state not in ON_TASKMANAGER:
            self.dropped_events += 1
            return None
        return attempt

    def _take_report(self, event: m.AttemptReported) -> None:
        attempt = self._find(event.key)
        if attempt is None:
            return
        if event.state not in REPORTABLE or not attempt.can_become(event.state):
            self.dropped_events += 1
            return
        was_cancelled = attempt.state is AttemptState.CANCELING
        was_starting = attempt.is_starting
        attempt.become(event.state)
        if event.state is AttemptState.FAILED:
            cause = event.failure or of_attempt(attempt, "it failed without a cause")
            if not self._is_survived(attempt, cause, misses_input=event.missing is not None):
                self._take_failure(attempt, cause, event, was_starting=was_starting)
        elif event.state is AttemptState.CANCELED and not was_cancelled:
            # Nobody asked for it.
            cause = of_attempt(attempt, "its TaskManager cancelled it")
            if not self._is_survived(attempt, cause):
                self._fail(cause, [event.key.subtask])
        elif event.state is AttemptState.FINISHED:
            self._effects += self.speculation.done(attempt, self._now_ms)
            self._partitions.produced(attempt)
            self._effects += self._partitions.release_unneeded(self._moving)
            if self._wiring is not None:
                self._perform(
                    self._wiring.finished(event.key, event.last, self._splits, self._now_ms)
                )
        self._go_on()

    def _take_failure(
        self,
        attempt: ExecutionAttempt,
        cause: FailureCause,
        event: m.AttemptReported,
        *,
        was_starting: bool,
    ) -> None:
        """An attempt has failed: this concerns itself, or all where their checkpoint is damaged.

        Args:
            was_starting: it had not got its state yet. What fails so later has had it, and is counted.
        """
        failed: Iterable[SubtaskId] | None = [attempt.key.subtask]
        damaged = attempt.restored_from if cause.error_class in _DAMAGED else 0
        if damaged:
            self._unusable.add(damaged)
            if damaged == self.restored_checkpoint_id:
                # Others hold what follows the damaged checkpoint, and not what follows an older one.
                failed = ALL
        is_free = bool(damaged) and was_starting
        self._fail(cause, failed, self._blamed(event), is_free=is_free)

    def _blamed(self, event: m.AttemptReported) -> list[KeptOutput]:
        """The partition that a consumer could not read, unless it has been replaced meanwhile, is none that
        is kept (then both are of one region), or is another job's; and what has gone with it.
        """
        missing, reader = event.missing, event.key.vertex
        if missing is None or not self.plan.has_edge(missing.edge_id, reader):
            return []
        partition = KeptOutput(missing.edge_id, missing.producer.subtask)
        if not self._partitions.is_kept(partition):
            return []
        is_current = self._partitions.miss(partition, missing.producer.attempt)
        return self._partitions.gone_with(partition, event.key.subtask) if is_current else []

    def _take_side_loaded(self, key: AttemptKey) -> None:
        attempt = self._find(key)
        if attempt is None:
            return
        attempt.has_loaded = True
        if self._wiring is not None:
            self._perform(self._wiring.loaded(key, self._splits, self._now_ms))

    def _take_end_of_data(self, key: AttemptKey) -> None:
        attempt = self._find(key)
        if attempt is None:
            return
        if attempt.reached_end_of_data:
            self.dropped_events += 1
            return
        attempt.reached_end_of_data = True
        self._effects += self.speculation.done(attempt, self._now_ms)
        self._partitions.produced(attempt)
        self._go_on()

    def _assign_splits(self, event: m.SplitsReported) -> None:
        attempt = self._find(event.key)
        assigner = self._splits.assigner(event.key.vertex, event.operator_uid)
        if attempt is None:
            return
        if assigner is None or event.key.subtask_index != 0:
            message = f"reported splits of {event.operator_uid!r}, which is no source it speaks for"
            self._fail(of_attempt(attempt, message), [event.key.subtask])
            return
        if attempt.state is AttemptState.CANCELING or assigner.is_final:
            self.dropped_events += 1
            return
        self._send(self._splits.assign(event, self.graph))

    def _send(self, commands: Iterable[m.Command]) -> None:
        """Sends what is for attempts that a TaskManager may know."""
        by_taskmanager: dict[str, list[m.Command]] = {}
        for command in commands:
            attempt = self.graph.find_current(command.key)
            if attempt is not None and attempt.state in ON_TASKMANAGER:
                by_taskmanager.setdefault(attempt.taskmanager_id, []).append(command)
        for taskmanager_id, own in by_taskmanager.items():
            self._effects.append(m.SendCommands(taskmanager_id, tuple(own)))

    # ------------------------------------------------------------ the way forward

    def _go_on(self) -> None:
        """Moves the job as far as its attempts allow."""
        if self._phase is JobPhase.DEPLOYED and self.graph.all_running_or_finished:
            if not self._all_started:
                self._note_all_started()
            if self.graph.all_finished:
                self._finish()
            elif self.graph.all_done_or_waiting:
                self._complete_output()
        if self._phase is JobPhase.DEPLOYED and self.graph.unstarted and self._failover.startable():
            self._all_started = False
            self._group += 1
            self._schedule()
        elif self._phase is JobPhase.STOPPING and self.graph.all_terminal(self._moving):
            self._take_end_of_attempts()

    def _note_all_started(self) -> None:
        self._all_started = True
        if self.state is not JobState.RUNNING:
            self._become(JobState.RUNNING)
        if (
            self._wiring is not None
            and not self.graph.all_finished
            and not self.graph.waits_to_resume
            and not self.graph.waits_to_load
            and not self._failover.will_read_from_the_start(self.graph.unstarted)
        ):
            self._perform(self._wiring.started(self._splits, self._now_ms))

    def _complete_output(self) -> None:
        """Every attempt has finished or waits: its output is made visible."""
        if self._wiring is not None:
            self._perform(self._wiring.request_final(self._splits, self._now_ms))
        elif not self._committed:
            self._committed = True
            if self.options.survives:
                self._effects.append(m.NoteCommit())
            else:
                self._commit()

    def _commit(self) -> None:
        if self._phase is not JobPhase.DEPLOYED:
            self.dropped_events += 1
            return
        self._send(
            m.CommitOutput(attempt.key)
            for attempt in self.graph.current()
            if attempt.state is AttemptState.RUNNING
        )

    def _retry_final(self, event: m.FinalCheckpointDue) -> None:
        if self._wiring is None or self._phase is not JobPhase.DEPLOYED:
            self.dropped_events += 1
            return
        self._wiring.retry_final()
        self._go_on()

    # ------------------------------------------------------------ checkpoints

    def _take_checkpoint_event(self, event: m.CheckpointEvent) -> None:
        if self._wiring is not None and not self.ended:
            self._perform(self._wiring.take(event, self._splits))
        elif isinstance(event, c.CheckpointRequested):
            refused = c.RequestRefused.NOT_RUNNING if self._wiring else c.RequestRefused.DISABLED
            self._effects.append(c.AnswerRequest(event.request_id, 0, refused))
        else:
            self.dropped_events += 1

    def _perform(self, effects: Iterable[WiredEffect]) -> None:
        for effect in effects:
            self._failover.note_checkpoints(effect)
            if isinstance(effect, c.FailJob):
                cause = FailureCause("CheckpointAborted", effect.message)
                self._fail(cause, ALL, is_free=effect.is_free)
            else:
                self._effects.append(effect)

    # ------------------------------------------------------------ rivals of slow attempts

    def _take_speculation(self, event: m.SpeculationEvent) -> None:
        effects = self.speculation.take(event, self._splits, self._phase, self._now_ms)
        if effects is not None:
            self._effects += effects
        elif isinstance(event, m.RivalNotStarted):
            self._lose_replacement(event)
        else:
            self.dropped_events += 1

    def _lose_replacement(self, event: m.RivalNotStarted) -> None:
        """A rival that is the current attempt by now was perhaps never deployed, unless it is done already."""
        attempt = self._find(event.key)
        if attempt is not None and not attempt.reached_end_of_data:
            self._give_back([attempt.slot_id])
            self._give_up_on(self.graph.in_slots([attempt.slot_id]), event.cause)

    def _is_survived(
        self, attempt: ExecutionAttempt, cause: FailureCause, *, misses_input: bool = False
    ) -> bool:
        """Whether another attempt does the work of one that is over before its time."""
        effects = self.speculation.survive(attempt, cause, misses_input=misses_input)
        self._effects += effects or ()
        return effects is not None

    # ------------------------------------------------------------ failures

    def _take_failed_call(self, event: m.CallFailed) -> None:
        """Nobody knows what runs there now: giving its slots back ends whatever is left."""
        taskmanager_id = event.taskmanager_id
        if not self._lease.uses(taskmanager_id) or event.attempt < self._lease.since(
            taskmanager_id
        ):
            self.dropped_events += 1
            return
        self._give_back(self._lease.slots_on(taskmanager_id))
        self._effects += self.speculation.lose_taskmanager(taskmanager_id, event.cause)
        self._give_up_on(self.graph.on_taskmanager(taskmanager_id), event.cause)

    def _lose_taskmanager(self, event: m.TaskManagerGone) -> None:
        self._partitions.lose_taskmanager(event.taskmanager_id)
        self._lease.lose(event.taskmanager_id)
        self._effects += self.speculation.lose_taskmanager(event.taskmanager_id, event.cause)
        self._give_up_on(
            self.graph.on_taskmanager(event.taskmanager_id),
            event.cause,
            is_free=event.is_planned,
        )

    def _give_up_on(
        self, attempts: list[ExecutionAttempt], cause: FailureCause, *, is_free: bool = False
    ) -> None:
        """Counts attempts as failed whose end nobody will report, and what is needed and lost with them."""
        failed: set[SubtaskId] = set()
        were_cancelled = [a for a in attempts if a.state is AttemptState.CANCELING]
        for attempt in attempts:
            attempt.become(AttemptState.FAILED)
            if attempt not in were_cancelled and not self._is_survived(attempt, cause):
                failed.add(attempt.key.subtask)
        missing = self._partitions.needed_and_missing(self._stopped())
        failed |= {partition.producer for partition in missing}
        # What is being cancelled may be so for a consequence of what has happened now.
        if were_cancelled or failed - self._stopped():
            self._fail(cause, failed, missing, is_free=is_free)
        self._go_on()

    def _stopped(self) -> frozenset[SubtaskId]:
        """What begins again anyway."""
        is_stopping = self._phase in (JobPhase.STOPPING, JobPhase.WAITING)
        return self._moving if is_stopping else frozenset()

    def _fail(
        self,
        cause: FailureCause,
        failed: Iterable[SubtaskId] | None,
        missing: Iterable[KeptOutput] = (),
        *,
        is_free: bool = False,
    ) -> None:
        """Restarts what the failure concerns, or fails the job.

        Args:
            failed: whose attempts are over, or ``ALL``.
            missing: what could not be read.
            is_free: the restart goes on from another checkpoint, or a TaskManager was told to end: the strategy is
                not asked for it.
        """
        if self._is_over or self.state in (JobState.CANCELLING, JobState.SUSPENDED):
            return
        if not cause.timestamp_ms:
            cause = replace(cause, timestamp_ms=self._now_ms)
        if self.state is JobState.FAILING:
            # An original cause takes the place of a consequence of it.
            self.failure = more_telling(self.failure, self._failover.join_end(cause))
            return
        if self._committed:
            cause = committed_already(cause)
        joins = self._phase in (JobPhase.STOPPING, JobPhase.WAITING)
        recovery = self._failover.decide(
            cause, failed, missing, self._now_ms, joins=joins, is_free=is_free
        )
        if recovery.delay_ms is None:
            self.failure = recovery.cause
            self._stop(JobState.FAILING)
            return
        self.failure = more_telling(self.failure, cause) if joins else cause
        self._restart_after(recovery.delay_ms, recovery.subtasks, joins=joins)

    def _restart_after(self, delay_ms: int, subtasks: frozenset[SubtaskId], *, joins: bool) -> None:
        """Stops subtasks that are to begin again."""
        if not joins:
            self._is_due = False
            withdrawn = self._lease.withdraw(self._group)
            self._group += 1
            self._effects += [m.PostLater(delay_ms, m.RestartDue(self._group)), *withdrawn]
        self._moving |= subtasks
        self._all_started = False
        is_whole = self._moving >= self.graph.started - self.graph.in_state(AttemptState.FINISHED)
        if self.state is not JobState.RESTARTING and (
            is_whole or self.state is not JobState.RUNNING
        ):
            self._become(JobState.RESTARTING)
        self._phase = JobPhase.STOPPING
        self._cancel(self._moving, is_final=False)
        self._stop_checkpoints()
        self._go_on()

    def _cancel(self, subtasks: Iterable[SubtaskId], *, is_final: bool) -> None:
        self._effects += self.speculation.end(subtasks)
        to_cancel = self.graph.cancel(subtasks, again=is_final)
        self._effects += [
            m.CancelTasks(id, tuple(keys), is_final) for id, keys in to_cancel.items()
        ]
        if to_cancel:
            self._effects.append(m.AwaitCancellation(self._group))

    def _stop(self, state: JobState, *, is_final: bool = False) -> None:
        """Leaves the way forward for good: cancels what a TaskManager has, drops what none has.

        Args:
            is_final: nobody ever goes on with the job.
        """
        if state is not self.state:
            self._become(state)
        self._effects += self._lease.withdraw(self._group)
        self._group += 1
        self._moving = frozenset(self.graph.subtasks())
        self._phase = JobPhase.STOPPING
        self._cancel(self._moving, is_final=is_final)
        self._stop_checkpoints()
        self._go_on()

    def _stop_checkpoints(self) -> None:
        """Those who go on are told what is void."""
        if self._wiring is not None:
            self._perform(self._wiring.stopped(self._splits, self._now_ms))

    def _end_overdue(self, event: m.CancellationOverdue) -> None:
        if self._phase is not JobPhase.STOPPING or event.group != self._group:
            self.dropped_events += 1
            return
        overdue = self.graph.give_up()
        slot_ids = {attempt.slot_id for attempt in overdue}
        self._give_back(slot_ids)
        self._give_up_on(self.graph.in_slots(slot_ids), not_cancelled(overdue))

    def _give_back(self, slot_ids: Collection[str]) -> None:
        """Ends slots, and all that their processes hold."""
        self._effects += self._lease.give_back(slot_ids)
        self._partitions.lose_slots(slot_ids)

    # ------------------------------------------------------------ the end of attempts

    def _take_end_of_attempts(self) -> None:
        if self.state is JobState.FAILING:
            self._end(JobState.FAILED)
        elif self.graph.all_finished and not self._partitions.needed_and_missing():
            self._finish()
        elif self.state is JobState.CANCELLING:
            self._end(JobState.CANCELED)
        elif self.state is JobState.SUSPENDED:
            self._end(JobState.SUSPENDED)
        else:
            self._phase = JobPhase.WAITING
            self._restart()

    def _take_due(self, event: m.RestartDue) -> None:
        if self._phase not in (JobPhase.STOPPING, JobPhase.WAITING) or event.group != self._group:
            self.dropped_events += 1
            return
        self._is_due = True
        self._restart()

    def _restart(self) -> None:
        """Begins again, when the delay is over and all attempts are."""
        if self._phase is not JobPhase.WAITING or not self._is_due:
            return
        self.graph.begin_again(self._moving)
        self._effects += self._partitions.release_replaced(self._moving)
        self._failover.count_regions(self._moving)
        self._prepare()

    def _finish(self) -> None:
        """Every attempt has finished: what is to outlive the job is promoted, then the job is over."""
        persisted = self._partitions.persisted()
        if not persisted:
            self._end(JobState.FINISHED)
        elif self.state is JobState.CANCELLING:
            self._end(JobState.CANCELED)
        elif self.state is JobState.SUSPENDED:
            self._end(JobState.SUSPENDED)
        else:
            self._phase = JobPhase.PROMOTING
            self._effects.append(m.PromotePartitions(persisted))

    def _take_promotion(self, event: m.PartitionsPromoted | m.PartitionsNotPromoted) -> None:
        if self._phase is not JobPhase.PROMOTING:
            self.dropped_events += 1
        elif isinstance(event, m.PartitionsPromoted):
            self._end(JobState.FINISHED)
        else:
            self._phase = JobPhase.DEPLOYED
            self._fail(not_promoted(event.cause), ALL)

    def _end(self, state: JobState) -> None:
        self._stop_checkpoints()
        if state is not self.state:
            self._become(state)
        self._phase = JobPhase.ENDED
        if state is not JobState.SUSPENDED:  # else its successor may adopt what is held
            self._effects += self._partitions.release_all()
        self._effects += self._lease.give_back_all()
        had_others = self.failure is not None or self.options.is_recovered
        if state is JobState.CANCELED and self._is_final and had_others:
            self._effects.append(m.SweepOutput())
        is_discarded = state is JobState.FINISHED or (
            state is JobState.CANCELED and not self.options.retains_on_cancellation
        )
        if self._wiring is not None and is_discarded:
            self._effects.append(m.DiscardCheckpoints())

    def _become(self, state: JobState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"job: {self.state.name} cannot become {state.name}")
        self.state = state
        self._effects.append(m.PublishState(state))

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever the size of the job: run after each step.

        Raises:
            InvariantViolation: one does not hold.
        """
        require_invariant(is_terminal(self.state) <= self.ended, "a terminal state is the end")
        if self.ended:
            require_invariant(not self._lease.slots, "a job that has ended gives its slots back")
        if self.ended or self._lease.waits:
            require_invariant(not self.graph.has_rivals, "rivals where no slot is to spare")
        if self.state in (JobState.FAILING, JobState.FAILED):
            require_invariant(self.failure is not None, "a failure has a cause")

    def check(self) -> None:
        """Asserts the invariants named at the head of the file, as far as the state shows them."""
        self.check_step()
        self.graph.check()
        self._partitions.check()
        states = {attempt.state for attempt in self.graph.current()}
        if self._phase is JobPhase.ENDED:
            assert self.graph.all_terminal(self.graph.subtasks()), "attempts end before the job"
        if self._phase is JobPhase.PROMOTING:
            assert self.graph.all_finished, "only what is complete outlives its job"
        if self._phase is JobPhase.WAITING:
            assert self.graph.all_terminal(self._moving), "attempts end before they begin again"
        if self.state is JobState.FINISHED:
            assert states == {AttemptState.FINISHED}
        if self._phase in (JobPhase.PREPARING, JobPhase.SCHEDULING):
            moving = {attempt.state for attempt in self.graph.attempts_of(self._moving)}
            assert not moving & ON_TASKMANAGER, "nothing runs before it is deployed"
        if self._committed and self._phase is JobPhase.DEPLOYED:
            assert self.graph.all_done_or_waiting, "only what has reached its end is committed"
