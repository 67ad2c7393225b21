"""Which seats a job needs, and which slot each of them gets.

Slot sharing: seat i of a group holds subtask i of every vertex of the group, so a group needs as many slots
as its widest vertex has subtasks. A seat goes back to the TaskManager that had it before, where files of
its state may still lie.

Source: Flink, SlotSharingGroup, LocalInputPreferredSlotSharingStrategy and PreviousAllocationSlotSelectionStrategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.scheduler.slots import Slot


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """A place of a slot sharing group."""

    group: str
    index: int


def seat_of(plan: JobPlan, subtask: SubtaskId) -> Seat:
    """Where a subtask belongs."""
    return Seat(plan.vertex(subtask.vertex).slot_group, subtask.subtask_index)


def assign(
    seats: Sequence[Seat], slots: Sequence[Slot], last_taskmanager: Mapping[Seat, str]
) -> dict[Seat, Slot]:
    """Gives each seat a slot: one of its last TaskManager where there is one left, else the next.

    Args:
        seats: without a slot.
        slots: as many; neighbours may be on different TaskManagers.
        last_taskmanager: who had a seat before.
    """
    assert len(seats) == len(slots), "as many slots as were asked for"
    left = list(slots)
    assigned: dict[Seat, Slot] = {}
    for seat in seats:
        wanted = last_taskmanager.get(seat)
        known = next((slot for slot in left if slot.taskmanager_id == wanted), None)
        if known is not None:
            assigned[seat] = known
            left.remove(known)
    for seat in seats:
        if seat not in assigned:
            assigned[seat] = left.pop(0)
    return assigned


def slots_needed(plan: JobPlan) -> int:
    """Slots the whole job needs."""
    widest: dict[str, int] = {}
    for vertex in plan.vertices:
        widest[vertex.slot_group] = max(widest.get(vertex.slot_group, 0), vertex.parallelism)
    return sum(widest.values())
