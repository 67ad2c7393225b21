"""The way of groups back: what has failed stops, waits for its delay, and begins again.

Of a group whose delay is over each part goes on by itself, as its attempts are over.

Invariants: attempts are over before others take their place; what joins a restart prolongs nothing of it.
"""

from __future__ import annotations

from jobmanager.graph.execution_attempt import AttemptState, SubtaskId
from jobmanager.job.group_preparations import GroupPreparations
from jobmanager.job.group_starts import GroupStarts
from jobmanager.job.groups import DELAYED, Group, GroupEvent, GroupPhase
from jobmanager.job.job_parts import Dropped, JobParts, PartEffect
from jobmanager.messages import job_effects, job_events

_WAITING = (GroupPhase.SLOTS, GroupPhase.PROCESSES)


class GroupRestarts:
    """Stops the groups of one job, and begins them again.

    Args:
        preparations: of groups that begin again.
        starts: says which parts of a group need nothing of each other.
    """

    def __init__(
        self, parts: JobParts, preparations: GroupPreparations, starts: GroupStarts
    ) -> None:
        self._parts = parts
        self._preparations = preparations
        self._starts = starts

    def withdraw(self, subtasks: frozenset[SubtaskId]) -> list[PartEffect]:
        """Groups that hold any of these ask for nothing any more."""
        return [
            effect
            for group in self._parts.groups.in_phase(*_WAITING)
            if group.subtasks & subtasks
            for effect in self._parts.lease.withdraw(group.id)
        ]

    def cancel(
        self, group: Group, added: frozenset[SubtaskId], *, is_final: bool = False
    ) -> list[PartEffect]:
        """Ends the attempts of a group, of which some were not in it before.

        Args:
            is_final: nobody ever goes on with the job.
        """
        graph = self._parts.graph
        effects: list[PartEffect] = [*self._parts.speculation.end(group.subtasks)]
        self._parts.splits.forget(self._parts.failover.untied(added))
        to_cancel = graph.cancel(group.subtasks, again=is_final)
        effects += [
            job_effects.CancelTasks(id, tuple(keys), is_final) for id, keys in to_cancel.items()
        ]
        states = {attempt.state for attempt in graph.attempts_of(added)}
        if to_cancel or AttemptState.CANCELING in states:
            effects.append(job_effects.AwaitCancellation(group.id))
        return effects

    def take_due(self, event: job_events.RestartDue) -> list[PartEffect]:
        """The delay of a restart is over."""
        groups = self._parts.groups
        group = groups.find(event.group, *DELAYED)
        if group is None:
            return [Dropped()]
        groups.move(group, GroupEvent.DUE)
        return self._begin_again(group) if group.phase is GroupPhase.PREPARING else []

    def go_on(self) -> list[PartEffect]:
        """What is over begins again, or waits for its delay."""
        effects: list[PartEffect] = []
        groups, graph = self._parts.groups, self._parts.graph
        for group in groups.in_phase(GroupPhase.STOPPING):
            if graph.all_terminal(group.subtasks):
                groups.move(group, GroupEvent.ATTEMPTS_OVER)
        for group in groups.in_phase(GroupPhase.LATE):
            over = [p for p in self._starts.parts_of(group.subtasks) if graph.all_terminal(p)]
            if over:
                ended = groups.take(frozenset().union(*over), GroupEvent.ATTEMPTS_OVER)
                effects += self._begin_again(ended)
        return effects

    def _begin_again(self, group: Group) -> list[PartEffect]:
        parts = self._parts
        parts.graph.begin_again(group.subtasks)
        released = parts.partitions.release_replaced(group.subtasks)
        parts.failover.count_regions(group.subtasks)
        return [*released, *self._preparations.begin(group)]
