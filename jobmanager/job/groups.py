"""The groups of a job's subtasks, each with a phase of its own.

    INPUTS -> SLOTS -> PROCESSES -> RESTORE -> RUNNING
    a failure: STOPPING -> DELAY -> PREPARING -> INPUTS -> ..., where the attempts are over before the delay is
               STOPPING -> LATE -> PREPARING -> ..., where the delay is

Invariants (``check``): each subtask is in one group; groups have subtasks; the number of a group is never used
again; the delay of one restart runs at a time, and what fails meanwhile is in its group; what GROUP_TRANSITIONS
does not name does not happen.

What fails is taken out of the groups that it was in, and these go on with what is left. A group whose delay is over
goes on part by part, as the attempts of each are over; so does one whose inputs are there, as each has its slots.

Source: Flink, SchedulingPipelinedRegion; the phases are ours.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from jobmanager.graph.execution_attempt import SubtaskId
from penstock.errors import InvariantViolation, require_invariant


class GroupPhase(enum.Enum):
    """How far the subtasks of a group are."""

    INPUTS = "wait until all that they read is there"
    SLOTS = "wait for their slots"
    PROCESSES = "wait until the processes in their slots listen"
    RESTORE = "are deployed, and get their state"
    RUNNING = "run, or have finished"
    STOPPING = "end, and the delay of their restart runs"
    LATE = "end, and the delay of their restart is over"
    DELAY = "are over, and the delay of their restart runs"
    PREPARING = "wait for the checkpoint that they go on from"
    LOCATING = "wait to hear what was done before them, and is still there"


class GroupEvent(enum.Enum):
    """What moves a group."""

    BEGUN = "all that they read is there"
    GRANTED = "each has its slot"
    ALL_LISTEN = "all their processes listen"
    ALL_RUN = "all run, or have finished"
    FAILED = "something has failed, and they begin again after a delay"
    JOINED = "more has failed, which begins again with them"
    ATTEMPTS_OVER = "all their attempts are over"
    DUE = "the delay is over"
    STARTED = "they begin, from what their checkpoint says"
    PREPARED = "it is known what they go on from"
    ADOPTED = "they have done their work under another JobManager"
    PINNED = "some of them may run, or have done their work, under another JobManager"
    FOUND = "some of them run, or have done their work, under another JobManager"
    ENDED = "the job ends"


_P, _E = GroupPhase, GroupEvent

GROUP_TRANSITIONS: dict[tuple[GroupPhase, GroupEvent], GroupPhase] = {
    (_P.INPUTS, _E.STARTED): _P.PREPARING,
    (_P.INPUTS, _E.BEGUN): _P.SLOTS,
    (_P.SLOTS, _E.GRANTED): _P.PROCESSES,
    (_P.PROCESSES, _E.ALL_LISTEN): _P.RESTORE,
    (_P.RESTORE, _E.ALL_RUN): _P.RUNNING,
    # Where a delay runs what fails joins it, and what waits for inputs has no attempts that could.
    **{
        (phase, _E.FAILED): _P.STOPPING
        for phase in _P
        if phase not in (_P.INPUTS, _P.STOPPING, _P.DELAY)
    },
    (_P.STOPPING, _E.JOINED): _P.STOPPING,
    (_P.DELAY, _E.JOINED): _P.STOPPING,
    (_P.LATE, _E.JOINED): _P.LATE,
    (_P.STOPPING, _E.ATTEMPTS_OVER): _P.DELAY,
    (_P.STOPPING, _E.DUE): _P.LATE,
    (_P.DELAY, _E.DUE): _P.PREPARING,
    (_P.LATE, _E.ATTEMPTS_OVER): _P.PREPARING,
    (_P.PREPARING, _E.PREPARED): _P.INPUTS,
    (_P.PREPARING, _E.PINNED): _P.LOCATING,
    (_P.LOCATING, _E.ADOPTED): _P.RUNNING,
    (_P.LOCATING, _E.PREPARED): _P.INPUTS,
    (_P.LOCATING, _E.FOUND): _P.RESTORE,
    **{(phase, _E.ENDED): _P.LATE for phase in _P},
}

DELAYED = (_P.STOPPING, _P.DELAY)
"""The delay of their restart runs."""
STOPPED = (*DELAYED, _P.LATE)
"""They begin again anyway."""
UNDEPLOYED = (_P.PREPARING, _P.LOCATING, _P.SLOTS, _P.PROCESSES)
"""They have new attempts, which no TaskManager knows."""


_MAKE_NEW = (_E.FAILED, _E.ENDED)


@dataclass(slots=True, eq=False)
class Group:
    """Subtasks that are equally far.

    Attributes:
        attempt: number of their attempts, where these have begun again together.
        restored_id: checkpoint that they were prepared to go on from; 0 = none.
        begins_whole: nothing else of the job had begun when they were prepared.
    """

    id: int
    subtasks: frozenset[SubtaskId]
    phase: GroupPhase
    attempt: int = 0
    begins_whole: bool = True
    restored_id: int = 0


def next_phase(group: Group, event: GroupEvent) -> GroupPhase:
    """The phase that follows.

    Raises:
        InvariantViolation: none does.
    """
    phase = GROUP_TRANSITIONS.get((group.phase, event))
    if phase is None:
        raise InvariantViolation(f"group {group.id}: {event.name} in {group.phase.name}")
    return phase


class Groups:
    """All groups of one job.

    Args:
        subtasks: of the job; they wait for their inputs.

    Example: of what runs together one subtask fails, and waits for its delay alone.
        >>> a, b = SubtaskId("a", 0), SubtaskId("b", 0)
        >>> groups = Groups([a, b])
        >>> [both] = groups
        >>> for event in (_E.BEGUN, _E.GRANTED, _E.ALL_LISTEN, _E.ALL_RUN):
        ...     groups.move(both, event)
        >>> failed = groups.take(frozenset([a]), _E.FAILED)
        >>> groups.move(failed, _E.ATTEMPTS_OVER)
        >>> [(group.id, group.phase.name, *map(str, group.subtasks)) for group in groups]
        [(0, 'RUNNING', 'b/0'), (1, 'DELAY', 'a/0')]
    """

    def __init__(self, subtasks: Collection[SubtaskId]) -> None:
        self.changes = 0
        """How often anything has moved."""
        self._next_id = 1
        self._groups = {0: Group(0, frozenset(subtasks), GroupPhase.INPUTS)}
        self.all = frozenset(subtasks)

    def __iter__(self) -> Iterator[Group]:
        """The oldest first; groups may come and go meanwhile."""
        for group in list(self._groups.values()):
            if self._groups.get(group.id) is group:
                yield group

    # ------------------------------------------------------------ what there is

    def find(self, group: int, *phases: GroupPhase) -> Group | None:
        """A group that is in one of these phases; None = there is none (any more)."""
        found = self._groups.get(group)
        return found if found is not None and found.phase in phases else None

    def in_phase(self, *phases: GroupPhase) -> list[Group]:
        """Groups, the oldest first."""
        return [group for group in self._groups.values() if group.phase in phases]

    def subtasks(self, *phases: GroupPhase) -> frozenset[SubtaskId]:
        """What is in some phases."""
        return frozenset().union(*(group.subtasks for group in self.in_phase(*phases)))

    @property
    def stopped(self) -> frozenset[SubtaskId]:
        """What begins again anyway."""
        return self.subtasks(*STOPPED)

    @property
    def are_settled(self) -> bool:
        """Whether nothing is on its way: all run, have finished, or wait for what others make."""
        return not any(
            group.phase not in (GroupPhase.RUNNING, GroupPhase.INPUTS)
            for group in self._groups.values()
        )

    def restarted_with(self, failed: frozenset[SubtaskId] | None) -> Group | None:
        """The group that a failure begins again with: the one whose delay runs, or that what has failed is in.

        Args:
            failed: None = everything.
        """
        for group in self.in_phase(*DELAYED):
            return group
        for group in self.in_phase(GroupPhase.LATE):
            if failed is None or failed & group.subtasks:
                return group
        return None

    def concerned(
        self, failed: frozenset[SubtaskId] | None, restarted: frozenset[SubtaskId]
    ) -> frozenset[SubtaskId]:
        """All that begins again where some subtasks do: groups that wait for slots or processes do so as a whole.

        Args:
            failed: None = everything.
        """
        if failed is None:
            return restarted | self.subtasks(*STOPPED, *UNDEPLOYED)
        restarted |= failed & self.subtasks(GroupPhase.PREPARING, GroupPhase.LOCATING)
        waiting = self.in_phase(GroupPhase.SLOTS, GroupPhase.PROCESSES)
        return restarted.union(*(g.subtasks for g in waiting if g.subtasks & restarted))

    # ------------------------------------------------------------ what happens

    def move(self, group: Group, event: GroupEvent) -> None:
        """Something has happened to a whole group.

        Raises:
            InvariantViolation: it cannot happen in its phase.
        """
        group.phase = next_phase(group, event)
        self.changes += 1

    def take(self, subtasks: frozenset[SubtaskId], event: GroupEvent) -> Group:
        """Something has happened to some subtasks: they are a group of their own from now on.

        What has failed has a new number, so that answers to what was asked for before are stale. What else is all
        of a group keeps its number.

        Raises:
            InvariantViolation: it cannot happen in the phases of their groups.
        """
        concerned = [group for group in self if group.subtasks & subtasks]
        phases = {next_phase(group, event) for group in concerned}
        require_invariant(len(phases) == 1, f"what is taken by {event.name} is equally far")
        [phase] = phases
        first = concerned[0]
        self.changes += 1
        if event not in _MAKE_NEW and first.subtasks == subtasks:
            first.phase = phase
            return first
        taken = replace(first, id=self._next_id, subtasks=subtasks, phase=phase)
        self._next_id += 1
        self._leave(subtasks)
        self._groups[taken.id] = taken
        return taken

    def join(self, group: Group, subtasks: frozenset[SubtaskId]) -> None:
        """More has failed, and begins again with a group whose restart is under way."""
        self.move(group, GroupEvent.JOINED)
        self._leave(subtasks - group.subtasks)
        group.subtasks |= subtasks

    def _leave(self, subtasks: frozenset[SubtaskId]) -> None:
        for group in self:
            group.subtasks -= subtasks
            if not group.subtasks:
                del self._groups[group.id]

    # ------------------------------------------------------------ check

    def check_step(self) -> None:
        """The part of ``check`` that is cheap.

        Raises:
            InvariantViolation: it does not hold.
        """
        require_invariant(len(self.in_phase(*DELAYED)) <= 1, "one delay runs at a time")

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        self.check_step()
        assert sum(len(group.subtasks) for group in self) == len(self.all), "one group for each"
        assert frozenset().union(*(group.subtasks for group in self)) == self.all
        assert all(group.subtasks for group in self), "a group has subtasks"
