"""Gives slots back: their processes end first."""

from __future__ import annotations

import structlog

from jobmanager.graph.slot import Slot
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError


async def free_slots(
    cluster: ClusterRunner,
    job_id: str,
    slots: tuple[Slot, ...],
    log: structlog.typing.FilteringBoundLogger,
) -> bool:
    """Ends slot processes of one TaskManager, then gives the slots back to the pool.

    A TaskManager that does not answer may still hold them: it is asked again when its heartbeat names
    them, and they are the pool's when it does not.

    Returns:
        Whether their processes are known to have ended.
    """
    taskmanager_id = slots[0].taskmanager_id
    try:
        client = cluster.client(taskmanager_id)
        await client.free_slots(job_id, [slot.slot_id for slot in slots])
    except StreamError as error:
        log.warning("slots.not_freed", taskmanager_id=taskmanager_id, reason=str(error))
        cluster.take_back_later(job_id, slots)
        return False
    cluster.take_back(job_id, slots)
    return True
