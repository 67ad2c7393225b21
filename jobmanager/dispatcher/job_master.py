"""The machine of one job: events in, effects out.

    CREATED -> slots -> slot processes -> attempts -> RUNNING -> end of data everywhere -> commit
    -> FINISHED; any failure: FAILING -> all attempts over -> FAILED; a cancellation likewise.

Invariants (``check``):
- a job reaches exactly one terminal state, when every attempt is over;
- nothing is deployed before every slot process of the job listens;
- each granted slot is freed exactly once, unless it is lost with its TaskManager;
- output is committed once, and only when every attempt has finished or waits for the commit;
- reports for attempts that are unknown, not current, or already further are dropped and counted.

Source: Flink, JobMaster, DefaultScheduler and ExecutionGraph; the commit at the end of the data is
Flink's final checkpoint (FLIP-147) for jobs that take none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import assert_never

from jobmanager.dispatcher import job_messages as m
from jobmanager.dispatcher.job_state import ACTIVE, ENDING, TRANSITIONS, JobState, is_terminal
from jobmanager.failover.failure_cause import FailureCause, more_telling
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
from jobmanager.scheduler.deployment import Endpoint, TaskPlan, plan_deployments
from jobmanager.scheduler.placement import place, slots_needed
from jobmanager.scheduler.slots import Slot
from jobmanager.scheduler.split_assigner import SplitAssigner
from penstock.errors import InvariantViolation

_STORY_LENGTH = 64


class JobMaster:
    """Drives one job.

    Args:
        plan: shape of the job; ``plan_problem(plan)`` is None.
    """

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.graph = ExecutionGraph(plan)
        self.state = JobState.CREATED
        self.failure: FailureCause | None = None
        self.dropped_events = 0
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._waits_for_slots = False
        self._slots: tuple[Slot, ...] = ()
        self._freed = False
        self._lost_taskmanagers: set[str] = set()
        self._allocating: set[str] = set()
        self._endpoint_of_slot: dict[str, Endpoint] = {}
        self._deployed = False
        self._committed = False
        self._assigners = {
            (vertex.id, uid): SplitAssigner(vertex.parallelism)
            for vertex in plan.vertices
            for uid in vertex.source_uids
        }
        self._effects: list[m.JobEffect] = []

    @property
    def ended(self) -> bool:
        """True when the job has reached a terminal state."""
        return is_terminal(self.state)

    def step(self, event: m.JobEvent) -> list[m.JobEffect]:
        """Takes one event and returns what is to be done, in order.

        Raises:
            InvariantViolation: our bug; carries the last events.
        """
        self.story.append(_told(event))
        self._effects = []
        try:
            self._handle(event)
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        return self._effects

    def _handle(self, event: m.JobEvent) -> None:
        match event:
            case m.JobStarted():
                self._start()
            case m.SlotsGranted():
                self._take_slots(event.slots)
            case m.SlotsRefused():
                self._waits_for_slots = False
                self._fail_if_active(_no_slots(event))
            case m.SlotsAllocated():
                self._take_endpoints(event)
            case m.AttemptReported():
                self._take_report(event)
            case m.SplitsReported():
                self._assign_splits(event)
            case m.EndOfDataReported():
                self._take_end_of_data(event.key)
            case m.CallFailed():
                self._take_failed_call(event)
            case m.TaskManagerLost():
                self._lose_taskmanager(event)
            case m.CancelRequested():
                if self.state in ACTIVE:
                    self._end_attempts(JobState.CANCELLING)
            case m.FailureRequested():
                self._fail_if_active(event.cause)
            case m.CancellationOverdue():
                self._end_overdue()
            case _:
                assert_never(event)

    # ------------------------------------------------------------ slots and deployment

    def _start(self) -> None:
        if self.state is not JobState.CREATED:
            self.dropped_events += 1  # cancelled before it began
            return
        for attempt in self.graph.current():
            attempt.become(AttemptState.SCHEDULED)
        self._waits_for_slots = True
        self._effects.append(m.RequestSlots(slots_needed(self.plan)))

    def _take_slots(self, slots: tuple[Slot, ...]) -> None:
        if self._slots:
            raise InvariantViolation("slots were granted twice")
        self._slots = slots
        if not self._waits_for_slots or self.state is not JobState.CREATED:
            self._free_slots()  # the request was withdrawn while the grant was on its way
            return
        self._waits_for_slots = False
        for subtask, slot in place(self.plan, slots).items():
            attempt = self.graph.current_of(subtask)
            attempt.slot_id, attempt.taskmanager_id = slot.slot_id, slot.taskmanager_id
        for taskmanager_id, own in _by_taskmanager(slots).items():
            self._allocating.add(taskmanager_id)
            self._effects.append(
                m.AllocateSlots(taskmanager_id, tuple(slot.slot_id for slot in own))
            )

    def _take_endpoints(self, event: m.SlotsAllocated) -> None:
        if self.state is not JobState.CREATED or event.taskmanager_id not in self._allocating:
            self.dropped_events += 1
            return
        self._allocating.remove(event.taskmanager_id)
        self._endpoint_of_slot |= {endpoint.slot_id: endpoint for endpoint in event.endpoints}
        if not self._allocating:
            self._deploy()

    def _deploy(self) -> None:
        missing = {slot.slot_id for slot in self._slots} - self._endpoint_of_slot.keys()
        if missing:
            message = f"slots {', '.join(sorted(missing))} were allocated without an address"
            self._fail_if_active(FailureCause("StreamError", message))
            return
        self._deployed = True
        tasks: dict[str, list[TaskPlan]] = {}
        for task in plan_deployments(self.graph, self._endpoint_of_slot):
            attempt = self.graph.current_of(task.attempt.subtask)
            attempt.become(AttemptState.DEPLOYING)
            tasks.setdefault(attempt.taskmanager_id, []).append(task)
        for taskmanager_id, own in tasks.items():
            self._effects.append(m.DeployTasks(taskmanager_id, tuple(own)))

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
            cause = event.failure or _of_attempt(attempt, "it failed without a cause")
            self._note_failure(cause)
            self._fail_if_active(cause)
        elif event.state is AttemptState.CANCELED:
            # Nobody asked for it, or the job is ending anyway.
            self._fail_if_active(_of_attempt(attempt, "its TaskManager cancelled it"))
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
        assigner = self._assigners.get((event.key.vertex, event.operator_uid))
        if attempt is None:
            return
        if assigner is None or event.key.subtask_index != 0:
            message = f"reported splits of {event.operator_uid!r}, which is no source it speaks for"
            self._fail_if_active(_of_attempt(attempt, message))
            return
        if self.state not in ACTIVE or assigner.is_final:
            self.dropped_events += 1
            return
        commands: dict[str, list[m.AddSplits | m.CommitOutput]] = {}
        for assignment in assigner.assign(event.splits, event.final):
            reader = self.graph.current_of(SubtaskId(event.key.vertex, assignment.subtask_index))
            if reader.state not in ON_TASKMANAGER:
                continue
            commands.setdefault(reader.taskmanager_id, []).append(
                m.AddSplits(reader.key, event.operator_uid, assignment.splits, assignment.final)
            )
        self._send(commands)

    def _send(self, commands: dict[str, list[m.AddSplits | m.CommitOutput]]) -> None:
        for taskmanager_id, own in commands.items():
            self._effects.append(m.SendCommands(taskmanager_id, tuple(own)))

    # ------------------------------------------------------------ the way forward

    def _go_on(self) -> None:
        """Moves the job as far as its attempts allow."""
        if self.state is JobState.CREATED and self.graph.all_running_or_finished:
            self._become(JobState.RUNNING)
        if self.state is JobState.RUNNING:
            if self.graph.all_finished:
                self._end(JobState.FINISHED)
            elif not self._committed and self.graph.all_done_or_waiting:
                self._commit()
        elif self.state in ENDING and self.graph.all_terminal:
            if self.state is JobState.FAILING:
                self._end(JobState.FAILED)
            elif self.graph.all_finished:
                self._end(JobState.FINISHED)
            else:
                self._end(JobState.CANCELED)

    def _commit(self) -> None:
        self._committed = True
        commands: dict[str, list[m.AddSplits | m.CommitOutput]] = {}
        for attempt in self.graph.current():
            if attempt.state is AttemptState.RUNNING:
                commands.setdefault(attempt.taskmanager_id, []).append(m.CommitOutput(attempt.key))
        self._send(commands)

    # ------------------------------------------------------------ failures and the end

    def _take_failed_call(self, event: m.CallFailed) -> None:
        """Nobody knows what runs there now: freeing the slots ends whatever is left."""
        self._give_up_on(event.taskmanager_id, event.cause)
        self._fail_if_active(event.cause)
        self._go_on()

    def _lose_taskmanager(self, event: m.TaskManagerLost) -> None:
        if event.taskmanager_id not in {slot.taskmanager_id for slot in self._slots}:
            return
        self._lost_taskmanagers.add(event.taskmanager_id)
        if self._give_up_on(event.taskmanager_id, event.cause):
            self._fail_if_active(event.cause)
        self._go_on()

    def _give_up_on(self, taskmanager_id: str, cause: FailureCause) -> bool:
        """Counts attempts as failed whose end nobody will report; False = there are none."""
        self._allocating.discard(taskmanager_id)
        attempts = self.graph.on_taskmanager(taskmanager_id)
        for attempt in attempts:
            attempt.become(AttemptState.FAILED)
        if attempts:
            self._note_failure(cause)
        return bool(attempts)

    def _note_failure(self, cause: FailureCause) -> None:
        """While the job is failing, an original cause takes the place of a consequence of it."""
        if self.state is JobState.FAILING:
            self.failure = more_telling(self.failure, cause)

    def _fail_if_active(self, cause: FailureCause) -> None:
        if self.state in ACTIVE:
            self.failure = cause
            self._end_attempts(JobState.FAILING)

    def _end_attempts(self, ending: JobState) -> None:
        """Enters FAILING or CANCELLING: cancels what a TaskManager has, drops what none has."""
        self._become(ending)
        if self._waits_for_slots:
            self._waits_for_slots = False
            self._effects.append(m.WithdrawRequest())
        to_cancel: dict[str, list[AttemptKey]] = {}
        for attempt in self.graph.current():
            if attempt.state in ON_TASKMANAGER:
                attempt.become(AttemptState.CANCELING)
                to_cancel.setdefault(attempt.taskmanager_id, []).append(attempt.key)
            elif not attempt.terminal:
                attempt.become(AttemptState.CANCELED)
        for taskmanager_id, keys in to_cancel.items():
            self._effects.append(m.CancelTasks(taskmanager_id, tuple(keys)))
        if to_cancel:
            self._effects.append(m.AwaitCancellation())
        self._go_on()

    def _end_overdue(self) -> None:
        if self.state not in ENDING:
            self.dropped_events += 1
            return
        for attempt in self.graph.current():
            if not attempt.terminal:
                attempt.become(AttemptState.CANCELED)
        self._go_on()

    def _end(self, state: JobState) -> None:
        self._become(state)
        self._free_slots()

    def _free_slots(self) -> None:
        if self._freed:
            raise InvariantViolation("slots were freed twice")
        if self._slots:
            self._freed = True
        for taskmanager_id, own in _by_taskmanager(self._slots).items():
            if taskmanager_id not in self._lost_taskmanagers:
                self._effects.append(m.FreeSlots(own))

    def _become(self, state: JobState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"job: {self.state.name} cannot become {state.name}")
        self.state = state
        self._effects.append(m.PublishState(state))

    def check(self) -> None:
        """Asserts the invariants named at the head of the file, as far as the state shows them."""
        self.graph.check()
        states = {attempt.state for attempt in self.graph.current()}
        if self.ended:
            assert self.graph.all_terminal, "a job ends after its attempts"
            assert self._freed or not self._slots, "an ended job holds no slots"
        if self.state is JobState.FINISHED:
            assert states == {AttemptState.FINISHED}
        if self.state in (JobState.FAILING, JobState.FAILED):
            assert self.failure is not None, "a failure has a cause"
        if not self._deployed:
            assert not states & ON_TASKMANAGER, "nothing runs before it is deployed"
        if self._committed and self.state is JobState.RUNNING:
            assert self.graph.all_done_or_waiting, "only what has reached its end is committed"


def _by_taskmanager(slots: Iterable[Slot]) -> dict[str, tuple[Slot, ...]]:
    grouped: dict[str, tuple[Slot, ...]] = {}
    for slot in slots:
        grouped[slot.taskmanager_id] = (*grouped.get(slot.taskmanager_id, ()), slot)
    return grouped


def _of_attempt(attempt: ExecutionAttempt, message: str) -> FailureCause:
    return FailureCause(
        "TaskFailure",
        f"{attempt.key} on TaskManager {attempt.taskmanager_id}: {message}",
        vertex=attempt.key.vertex,
        subtask_index=attempt.key.subtask_index,
        attempt=attempt.key.attempt,
        taskmanager_id=attempt.taskmanager_id,
    )


def _no_slots(event: m.SlotsRefused) -> FailureCause:
    return FailureCause(
        "NoResourceAvailable",
        f"the job needs {event.needed} slots, but within {event.waited_ms / 1000:g} s "
        f"(slot.request.timeout) only {event.free} of {event.total} slots on "
        f"{event.taskmanagers} TaskManagers were free: start more TaskManagers, end other jobs or "
        "lower the parallelism",
    )


def _told(event: m.JobEvent) -> str:
    """The event in short: a split's payload is not part of the story."""
    if isinstance(event, m.SplitsReported):
        ids = ", ".join(split.id for split in event.splits[:3])
        return f"SplitsReported({event.key}, {len(event.splits)} splits: {ids}, {event.final})"
    return repr(event)[:500]
