"""What a drain of a TaskManager asks of the rest of the cluster, and why it is refused (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobThere:
    """A job that has slots of the TaskManager.

    Attributes:
        takes_checkpoints: its subtasks can leave with one of them.
        is_batch: it comes to an end by itself.
    """

    job_id: str
    slots: int
    takes_checkpoints: bool
    is_batch: bool

    def moves(self, *, makes_again: bool) -> bool:
        """Whether its subtasks begin elsewhere; else they are waited for."""
        return self.takes_checkpoints or makes_again


def drain_problem(
    taskmanager_id: str,
    jobs: Sequence[JobThere],
    *,
    makes_again: bool,
    free_elsewhere: int,
    total_elsewhere: int,
    drained_elsewhere: Sequence[str] = (),
) -> str:
    """Why it cannot be drained; "" = it can.

    Example: what leaves needs as many slots elsewhere.
        >>> there = [JobThere("a1", 2, takes_checkpoints=True, is_batch=False)]
        >>> drain_problem("tm-1", there, makes_again=False, free_elsewhere=2, total_elsewhere=4)
        ''
        >>> print(drain_problem("tm-1", there, makes_again=False, free_elsewhere=1, total_elsewhere=4))
        TaskManager tm-1 is not drained: its 2 slots with tasks that move (job a1) need as many free ones elsewhere, and of 4 there 1 is free: start TaskManagers, or end jobs, first
    """
    for job in jobs:
        if not (job.takes_checkpoints or job.is_batch or makes_again):
            return (
                f"TaskManager {taskmanager_id} is not drained: job {job.job_id} takes no checkpoints, so its tasks "
                "there cannot move without beginning again, and may never end: stop it first, or have it begin again "
                "elsewhere with --partitions remake"
            )
    moving = [job for job in jobs if job.moves(makes_again=makes_again)]
    needed = sum(job.slots for job in moving)
    if needed <= free_elsewhere:
        return ""
    named = ", ".join(job.job_id for job in moving)
    slots = "slot with tasks that move" if needed == 1 else "slots with tasks that move"
    need = "needs" if needed == 1 else "need"
    offered = offered_slots(free_elsewhere, total_elsewhere, drained_elsewhere)
    return (
        f"TaskManager {taskmanager_id} is not drained: its {needed} {slots} (job {named}) {need} as many free ones "
        f"elsewhere, and {offered}: start TaskManagers, or end jobs, first"
    )


def offered_slots(free: int, total: int, drained: Sequence[str]) -> str:
    """What TaskManagers have to offer.

    Args:
        drained: those of them that offer nothing, since they are drained.

    Example: the only other one is drained.
        >>> offered_slots(0, 0, ["tm-2"])
        'no slots are offered there, since TaskManager tm-2 is drained (`penstock drain tm-2 --undo` takes it in use again)'
    """
    is_or_are = "is" if free == 1 else "are"
    text = f"of {total} there {free} {is_or_are} free" if total else "no slots are offered there"
    if not drained:
        return text
    undo = "; ".join(f"`penstock drain {id} --undo`" for id in drained)
    are, them = ("s {} are", "take them") if len(drained) > 1 else (" {} is", "takes it")
    named = f"TaskManager{are.format(', '.join(drained))} drained ({undo} {them} in use again)"
    return f"{text}, {'and' if total else 'since'} {named}"
