"""How a job leaves TaskManagers that are drained.

What runs there begins elsewhere from a checkpoint behind whose barrier the whole job holds, so that nothing is done
twice; what has nothing to do there any more gives its slot back at once. Where the job takes no checkpoints, its tasks
there are waited for, or begin again, as it was asked for; so is what they keep there for their consumers.

Invariants: no slot is given back whose process does anything, or keeps rows that somebody may read yet; who begins
elsewhere hears nothing of the checkpoint before it has ended, and so reads nothing behind it.
"""

from __future__ import annotations

from dataclasses import replace

from jobmanager.checkpoint import messages as c
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.job.job_parts import JobParts, PartEffect
from jobmanager.messages import job_events
from jobmanager.messages.job_state import JobState

_Refused = c.RequestRefused


class Departures:
    """The departures of one job.

    Example: where no checkpoints are taken, what runs there is waited for, or begins elsewhere at once.
        >>> from jobmanager.graph.job_plan import JobPlan, VertexPlan
        >>> from jobmanager.job.job_options import JobOptions
        >>> plan = JobPlan((VertexPlan("v1", parallelism=1),))
        >>> departures = Departures(JobParts.of(plan, JobOptions()))
        >>> departures.take(job_events.TaskManagerDrained("tm-1"))
        []
        >>> departures.take(job_events.TaskManagerDrained("tm-1", makes_again=True))
        [MoveTasks(checkpoint_id=0, keys=())]
    """

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self.is_under_way = False
        """What leaves begins elsewhere, unless all has begun since; nothing has failed meanwhile."""

    def take(
        self, event: job_events.TaskManagerDrained | job_events.TaskManagerInUse
    ) -> list[PartEffect]:
        """A TaskManager is to be left, or takes tasks again; harmless to repeat."""
        parts = self._parts
        if isinstance(event, job_events.TaskManagerInUse):
            parts.drained.pop(event.taskmanager_id, None)
            return []
        parts.drained[event.taskmanager_id] = event.makes_again
        waits = not event.makes_again or parts.wiring is not None
        return [] if waits else [c.MoveTasks(0, ())]

    def begin(self) -> frozenset[SubtaskId]:
        """All that is to begin again now, so that what runs on TaskManagers that are drained begins elsewhere.

        What these keep that is made again is given up.
        """
        parts, drained = self._parts, self._parts.drained
        leaving = {
            attempt.key.subtask for id in drained for attempt in parts.graph.on_taskmanager(id)
        }
        for taskmanager_id, makes_again in drained.items():
            if makes_again:
                parts.partitions.give_up(taskmanager_id)
        missing = parts.partitions.needed_and_missing(parts.groups.stopped)
        leaving |= {partition.producer for partition in missing}
        if not leaving:
            return frozenset()
        parts.has_left = self.is_under_way = True
        left = frozenset(leaving)
        return parts.groups.concerned(left, parts.failover.moved(left, missing))

    def go_on(self, told: c.MoveTasks) -> list[PartEffect]:
        """Those that stay hear that the checkpoint behind which they hold is complete."""
        wiring = self._parts.wiring
        return [] if wiring is None else [*wiring.go_on(told)]

    def answer(self, answer: c.AnswerRequest, state: JobState) -> c.AnswerRequest:
        """Who asks for a checkpoint while tasks begin is told that it is worth to ask again."""
        refused = answer.refused
        if self._parts.groups.are_settled:
            return answer
        if state not in (JobState.RUNNING, JobState.RESTARTING):
            return answer
        if self.is_under_way and refused in (_Refused.NOT_RUNNING, _Refused.ABORTED):
            return replace(answer, refused=_Refused.LEAVING)
        if state is JobState.RUNNING and refused is _Refused.NOT_RUNNING:
            return replace(answer, refused=_Refused.STARTING)
        return answer

    def leave_idle(self) -> list[PartEffect]:
        """Gives slots back in which nothing is done."""
        parts, apart = self._parts, set(self._parts.lease.apart)
        idle = [
            slot_id
            for id in parts.drained
            for slot_id in parts.lease.slots_on(id)
            if slot_id not in apart
            and not parts.graph.in_slots([slot_id])
            and not parts.partitions.is_needed_in(slot_id)
        ]
        if not idle:
            return []
        parts.partitions.lose_slots(idle)
        return [*parts.lease.give_back(idle)]
