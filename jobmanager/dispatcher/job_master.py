"""The machine of one job: events in, effects out.

    CREATED -> prepared -> slots -> slot processes -> attempts -> RUNNING -> end of data everywhere ->
    commit, or final checkpoint -> FINISHED
    a failure that may be mended: RESTARTING -> all attempts over -> slots freed -> delay -> prepared ...
    any other failure: FAILING -> all attempts over -> FAILED; a cancellation likewise; a JobManager that
    stops: SUSPENDED

Invariants (``check``):
- a job reaches at most one terminal state, when every attempt is over;
- nothing is deployed before every slot process of the job listens;
- each granted slot is freed exactly once, unless it is lost with its TaskManager;
- without checkpoints output is committed once, and only when every attempt has finished or waits for it;
- failures that come before a restart's next attempts begin belong to that restart;
- reports for attempts that are unknown, not current, or already further are dropped and counted.

Source: Flink, JobMaster, DefaultScheduler and ExecutionGraph; the commit at the end of the data is
Flink's final checkpoint (FLIP-147) for jobs that take none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from jobmanager.checkpoint import messages as c
from jobmanager.dispatcher import job_messages as m
from jobmanager.dispatcher.checkpoint_wiring import (
    CheckpointWiring,
    Coordinator,
    FailJob,
    WiredEffect,
)
from jobmanager.dispatcher.job_causes import no_slots, of_attempt, subtask_of, told
from jobmanager.dispatcher.job_options import FORWARD, JobOptions, Phase
from jobmanager.dispatcher.job_state import ENDING, TRANSITIONS, JobState, is_terminal
from jobmanager.dispatcher.slot_lease import SlotLease
from jobmanager.dispatcher.source_splits import SourceSplits
from jobmanager.failover.exceptions_history import ExceptionsHistory
from jobmanager.failover.failure_cause import FailureCause, more_telling
from jobmanager.failover.restart_strategy import RestartStrategy
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    REPORTABLE,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import JobPlan
from jobmanager.scheduler.deployment import TaskPlan, plan_deployments
from jobmanager.scheduler.placement import place, slots_needed
from jobmanager.scheduler.slots import Slot
from penstock.errors import InvariantViolation

_STORY_LENGTH = 64
_DAMAGED = ("StoreCorrupt", "StoreNotFound")
"""A task that fails so has found its checkpoint damaged: an older one is tried."""


class JobMaster:
    """Drives one job.

    Args:
        plan: shape of the job; ``plan_problem(plan)`` is None.
        options: how it is run.
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
        self._phase = Phase.NEW
        self._now_ms = 0
        self.exceptions = ExceptionsHistory(self.options.exceptions_max)
        self._strategy = RestartStrategy(
            self.options.restart,
            jitter=self.options.jitter,
            is_recovered=self.options.is_recovered,
        )
        self._restart_delay_ms = 0
        self._lease = SlotLease()
        self._splits = SourceSplits(plan)
        self._wiring = (
            CheckpointWiring(self.options.coordinator, self.graph)
            if self.options.coordinator is not None
            else None
        )
        self._unusable: set[int] = set()
        self._committed = False
        self._all_started = False
        self._effects: list[m.JobEffect] = []

    @property
    def ended(self) -> bool:
        """True when the job has reached its end, here at least."""
        return self._phase is Phase.ENDED

    @property
    def attempt(self) -> int:
        """Number of the current attempts."""
        return self.graph.attempt

    @property
    def restarts(self) -> int:
        """How often the job has been restarted here; going on after another JobManager is one."""
        return self._strategy.restarts + self.options.is_recovered

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
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        return self._effects

    def _handle(self, event: m.JobEvent) -> None:  # noqa: C901 - one case per event
        match event:
            case m.JobStarted():
                self._start()
            case m.StartPrepared() | m.StartNotPrepared():
                self._take_preparation(event)
            case m.RestartDue():
                self._restart(event)
            case m.SlotsGranted():
                self._take_slots(event.slots)
            case m.SlotsRefused():
                self._lease.waits = False
                self._fail(no_slots(event))
            case m.SlotsAllocated():
                self._take_endpoints(event)
            case m.AttemptReported():
                self._take_report(event)
            case m.SplitsReported():
                self._assign_splits(event)
            case m.EndOfDataReported():
                self._take_end_of_data(event.key)
            case m.FinalCheckpointDue():
                self._retry_final(event)
            case m.CallFailed():
                self._take_failed_call(event)
            case m.TaskManagerLost():
                self._lose_taskmanager(event)
            case m.CancelRequested():
                if self.state not in ENDING and not self.ended:
                    self._stop(JobState.CANCELLING, is_final=event.is_noted)
            case m.SuspendRequested():
                if self.state not in ENDING and not self.ended:
                    self._stop(JobState.SUSPENDED)
            case m.FailureRequested():
                self._fail(event.cause)
            case m.CancellationOverdue():
                self._end_overdue(event)
            case (
                c.TimeReached()
                | c.CheckpointRequested()
                | c.AckReceived()
                | c.DeclineReceived()
                | c.CheckpointStored()
                | c.CheckpointNotStored()
                | c.FilesDeleted()
            ):
                self._take_checkpoint_event(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ the beginning of an attempt

    def _start(self) -> None:
        if self._phase is not Phase.NEW:
            self.dropped_events += 1  # cancelled before it began
            return
        self._prepare()

    def _prepare(self) -> None:
        for attempt in self.graph.current():
            attempt.become(AttemptState.SCHEDULED)
        if self.options.survives:
            self._phase = Phase.PREPARING
            self._effects.append(m.PrepareStart(self.attempt, tuple(sorted(self._unusable))))
        else:
            self._request_slots()

    def _take_preparation(self, event: m.StartPrepared | m.StartNotPrepared) -> None:
        if self._phase is not Phase.PREPARING or event.attempt != self.attempt:
            self.dropped_events += 1
            return
        if isinstance(event, m.StartNotPrepared):
            self._fail(event.cause)
            return
        if self._wiring is not None:
            self._wiring.open(event)
        self.restored_checkpoint_id = event.restored.checkpoint_id if event.restored else 0
        self._splits = SourceSplits(self.plan, event.restored)
        self._request_slots()

    def _request_slots(self) -> None:
        self._phase = Phase.SCHEDULING
        self._effects += self._lease.request(slots_needed(self.plan))

    def _take_slots(self, slots: tuple[Slot, ...]) -> None:
        if not self._lease.waits and self._phase is not Phase.SCHEDULING:
            # The request was withdrawn while the grant was on its way.
            stray = SlotLease()
            stray.take(slots)
            self._effects += stray.free()
            return
        self._lease.take(slots)
        for subtask, slot in place(self.plan, slots).items():
            attempt = self.graph.current_of(subtask)
            attempt.slot_id, attempt.taskmanager_id = slot.slot_id, slot.taskmanager_id
        self._effects += self._lease.allocate()

    def _take_endpoints(self, event: m.SlotsAllocated) -> None:
        if (
            self._phase is not Phase.SCHEDULING
            or event.attempt != self.attempt
            or not self._lease.note_endpoints(event.taskmanager_id, event.endpoints)
        ):
            self.dropped_events += 1
            return
        if self._lease.all_listen:
            self._deploy()

    def _deploy(self) -> None:
        missing = self._lease.without_address
        if missing:
            message = f"slots {', '.join(missing)} were allocated without an address"
            self._fail(FailureCause("StreamError", message))
            return
        self._phase = Phase.DEPLOYED
        tasks: dict[str, list[TaskPlan]] = {}
        for task in plan_deployments(self.graph, self._lease.endpoint_of_slot):
            attempt = self.graph.current_of(task.attempt.subtask)
            attempt.become(AttemptState.DEPLOYING)
            tasks.setdefault(attempt.taskmanager_id, []).append(task)
        for taskmanager_id, own in tasks.items():
            self._effects.append(m.DeployTasks(taskmanager_id, tuple(own)))
        self._send(
            m.AddSplits(self.graph.current_of(subtask).key, uid, (), True)
            for subtask, uid in self._splits.left_without_discovery()
        )

    # ------------------------------------------------------------ reports of attempts

    def _current(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt a report is about; None (and counted) where the report is stale."""
        attempt = self.graph.find_current(key)
        if attempt is None or attempt.state not in ON_TASKMANAGER:
            self.dropped_events += 1
            return None
        return attempt

    def _take_report(self, event: m.AttemptReported) -> None:
        attempt = self._current(event.key)
        if attempt is None:
            return
        if event.state not in REPORTABLE or not attempt.can_become(event.state):
            self.dropped_events += 1
            return
        attempt.become(event.state)
        if event.state is AttemptState.FAILED:
            self._fail(event.failure or of_attempt(attempt, "it failed without a cause"))
        elif event.state is AttemptState.CANCELED and self._phase in FORWARD:
            # Nobody asked for it.
            self._fail(of_attempt(attempt, "its TaskManager cancelled it"))
        elif event.state is AttemptState.FINISHED and self._wiring is not None:
            self._perform(self._wiring.finished(event.key, self._splits, self._now_ms))
        self._go_on()

    def _take_end_of_data(self, key: AttemptKey) -> None:
        attempt = self._current(key)
        if attempt is None:
            return
        if attempt.reached_end_of_data:
            self.dropped_events += 1
            return
        attempt.reached_end_of_data = True
        self._go_on()

    def _assign_splits(self, event: m.SplitsReported) -> None:
        attempt = self._current(event.key)
        assigner = self._splits.assigner(event.key.vertex, event.operator_uid)
        if attempt is None:
            return
        if assigner is None or event.key.subtask_index != 0:
            message = f"reported splits of {event.operator_uid!r}, which is no source it speaks for"
            self._fail(of_attempt(attempt, message))
            return
        if self._phase is not Phase.DEPLOYED or assigner.is_final:
            self.dropped_events += 1
            return
        self._send(self._splits.assign(event, self.attempt))

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
        if self._phase is Phase.DEPLOYED and self.graph.all_running_or_finished:
            if not self._all_started:
                self._note_all_started()
            if self.graph.all_finished:
                self._end(JobState.FINISHED)
            elif self.graph.all_done_or_waiting:
                self._complete_output()
        elif self._phase is Phase.STOPPING and self.graph.all_terminal:
            self._take_end_of_attempts()

    def _note_all_started(self) -> None:
        self._all_started = True
        if self.state is not JobState.RUNNING:
            self._become(JobState.RUNNING)
        if self._wiring is not None and not self.graph.all_finished:
            self._perform(self._wiring.started(self._splits, self._now_ms))

    def _complete_output(self) -> None:
        """Every attempt has finished or waits: its output is made visible."""
        if self._wiring is not None:
            self._perform(self._wiring.request_final(self._splits, self._now_ms))
        elif not self._committed:
            self._committed = True
            self._send(
                m.CommitOutput(attempt.key)
                for attempt in self.graph.current()
                if attempt.state is AttemptState.RUNNING
            )

    def _retry_final(self, event: m.FinalCheckpointDue) -> None:
        if self._wiring is None or event.attempt != self.attempt:
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
            if isinstance(effect, FailJob):
                self._fail(FailureCause("CheckpointAborted", effect.message))
            else:
                self._effects.append(effect)

    # ------------------------------------------------------------ failures

    def _take_failed_call(self, event: m.CallFailed) -> None:
        """Nobody knows what runs there now: freeing the slots ends whatever is left."""
        if event.attempt != self.attempt:
            self.dropped_events += 1
            return
        had_attempts = self._give_up_on(event.taskmanager_id)
        if had_attempts or self._phase in FORWARD:
            self._fail(event.cause)
        self._go_on()

    def _lose_taskmanager(self, event: m.TaskManagerLost) -> None:
        if not self._lease.uses(event.taskmanager_id):
            return
        self._lease.lose(event.taskmanager_id)
        if self._give_up_on(event.taskmanager_id):
            self._fail(event.cause)
        self._go_on()

    def _give_up_on(self, taskmanager_id: str) -> bool:
        """Counts attempts as failed whose end nobody will report; False = there are none."""
        self._lease.expect_no_more_of(taskmanager_id)
        attempts = self.graph.on_taskmanager(taskmanager_id)
        for attempt in attempts:
            attempt.become(AttemptState.FAILED)
        return bool(attempts)

    def _fail(self, cause: FailureCause) -> None:
        """Restarts the job or fails it; what comes while it stops joins what it stops for."""
        if self._phase is Phase.ENDED or self.state in (JobState.CANCELLING, JobState.SUSPENDED):
            return
        if not cause.timestamp_ms:
            cause = replace(cause, timestamp_ms=self._now_ms)
        if self._phase in FORWARD:
            if cause.vertex and cause.error_class in _DAMAGED and self.restored_checkpoint_id:
                self._unusable.add(self.restored_checkpoint_id)
            decision = self._strategy.failed(cause, subtask_of(cause), self._now_ms)
            delay_ms = decision.delay_ms
            self.failure = cause if delay_ms is not None else self._strategy.told(cause)
            self._note(self.failure, delay_ms, joined=decision.joined)
            self._restart_delay_ms = delay_ms or 0
            self._stop(JobState.FAILING if delay_ms is None else JobState.RESTARTING)
            return
        if self.state is JobState.RESTARTING and not self._strategy.allows(cause):
            self.failure = cause
            self._note(cause, None, joined=False)
            self._stop(JobState.FAILING)
            return
        # An original cause takes the place of a consequence of it.
        shown = self._strategy.told(cause) if self.state is JobState.FAILING else cause
        self.failure = more_telling(self.failure, shown)
        self._note(
            shown, None if self.state is JobState.FAILING else self._restart_delay_ms, joined=True
        )

    def _note(self, cause: FailureCause, delay_ms: int | None, *, joined: bool) -> None:
        attempts = self.graph.current() if delay_ms is not None else ()
        self.exceptions.failed(
            cause,
            joined=joined,
            restarted=[attempt.key.subtask for attempt in attempts],
            labels=self.options.labels.of(cause),
            restart_number=self.restarts,
            delay_ms=delay_ms,
        )

    def _stop(self, state: JobState, *, is_final: bool = False) -> None:
        """Leaves the way forward: cancels what a TaskManager has, drops what none has.

        Args:
            is_final: nobody ever goes on with the job.
        """
        if state is not self.state:
            self._become(state)
        if self._phase in FORWARD:
            if self._wiring is not None:
                self._perform(self._wiring.stopped(self._splits, self._now_ms))
            self._effects += self._lease.withdraw()
            to_cancel = self.graph.cancel()
            self._effects += [
                m.CancelTasks(id, tuple(keys), is_final) for id, keys in to_cancel.items()
            ]
            if to_cancel:
                self._effects.append(m.AwaitCancellation())
        self._phase = Phase.STOPPING
        self._go_on()

    def _end_overdue(self, event: m.CancellationOverdue) -> None:
        if self._phase is not Phase.STOPPING or event.attempt != self.attempt:
            self.dropped_events += 1
            return
        self.graph.give_up()
        self._go_on()

    # ------------------------------------------------------------ the end of attempts

    def _take_end_of_attempts(self) -> None:
        if self.state is JobState.FAILING:
            self._end(JobState.FAILED)
        elif self.graph.all_finished:
            self._end(JobState.FINISHED)
        elif self.state is JobState.CANCELLING:
            self._end(JobState.CANCELED)
        elif self.state is JobState.SUSPENDED:
            self._end(JobState.SUSPENDED)
        else:
            self._phase = Phase.WAITING
            self._give_slots_back()
            due = m.RestartDue(self.attempt)
            self._effects.append(m.PostLater(self._restart_delay_ms, due))

    def _restart(self, event: m.RestartDue) -> None:
        if self._phase is not Phase.WAITING or event.attempt != self.attempt:
            self.dropped_events += 1
            return
        self.graph.begin_again()
        self._lease = SlotLease()
        self._committed = self._all_started = False
        self._prepare()

    def _end(self, state: JobState) -> None:
        if self._wiring is not None:
            self._perform(self._wiring.stopped(self._splits, self._now_ms))
        if state is not self.state:
            self._become(state)
        self._phase = Phase.ENDED
        self._give_slots_back()
        if self._wiring is not None and state in (JobState.FINISHED, JobState.CANCELED):
            self._effects.append(m.DiscardCheckpoints())

    def _give_slots_back(self) -> None:
        if not self._lease.freed:
            self._effects += self._lease.free()

    def _become(self, state: JobState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"job: {self.state.name} cannot become {state.name}")
        self.state = state
        self._effects.append(m.PublishState(state))

    def check(self) -> None:
        """Asserts the invariants named at the head of the file, as far as the state shows them."""
        self.graph.check()
        states = {attempt.state for attempt in self.graph.current()}
        assert is_terminal(self.state) <= self.ended, "a terminal state is the end"
        if self._phase in (Phase.ENDED, Phase.WAITING):
            assert self.graph.all_terminal, "attempts end before the job, or before its restart"
            assert self._lease.freed or not self._lease.slots, "and give their slots back"
        if self.state is JobState.FINISHED:
            assert states == {AttemptState.FINISHED}
        if self.state in (JobState.FAILING, JobState.FAILED):
            assert self.failure is not None, "a failure has a cause"
        if self._phase in (Phase.NEW, Phase.PREPARING, Phase.SCHEDULING):
            assert not states & ON_TASKMANAGER, "nothing runs before it is deployed"
        if self._committed and self._phase is Phase.DEPLOYED:
            assert self.graph.all_done_or_waiting, "only what has reached its end is committed"
