"""The machine of one job: events in, effects out.

    CREATED -> prepared -> slots -> slot processes -> attempts -> RUNNING -> end of data everywhere ->
    commit, or final checkpoint -> what outlives the job is promoted -> FINISHED
    a failure that may be mended: its regions stop -> delay -> prepared -> slots ... while the others run, or are on
    their own way back (``groups``); RESTARTING only where none is left that runs
    any other failure: FAILING -> all attempts over -> FAILED; a cancellation likewise, also of what is FAILING;
    a JobManager that stops: SUSPENDED, with its attempts left to the next one where they can go on there
    regions behind blocking edges begin when all that they read is there
    after another JobManager: prepared -> what it has deployed is found, and goes on (``takeover``); if nothing can, what
    was done before, and is there, is adopted -> slots ...
    a subtask that is slow may have a second attempt beside the first, of which one counts (speculation.py)

This file decides on failures and on the job's end. How groups of subtasks begin is ``group_preparations`` and
``group_starts``, how they begin again ``group_restarts``, what attempts report ``attempt_reports``, and what ends
without a report ``losses``: they say what has failed, and decide nothing about it.

Invariants (``check``):
- a job reaches at most one terminal state, when every attempt is over;
- a failure that comes while the delay of another one runs begins again with it, and counts once; any other one
  neither stops nor delays what is on its way elsewhere;
- no checkpoint is taken while any group is on its way: those that recover go on from the same one;
- a checkpoint that a task has found damaged is restored no more: there are only so many restarts for which
  the restart strategy is not asked;
- each granted slot is freed exactly once, unless it is lost with its TaskManager;
- without checkpoints output is committed once, and only when every attempt has finished or waits for it:
  whatever fails after that ends the job;
- what comes too late, twice, or from nobody who was asked is dropped and counted.

Source: Flink, JobMaster, DefaultScheduler and ExecutionGraph; FLIP-1; the commit at the end of the data is
Flink's final checkpoint (FLIP-147) for jobs that take none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from jobmanager.checkpoint import messages as c
from jobmanager.failover.failure_cause import FailureCause, more_telling
from jobmanager.graph.execution_attempt import AttemptState, SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.job.attempt_reports import AttemptReports
from jobmanager.job.departures import Departures
from jobmanager.job.failover import ALL
from jobmanager.job.group_preparations import GroupPreparations
from jobmanager.job.group_restarts import GroupRestarts
from jobmanager.job.group_starts import GroupStarts
from jobmanager.job.groups import STOPPED, UNDEPLOYED, Group, GroupEvent, GroupPhase
from jobmanager.job.job_causes import being_restarted, committed_already, not_promoted, told
from jobmanager.job.job_ends import check_job, check_job_step, left_at_end
from jobmanager.job.job_master_views import JobMasterViews
from jobmanager.job.job_options import JobOptions
from jobmanager.job.job_parts import Dropped, Failed, JobParts, PartEffect
from jobmanager.job.job_phases import BEGUN, STOPPING, JobPhase, JobTurn, next_phase
from jobmanager.job.losses import Losses
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import ENDING, TRANSITIONS, JobState
from penstock.errors import InvariantViolation, require_invariant

_STORY_LENGTH = 64
_ENDS = {JobState.CANCELLING: JobState.CANCELED, JobState.SUSPENDED: JobState.SUSPENDED}


class JobMaster(JobMasterViews):
    """Drives one job.

    Args:
        plan: shape of the job; ``plan_problem(plan)`` is None.
        options: how it is run.

    Example: what has begun asks for slots; what is cancelled before it has them is over.
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> master = JobMaster(JobPlan((VertexPlan("v1", parallelism=2),)))
        >>> master.step(job_events.JobStarted())
        [RequestSlots(count=2, group=0, near=())]
        >>> for effect in master.step(job_events.CancelRequested()):
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
        self.state = self.options.first_state
        entries = self.options.history.failures.entries
        self.failure: FailureCause | None = entries[0].cause if entries else None
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        parts = JobParts.of(plan, self.options)
        super().__init__(parts)
        self._preparations = GroupPreparations(parts)
        self._starts = GroupStarts(parts)
        self._restarts = GroupRestarts(parts, self._preparations, self._starts)
        self._reports = AttemptReports(parts)
        self._losses = Losses(parts, self._reports)
        self._departures = Departures(parts)
        self._early: list[job_events.AttemptEvent] = []
        """Said of attempts that are not known yet, since another JobManager has deployed them."""
        self._effects: list[job_effects.JobEffect] = []

    @property
    def _is_over(self) -> bool:
        """True when nothing but the promotion decides about the end, or that has come."""
        return self._phase in (JobPhase.PROMOTING, JobPhase.ENDED)

    def step(self, event: job_events.JobEvent, now_ms: int = 0) -> list[job_effects.JobEffect]:
        """Takes one event and returns what is to be done, in order.

        Raises:
            InvariantViolation: our bug; carries the last events.
        """
        self.story.append(told(event))
        self._effects = []
        self._parts.now_ms = now_ms
        was_settled = self._parts.groups.are_settled
        try:
            self._handle(event)
            self._go_on(was_settled=was_settled)
            self._effects += self.speculation.settle()
            self.check_step()
            if (key := getattr(event, "key", None)) is not None:
                self.graph.check_step(key.subtask)
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        return self._effects

    def _handle(self, event: job_events.JobEvent) -> None:
        if isinstance(event, job_events.CheckpointEvent):
            self._perform(self._parts.take_checkpoint_event(event, has_ended=self.ended))
        elif isinstance(event, job_events.SpeculationEvent):
            self._take_speculation(event)
        elif (
            isinstance(event, job_events.AttemptEvent)
            and self._phase is JobPhase.ADOPTING
            and self.options.seeks_attempts
        ):
            self._early.append(event)
        else:
            self._take(event)

    def _take(self, event: job_events.OwnEvent) -> None:  # noqa: C901 - one case per event
        match event:
            case job_events.JobStarted():
                self._start()
            case job_events.StartPrepared() | job_events.StartNotPrepared():
                self._perform(self._preparations.take(event))
            case job_events.AttemptsFound():
                self._take_found(event)
            case job_events.RestartDue():
                self._perform(self._restarts.take_due(event))
            case job_events.SlotsGranted():
                self._perform(self._starts.take_slots(event))
            case job_events.SlotsRefused():
                self._perform(self._starts.take_refusal(event))
            case job_events.SlotsAllocated():
                self._perform(self._starts.take_endpoints(event))
            case job_events.AttemptReported():
                self._perform(self._reports.take(event))
            case job_events.SplitsReported():
                self._perform(self._reports.take_splits(event))
            case job_events.SideLoaded():
                self._perform(self._reports.take_side_loaded(event.key))
            case job_events.EndOfDataReported():
                self._perform(self._reports.take_end_of_data(event))
            case job_events.KeptRowsLost():
                self._perform(self._losses.lose_kept_rows(event))
            case job_events.CommitNoted():
                self._commit()
            case job_events.PartitionsPromoted() | job_events.PartitionsNotPromoted():
                self._take_promotion(event)
            case job_events.FinalCheckpointDue():
                self._retry_final()
            case job_events.CallFailed():
                self._perform(self._losses.take_failed_call(event))
            case job_events.TaskManagerDrained() | job_events.TaskManagerInUse():
                self._perform(self._departures.take(event))
            case job_events.TaskManagerGone():
                self._perform(self._losses.lose_taskmanager(event))
            case job_events.CancelRequested():
                is_ending = self.state in ENDING and self.state is not JobState.FAILING
                if not is_ending and not self._is_over:
                    is_final = event.is_noted and not self.options.retains_on_cancellation
                    self._stop(JobState.CANCELLING, is_final=is_final)
            case job_events.SuspendRequested():
                if self.state not in ENDING and not self._is_over:
                    self._suspend()
            case job_events.FailureRequested():
                self._fail(Failed(event.cause, ALL))
            case job_events.CancellationOverdue():
                self._perform(self._losses.end_overdue(event))
            case _:
                assert_never(event)

    def _perform(self, effects: Iterable[PartEffect]) -> None:
        for effect in effects:
            match effect:
                case Failed():
                    self._fail(effect)
                case c.FailJob() if effect.is_free and self.state in ENDING:
                    pass  # nothing begins again
                case c.FailJob():
                    cause = FailureCause("CheckpointAborted", effect.message)
                    self._fail(Failed(cause, ALL, is_free=effect.is_free))
                case Dropped():
                    self.dropped_events += 1
                case c.MoveTasks():
                    self._leave(effect)
                case c.AnswerRequest():
                    self._effects.append(self._departures.answer(effect, self.state))
                case _:
                    self._parts.failover.note_checkpoints(effect)
                    self._effects.append(effect)
                    if isinstance(effect, c.ReportCompleted):
                        self._effects += self._parts.release_over()

    def _start(self) -> None:
        if self._phase is not JobPhase.NEW:
            self.dropped_events += 1  # cancelled before it began
            return
        turn = JobTurn.RECOVERED if self.options.is_recovered else JobTurn.STARTED
        self._phase = next_phase(self._phase, turn)
        [group] = self._parts.groups
        self._parts.groups.move(group, GroupEvent.STARTED)
        begins_again = self.options.is_recovered and not self.options.seeks_attempts
        if begins_again and self._parts.failover.takes_up_restart(self._parts.now_ms):
            self._fail(Failed(being_restarted(), ALL, resumes=True))
        else:
            self._perform(self._preparations.begin(group))

    def _take_found(self, event: job_events.AttemptsFound) -> None:
        """What is said of attempts while they are looked for counts behind what is found."""
        effects = self._preparations.take_found(event)
        if self._phase is JobPhase.ADOPTING and self._parts.groups.in_phase(GroupPhase.RESTORE):
            self._phase = next_phase(self._phase, JobTurn.BEGUN)
        self._perform(effects)
        early, self._early = self._early, []
        for said in (*(said for one in event.found for said in one.said), *early):
            self._take(said)

    # ------------------------------------------------------------ the way forward

    def _go_on(self, *, was_settled: bool) -> None:
        """Moves groups, and the job, as far as its attempts allow.

        Args:
            was_settled: nothing was on its way before what has happened.
        """
        parts, groups = self._parts, self._parts.groups
        while True:
            changes = groups.changes
            if self._phase in STOPPING:
                if self.graph.all_terminal(groups.all):
                    self._take_end_of_attempts()
                return
            if self._phase not in BEGUN:
                return
            if parts.is_done and groups.in_phase(GroupPhase.STOPPING, GroupPhase.LATE):
                self._finish()  # nothing of it was cancelled in time
                return
            self._perform(self._restarts.go_on())
            self._note_running()
            if self._phase is JobPhase.ADOPTING and groups.in_phase(GroupPhase.INPUTS):
                self._phase = next_phase(self._phase, JobTurn.BEGUN)
            self._perform(self._departures.leave_idle())
            self._perform(self._starts.go_on())
            if groups.are_settled and not was_settled:
                self._note_all_started()
            was_settled = groups.are_settled
            if groups.changes == changes:
                break
        if self._phase in BEGUN and groups.are_settled:
            if self.graph.all_finished:
                self._finish()
            elif self.graph.all_done_or_waiting:
                self._complete_output()

    def _note_running(self) -> None:
        states = (AttemptState.RUNNING, AttemptState.FINISHED)
        for group in self._parts.groups.in_phase(GroupPhase.RESTORE):
            if all(a.state in states for a in self.graph.attempts_of(group.subtasks)):
                self._parts.groups.move(group, GroupEvent.ALL_RUN)
                if self.state is not JobState.RUNNING:
                    self._become(JobState.RUNNING)

    def _note_all_started(self) -> None:
        if self.state is not JobState.RUNNING:
            self._become(JobState.RUNNING)
        self._perform(self._parts.start_checkpoints())

    def _complete_output(self) -> None:
        """Every attempt has finished or waits: its output is made visible."""
        if (wiring := self._parts.wiring) is not None:
            self._perform(wiring.request_final(self._parts.splits, self._parts.now_ms))
        elif self._phase is not JobPhase.COMMITTED:
            self._phase = next_phase(self._phase, JobTurn.ALL_DONE)
            if self.options.survives:
                self._effects.append(job_effects.NoteCommit())
            else:
                self._commit()

    @property
    def _runs(self) -> bool:
        return self._phase in BEGUN and self._parts.groups.are_settled

    def _commit(self) -> None:
        if not self._runs:
            self.dropped_events += 1
            return
        running = self.graph.attempts_of(self.graph.in_state(AttemptState.RUNNING))
        self._perform(self._parts.sent(job_effects.CommitOutput(one.key) for one in running))

    def _retry_final(self) -> None:
        if self._parts.wiring is None or not self._runs:
            self.dropped_events += 1
            return
        self._parts.wiring.retry_final()

    # ------------------------------------------------------------ rivals of slow attempts

    def _take_speculation(self, event: job_events.SpeculationEvent) -> None:
        waits = self._parts.groups.in_phase(*STOPPED, *UNDEPLOYED)
        effects = None
        if not (self.ended and isinstance(event, job_events.StragglersDue)):
            effects = self.speculation.take(
                event,
                self._parts.splits,
                self._parts.now_ms,
                may_begin=self._phase in BEGUN and not waits,
            )
        if effects is not None:
            self._effects += effects
        elif isinstance(event, job_events.RivalNotStarted):
            self._perform(self._losses.lose_replacement(event))
        else:
            self.dropped_events += 1

    # ------------------------------------------------------------ failures

    def _fail(self, event: Failed) -> None:
        """Restarts what the failure concerns, or fails the job."""
        if self._is_over or self.state in (JobState.CANCELLING, JobState.SUSPENDED):
            return
        self._departures.is_under_way = False
        cause, failover, now_ms = event.cause, self._parts.failover, self._parts.now_ms
        if not cause.timestamp_ms:
            cause = replace(cause, timestamp_ms=now_ms)
        if self.state is JobState.FAILING:
            # An original cause takes the place of a consequence of it.
            self.failure = more_telling(self.failure, failover.join_end(cause))
            return
        if self._phase is JobPhase.COMMITTED or self.options.has_committed:
            cause = committed_already(cause)
        groups = self._parts.groups
        joined = groups.restarted_with(ALL if event.failed is ALL else event.failed | event.ended)
        is_told = not (joined and event.was_cancelled and failover.leaves(event.failed))
        recovery = failover.decide(
            cause,
            event.failed,
            event.missing,
            now_ms,
            joins=joined is not None,
            is_free=event.is_free,
            resumes=event.resumes,
            goes_back=event.goes_back,
            is_told=is_told,
        )
        if recovery.delay_ms is None:
            self.failure = recovery.cause
            self._stop(JobState.FAILING)
            return
        if is_told:
            is_known = joined is not None or event.resumes
            self.failure = more_telling(self.failure, cause) if is_known else cause
        self._restart(joined, recovery.delay_ms, groups.concerned(event.failed, recovery.subtasks))

    def _leave(self, told: c.MoveTasks) -> None:
        """Begins elsewhere what runs on TaskManagers that are drained."""
        may_leave = self._phase is JobPhase.ACTIVE and not self.options.has_committed
        if may_leave and (leaving := self._departures.begin()):
            self._restart(self._parts.groups.restarted_with(leaving), 0, leaving)
        self._perform(self._departures.go_on(told))

    def _restart(self, joined: Group | None, delay_ms: int, subtasks: frozenset[SubtaskId]) -> None:
        """Stops subtasks that are to begin again, which hear first what is void."""
        groups, withdrawn = self._parts.groups, self._restarts.withdraw(subtasks)
        if joined is None:
            group, added = groups.take(subtasks, GroupEvent.FAILED), subtasks
            self._effects.append(job_effects.PostLater(delay_ms, job_events.RestartDue(group.id)))
        else:
            group, added = joined, subtasks - joined.subtasks
            groups.join(group, subtasks)
        self._perform(withdrawn)
        moving = groups.subtasks(*STOPPED, *UNDEPLOYED)
        is_whole = moving >= self.graph.started - self.graph.in_state(AttemptState.FINISHED)
        if self.state is not JobState.RESTARTING and (
            is_whole or self.state is not JobState.RUNNING
        ):
            self._become(JobState.RESTARTING)
        self._perform(self._parts.stop_checkpoints())
        self._perform(self._restarts.cancel(group, added))

    def _stop(self, state: JobState, *, is_final: bool = False) -> None:
        """Leaves the way forward for good: tells tasks what is void, cancels what a TaskManager has, drops what none has.

        Args:
            is_final: nobody ever goes on with the job.
        """
        if state is not self.state:
            self._become(state)
        parts, groups = self._parts, self._parts.groups
        turn = JobTurn.STOPPED_FOR_GOOD if is_final else JobTurn.STOPPED
        self._phase = next_phase(self._phase, turn)
        self._perform(parts.stop_checkpoints())
        self._perform(self._restarts.withdraw(groups.all))
        group = groups.take(groups.all, GroupEvent.ENDED)
        self._perform(self._restarts.cancel(group, groups.all, is_final=is_final))

    # ------------------------------------------------------------ the end

    def _suspend(self) -> None:
        if not self.options.goes_on:
            self._stop(JobState.SUSPENDED)
            return
        groups = self._parts.groups
        self._become(JobState.SUSPENDED)
        self._perform(self._restarts.withdraw(groups.all))
        self._perform(self._parts.stop_checkpoints())
        self._phase = next_phase(self._phase, JobTurn.LEFT)
        self._parts.lease.leave_all()

    def _take_end_of_attempts(self) -> None:
        if self.state is JobState.FAILING:
            self._end(JobState.FAILED)
        elif self._parts.is_done:
            self._finish()
        else:
            self._end(_ENDS[self.state])

    def _finish(self) -> None:
        """Every attempt has finished: what is to outlive the job is promoted, then the job is over."""
        persisted = self._parts.partitions.persisted()
        if not persisted:
            self._end(JobState.FINISHED)
        elif self.state in _ENDS:
            self._end(_ENDS[self.state])
        else:
            self._phase = next_phase(self._phase, JobTurn.ALL_FINISHED)
            self._effects.append(job_effects.PromotePartitions(persisted))

    def _take_promotion(self, event: job_events.PromotionEvent) -> None:
        if self._phase is not JobPhase.PROMOTING:
            self.dropped_events += 1
        elif isinstance(event, job_events.PartitionsPromoted):
            self._end(JobState.FINISHED)
        else:
            self._phase = next_phase(self._phase, JobTurn.NOT_PROMOTED)
            self._fail(Failed(not_promoted(event.cause), ALL))

    def _end(self, state: JobState) -> None:
        parts, is_final = self._parts, self._phase is JobPhase.ENDING_FOR_GOOD
        self._perform(parts.stop_checkpoints())
        if state is not self.state:
            self._become(state)
        self._phase = next_phase(self._phase, JobTurn.ALL_OVER)
        had_others = self.failure is not None or self.options.is_recovered or parts.has_left
        # A job that has failed goes on from its newest checkpoint, if it has any.
        is_over = is_final if state is JobState.CANCELED else parts.wiring is None
        ends_early = state in (JobState.CANCELED, JobState.FAILED)
        self._perform(left_at_end(parts, state, sweeps=ends_early and is_over and had_others))

    def _become(self, state: JobState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"job: {self.state.name} cannot become {state.name}")
        self.state = state
        self._effects.append(job_effects.PublishState(state))

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever the size of the job: run after each step.

        Raises:
            InvariantViolation: one does not hold.
        """
        check_job_step(self._parts, self.state, self._phase)
        if self.state in (JobState.FAILING, JobState.FAILED):
            require_invariant(self.failure is not None, "a failure has a cause")

    def check(self) -> None:
        """Asserts the invariants named at the head of the file, as far as the state shows them."""
        self.check_step()
        check_job(self._parts, self.state, self._phase)
