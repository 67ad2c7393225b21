"""The way of groups from their inputs to their deployment: slots, processes, attempts.

Subtasks begin as soon as all that they read is there. What begins for the first time has all its slots or none.
What begins again is divided into parts that need nothing of each other, so that one which has its slots does not
wait for another's.

Invariants: nothing is deployed before every slot process that it needs listens, and while a producer that it reads
is not there; a failure elsewhere withdraws no request.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.components import connected
from jobmanager.graph.deployment import TaskPlan
from jobmanager.graph.execution_attempt import AttemptState, SubtaskId
from jobmanager.job.groups import Group, GroupEvent, GroupPhase
from jobmanager.job.job_causes import lost_inputs, no_slots
from jobmanager.job.job_parts import Dropped, Failed, JobParts, PartEffect
from jobmanager.job.slot_lease import free_stray
from jobmanager.messages import job_effects, job_events
from jobmanager.scheduler.placement import Seat, seat_of


def independent(regions: RegionGraph, subtasks: frozenset[SubtaskId]) -> list[frozenset[SubtaskId]]:
    """Parts of some whole regions that need nothing of each other: they share no seat, and none reads another.

    Example: of two chains side by side each can begin without the other.
        >>> from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
        >>> vertices = (VertexPlan("read", parallelism=2), VertexPlan("map", parallelism=2))
        >>> edge = EdgePlan("e", "read", "map", Partitioning.FORWARD)
        >>> regions = RegionGraph(JobPlan(vertices, (edge,)))
        >>> everything = frozenset(s for region in regions.regions for s in region.subtasks)
        >>> [" ".join(map(str, sorted(part))) for part in independent(regions, everything)]
        ['map/0 read/0', 'map/1 read/1']
    """
    seats: dict[Seat, list[SubtaskId]] = {}
    joined: list[tuple[SubtaskId, ...]] = []
    for subtask in sorted(subtasks):
        seats.setdefault(seat_of(regions.plan, subtask), []).append(subtask)
        joined.append(tuple(regions.region_of(subtask).subtasks & subtasks))
        for group in regions.written_by(subtask):
            readers = [consumer for consumer in group.consumers if consumer in subtasks]
            joined.append((subtask, *readers))
    joined += [tuple(sharing) for sharing in seats.values()]
    return [frozenset(part) for part in connected(sorted(subtasks), joined)]


class GroupStarts:
    """Begins the groups of one job."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts

    def parts_of(self, subtasks: frozenset[SubtaskId]) -> list[frozenset[SubtaskId]]:
        """What need not wait for each other."""
        if self._parts.options.failover_strategy is FailoverStrategyName.FULL:
            return [subtasks]
        return independent(self._parts.regions, subtasks)

    def _begun_together(self, subtasks: frozenset[SubtaskId]) -> list[frozenset[SubtaskId]]:
        first = self._parts.options.first_attempt
        attempts = self._parts.graph.attempts_of(subtasks)
        is_first = all(attempt.key.attempt == first for attempt in attempts)
        return [subtasks] if is_first else self.parts_of(subtasks)

    def go_on(self) -> list[PartEffect]:
        """Moves every group as far as it can go."""
        effects: list[PartEffect] = []
        groups = self._parts.groups
        waiting = groups.subtasks(GroupPhase.INPUTS)
        ready = self._ready(waiting) if waiting else waiting
        for part in self._begun_together(ready) if ready else ():
            groups.take(part, GroupEvent.BEGUN)
            for attempt in self._parts.graph.attempts_of(part):
                attempt.become(AttemptState.SCHEDULED)
        for group in groups.in_phase(GroupPhase.SLOTS):
            effects += self._seek_slots(group)
        for group in groups.in_phase(GroupPhase.PROCESSES):
            if self._parts.lease.all_listen(group.id) and self._has_inputs(group):
                effects += self._deploy(group)
        return effects

    def _ready(self, subtasks: frozenset[SubtaskId]) -> frozenset[SubtaskId]:
        there = self._parts.groups.subtasks(GroupPhase.RESTORE, GroupPhase.RUNNING)
        return self._parts.failover.startable(there, subtasks)

    def _has_inputs(self, group: Group) -> bool:
        return self._ready(group.subtasks) == group.subtasks

    # ------------------------------------------------------------ slots

    def _seek_slots(self, group: Group) -> list[PartEffect]:
        lease = self._parts.lease
        if lease.waits_for(group.id):
            return []
        inputs_of = self._parts.partitions.read_alone
        requests = lease.request(group.id, group.subtasks, inputs_of)
        if requests:
            return [*self._parts.speculation.yield_slots(), *requests]
        if not lease.has_all(group.subtasks):
            return []  # another group has asked for what it lacks
        self._parts.groups.move(group, GroupEvent.GRANTED)
        for attempt in self._parts.graph.attempts_of(group.subtasks):
            slot = lease.slot_of(attempt.key.subtask)
            attempt.slot_id, attempt.taskmanager_id = slot.slot_id, slot.taskmanager_id
        return [*lease.allocate(group.id, group.subtasks)]

    def take_slots(self, event: job_events.SlotsGranted) -> list[PartEffect]:
        """The pool has granted a request, perhaps one that was withdrawn meanwhile."""
        lease = self._parts.lease
        if not lease.waits_for(event.group):
            return [*free_stray(event.slots)]
        lease.take(event.slots, event.group, self._parts.graph.attempt)
        return []

    def take_refusal(self, event: job_events.SlotsRefused) -> list[PartEffect]:
        """The pool has refused a request."""
        group = self._parts.groups.find(event.group, GroupPhase.SLOTS)
        if group is None or not self._parts.lease.waits_for(event.group):
            return [Dropped()]
        self._parts.lease.refuse(event.group)
        return [Failed(no_slots(event), group.subtasks)]

    # ------------------------------------------------------------ processes

    def take_endpoints(self, event: job_events.SlotsAllocated) -> list[PartEffect]:
        """The processes of a group on a TaskManager listen; some may have taken the place of others."""
        parts = self._parts
        id = parts.lease.asked_by(event)
        group = None if id is None else parts.groups.find(id, GroupPhase.PROCESSES)
        if group is None:
            return [Dropped()]
        parts.partitions.lose_slots(parts.lease.note_endpoints(group.id, event))
        stopped = parts.groups.stopped
        missing = tuple(
            partition
            for partition in parts.partitions.needed_and_missing()
            if partition.producer not in stopped
        )
        if not missing:
            return []
        failed = {partition.producer for partition in missing}
        if any(group.subtasks & set(parts.regions.consumers_of(lost)) for lost in missing):
            failed |= group.subtasks
        return [Failed(lost_inputs(missing), frozenset(failed), missing)]

    # ------------------------------------------------------------ attempts

    def _deploy(self, group: Group) -> list[PartEffect]:
        parts = self._parts
        attempts = parts.graph.attempts_of(group.subtasks)
        nowhere = parts.lease.without_address(attempt.slot_id for attempt in attempts)
        if nowhere:
            message = f"slots {', '.join(nowhere)} were allocated without an address"
            return [Failed(FailureCause("StreamError", message), group.subtasks)]
        parts.groups.move(group, GroupEvent.ALL_LISTEN)
        tasks: dict[str, list[TaskPlan]] = {}
        from_nothing = frozenset(filter(parts.failover.begins_from_nothing, group.subtasks))
        for attempt in attempts:
            attempt.become(AttemptState.DEPLOYING)
            attempt.deployed_at_ms = parts.now_ms
            if attempt.key.subtask not in from_nothing:
                attempt.restored_from = parts.restored_checkpoint_id
            task = parts.deployments.task(attempt)
            tasks.setdefault(attempt.taskmanager_id, []).append(task)
        effects: list[PartEffect] = [
            job_effects.DeployTasks(taskmanager_id, tuple(own), from_nothing)
            for taskmanager_id, own in tasks.items()
        ]
        effects += parts.sent(parts.splits.told_again(group.subtasks, parts.graph))
        effects += parts.sent(self._replaced_producers(group.subtasks))
        return [*effects, *parts.speculation.deployed(group.subtasks)]

    def _replaced_producers(self, deployed: frozenset[SubtaskId]) -> Iterable[job_effects.Command]:
        for key, edge_id, channel in self._parts.deployments.replaced_producers(deployed):
            yield job_effects.ReplaceProducer(key, edge_id, channel)
