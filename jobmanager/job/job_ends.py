"""What is left of a job at its end, and what holds on its way there."""

from __future__ import annotations

from jobmanager.graph.execution_attempt import ON_TASKMANAGER, AttemptState
from jobmanager.job.groups import STOPPED, UNDEPLOYED, GroupPhase
from jobmanager.job.job_parts import JobParts, PartEffect
from jobmanager.job.job_phases import BEGUN, JobPhase
from jobmanager.messages import job_effects
from jobmanager.messages.job_state import JobState, is_terminal
from penstock.errors import require_invariant


def left_at_end(parts: JobParts, state: JobState, *, sweeps: bool) -> list[PartEffect]:
    """Gives back what a job has, and deletes what nobody needs any more.

    Args:
        state: that it ends in.
        sweeps: nobody goes on with it, and attempts may have left hidden output.
    """
    effects: list[PartEffect] = []
    if state is not JobState.SUSPENDED:  # else its successor may adopt what is held
        effects += parts.partitions.release_all()
    effects += parts.lease.give_back_all()
    if sweeps:
        effects.append(job_effects.SweepOutput())
    is_discarded = state is JobState.FINISHED or (
        state is JobState.CANCELED and not parts.options.retains_on_cancellation
    )
    if parts.wiring is not None and is_discarded:
        effects.append(job_effects.DiscardCheckpoints())
    return effects


def check_job_step(parts: JobParts, state: JobState, phase: JobPhase) -> None:
    """The part of ``check_job`` that costs the same whatever the size of the job.

    Raises:
        InvariantViolation: one does not hold.
    """
    parts.groups.check_step()
    ended = phase is JobPhase.ENDED
    require_invariant(is_terminal(state) <= ended, "a terminal state is the end")
    if ended:
        require_invariant(not parts.lease.slots, "a job that has ended gives its slots back")
    if ended or parts.lease.waits:
        require_invariant(not parts.graph.has_rivals, "rivals where no slot is to spare")


def check_job(parts: JobParts, state: JobState, phase: JobPhase) -> None:
    """Asserts what holds of the parts of a job together."""
    graph, groups = parts.graph, parts.groups
    graph.check()
    parts.partitions.check()
    groups.check()
    states = {attempt.state for attempt in graph.current()}
    if phase is JobPhase.ENDED and not (state is JobState.SUSPENDED and parts.options.goes_on):
        assert graph.all_terminal(graph.subtasks()), "attempts end before the job"
    if phase is JobPhase.PROMOTING:
        assert graph.all_finished, "only what is complete outlives its job"
    if state is JobState.FINISHED:
        assert states == {AttemptState.FINISHED}
    if phase is JobPhase.COMMITTED and groups.are_settled:
        assert graph.all_done_or_waiting, "only what has reached its end is committed"
    if phase not in BEGUN:
        return
    over = graph.attempts_of(groups.subtasks(GroupPhase.DELAY))
    assert all(attempt.terminal for attempt in over), "attempts end before they begin again"
    waiting = graph.attempts_of(groups.subtasks(*UNDEPLOYED, GroupPhase.INPUTS))
    assert not {a.state for a in waiting} & ON_TASKMANAGER, "nothing runs before it is deployed"
    if groups.in_phase(*STOPPED) and parts.wiring is not None:
        assert not parts.wiring.runs, "no checkpoint is taken while anything stops"
