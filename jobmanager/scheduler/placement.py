"""Which seats a job needs, and which slot each of them gets.

Slot sharing: seat i of a group holds subtask i of every vertex of the group, so a group needs as many slots
as its widest vertex has subtasks. A seat goes to the TaskManager where most of the complete partitions lie that its
subtasks alone read, else back to the one that had it before, where files of its state may still lie.

Source: Flink, SlotSharingGroup, LocalInputPreferredSlotSharingStrategy and PreviousAllocationSlotSelectionStrategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.graph.slot import Slot

_TenantT = TypeVar("_TenantT", bound=Hashable)


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """A place of a slot sharing group."""

    group: str
    index: int


def seat_of(plan: JobPlan, subtask: SubtaskId) -> Seat:
    """Where a subtask belongs."""
    return Seat(plan.vertex(subtask.vertex).slot_group, subtask.subtask_index)


def nearest(inputs: Iterable[Mapping[str, int]]) -> str:
    """Where most of what a seat's subtasks read lies; "" = nowhere in particular.

    Args:
        inputs: of each subtask, TaskManager -> bytes.

    Example: 30 bytes have a shorter way than 20.
        >>> nearest([{"tm-1": 20}, {"tm-2": 14, "tm-3": 1}, {"tm-2": 16}])
        'tm-2'
    """
    lying: Counter[str] = Counter()
    for read in inputs:
        lying.update(read)
    return min(
        lying, key=lambda taskmanager_id: (-lying[taskmanager_id], taskmanager_id), default=""
    )


def place_again(
    tenants: Sequence[_TenantT],
    free: Sequence[Slot],
    previous: Mapping[_TenantT, Slot],
    near: Mapping[_TenantT, str] = MappingProxyType({}),
) -> dict[_TenantT, Slot]:
    """Gives each tenant a slot of its own, near what it reads, or where it was before, if that can be.

    As many as can return to their very slot, then as many as can have another slot of the TaskManager where they are
    at home (both are maximal, since nobody takes what another one is at home in), the rest is spread:
    each goes to the TaskManager with the fewest tenants placed by this call. The same arguments give the
    same places, whatever order ``free`` is in.

    Args:
        tenants: what needs a slot: a subtask, or what shares a slot; no two are the same.
        free: slots to choose from; at least as many as tenants.
        previous: where tenants ran before, perhaps in an earlier incarnation of a TaskManager; tenants
            without a past are not in it.
        near: TaskManagers where tenants are at home, wherever they were before; those of others, too.

    Example: who had a slot of a TaskManager goes back there, the other one to where fewest are, or to what it reads.
        >>> free = [Slot("1", "tm-1", "new"), Slot("2", "tm-1", "new"), Slot("1", "tm-2", "new")]
        >>> places = place_again(["a", "b"], free, {"b": Slot("2", "tm-1", "old")})
        >>> [(tenant, slot.taskmanager_id, slot.slot_id) for tenant, slot in places.items()]
        [('a', 'tm-2', '1'), ('b', 'tm-1', '2')]
        >>> places = place_again(["a", "b"], free, {"b": Slot("2", "tm-1", "old")}, {"a": "tm-1"})
        >>> [(tenant, slot.taskmanager_id, slot.slot_id) for tenant, slot in places.items()]
        [('a', 'tm-1', '1'), ('b', 'tm-1', '2')]
    """
    assert len(set(tenants)) == len(tenants) <= len(free), "a slot for each tenant"
    left = {(slot.taskmanager_id, slot.slot_id): slot for slot in sorted(free, key=_place_of)}
    assert len(left) == len(free), "each slot is free once"
    placed: dict[_TenantT, Slot] = {}
    homes = {tenant: slot.taskmanager_id for tenant, slot in previous.items()} | dict(near)
    for tenant in tenants:
        if tenant not in previous or previous[tenant].taskmanager_id != homes[tenant]:
            continue
        if (slot := left.pop(_place_of(previous[tenant]), None)) is not None:
            placed[tenant] = slot
    for tenant in tenants:
        if tenant in placed or tenant not in homes:
            continue
        home = homes[tenant]
        place = next((place for place in left if place[0] == home), None)
        if place is not None:
            placed[tenant] = left.pop(place)
    load = Counter(slot.taskmanager_id for slot in placed.values())
    for tenant in tenants:
        if tenant not in placed:
            place = min(left, key=lambda place: (load[place[0]], place))
            placed[tenant] = left.pop(place)
            load[place[0]] += 1
    return {tenant: placed[tenant] for tenant in tenants}


def _place_of(slot: Slot) -> tuple[str, str]:
    """Where a slot is, whichever incarnation of its TaskManager offers it."""
    return slot.taskmanager_id, slot.slot_id
