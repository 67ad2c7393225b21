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
    is_or_are = "is" if free_elsewhere == 1 else "are"
    return (
        f"TaskManager {taskmanager_id} is not drained: its {needed} {slots} (job {named}) {need} as many free ones "
        f"elsewhere, and of {total_elsewhere} there {free_elsewhere} {is_or_are} free: start TaskManagers, or end "
        "jobs, first"
    )
