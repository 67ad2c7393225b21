"""How many slots a job needs, and which subtask runs in which of them.

Slot sharing: slot i of a group holds subtask i of every vertex of the group, so a group needs as
many slots as its widest vertex has subtasks.

Source: Flink, SlotSharingGroup and LocalInputPreferredSlotSharingStrategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.scheduler.slots import Slot

_SlotT = TypeVar("_SlotT")
_TenantT = TypeVar("_TenantT", bound=Hashable)


def slots_by_group(plan: JobPlan) -> dict[str, int]:
    """Slot sharing group -> slots it needs; groups in order of appearance."""
    needed: dict[str, int] = {}
    for vertex in plan.vertices:
        needed[vertex.slot_group] = max(needed.get(vertex.slot_group, 0), vertex.parallelism)
    return needed


def slots_needed(plan: JobPlan) -> int:
    """Slots the whole job needs."""
    return sum(slots_by_group(plan).values())


def place(plan: JobPlan, slots: Sequence[_SlotT]) -> dict[SubtaskId, _SlotT]:
    """Gives each subtask its slot.

    Args:
        plan: shape of the job.
        slots: exactly ``slots_needed(plan)`` slots; neighbours may be on different TaskManagers.
    """
    assert len(slots) == slots_needed(plan), "as many slots as the plan needs"
    first_of_group: dict[str, int] = {}
    taken = 0
    for group, count in slots_by_group(plan).items():
        first_of_group[group] = taken
        taken += count
    return {
        SubtaskId(vertex.id, index): slots[first_of_group[vertex.slot_group] + index]
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    }


def place_again(
    tenants: Sequence[_TenantT], free: Sequence[Slot], previous: Mapping[_TenantT, Slot]
) -> dict[_TenantT, Slot]:
    """Gives each tenant a slot of its own, where it was before if that can be.

    As many as can return to their very slot, then as many as can return to another slot of their
    TaskManager (both are maximal, since nobody takes what another one is at home in), the rest is spread:
    each goes to the TaskManager with the fewest tenants placed by this call. The same arguments give the
    same places, whatever order ``free`` is in.

    Args:
        tenants: what needs a slot: a subtask, or what shares a slot; no two are the same.
        free: slots to choose from; at least as many as tenants.
        previous: where tenants ran before, perhaps in an earlier incarnation of a TaskManager; tenants
            without a past are not in it.

    Source: Flink, LocalInputPreferredSlotSharingStrategy and PreviousAllocationSlotSelectionStrategy.
    """
    assert len(set(tenants)) == len(tenants) <= len(free), "a slot for each tenant"
    left = {(slot.taskmanager_id, slot.slot_id): slot for slot in sorted(free, key=_place_of)}
    assert len(left) == len(free), "each slot is free once"
    placed: dict[_TenantT, Slot] = {}
    for tenant in tenants:
        if tenant in previous and (slot := left.pop(_place_of(previous[tenant]), None)) is not None:
            placed[tenant] = slot
    for tenant in tenants:
        if tenant in placed or tenant not in previous:
            continue
        home = previous[tenant].taskmanager_id
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
