"""How many slots a job needs, and which subtask runs in which of them.

Slot sharing: slot i of a group holds subtask i of every vertex of the group, so a group needs as
many slots as its widest vertex has subtasks.

Source: Flink, SlotSharingGroup and LocalInputPreferredSlotSharingStrategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan

_SlotT = TypeVar("_SlotT")


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
