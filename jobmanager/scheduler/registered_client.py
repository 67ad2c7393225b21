"""A TaskManager that has registered, and what a job is told through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from packaging.version import InvalidVersion, Version

from common.daemon_protocol import check_protocol
from common.names import require_name
from common.pb import internal_pb2
from jobmanager.installed_version import penstock_version
from jobmanager.messages import job_events
from jobmanager.partitions.held_partitions import Holdings
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.admission import TaskManagerFacts
from jobmanager.scheduler.slots import SlotsRequested
from jobmanager.scheduler.taskmanager_watch_runner import TaskManagerWatch
from penstock.client.addresses import parse_address
from penstock.errors import ConfigurationError, JobRejected
from penstock.pb import client_pb2


class JobInbox(Protocol):
    """Where a job hears of its slots."""

    def post(self, event: job_events.JobEvent) -> None:
        """Takes an event; never waits."""


@dataclass(slots=True)
class RegisteredTaskManager:
    """One TaskManager and how to reach it."""

    facts: TaskManagerFacts
    address: str
    incarnation: str
    pid: int
    client: TaskManagerClient
    watch: TaskManagerWatch
    watching: asyncio.Task[None]
    last_heartbeat_ms: int
    slots: tuple[internal_pb2.HeldSlot, ...] = ()
    taken_over: tuple[str, ...] = ()
    """Slots that it has kept when it registered."""

    def details(self, total: int, free: int, held: Holdings) -> client_pb2.TaskManagerDetails:
        """What clients see."""
        return client_pb2.TaskManagerDetails(
            taskmanager_id=self.facts.taskmanager_id,
            address=self.address,
            slots_total=total,
            slots_free=free,
            last_heartbeat_ms=self.last_heartbeat_ms,
            pid=self.pid,
            held_partitions=held.count,
            held_partitions_bytes=held.size_bytes,
            memory_bytes=self.memory_bytes,
            spill_bytes=self.spill_bytes,
            drained=self.is_drained,
            version=self.facts.version,
            slots=[
                client_pb2.SlotDetails(
                    slot_id=slot.slot_id,
                    job_id=slot.job_id,
                    pid=slot.pid,
                    memory_bytes=slot.memory_bytes,
                )
                for slot in self.slots
            ],
        )

    memory_bytes: int = 0
    spill_bytes: int = 0
    is_drained: bool = False
    """It is given no more tasks."""


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """What metrics show; replaced as a whole, so that any thread may read it."""

    total: int = 0
    free: int = 0
    taskmanagers: int = 0
    waiting_jobs: int = 0
    dropped_events: int = 0


def slot_wait(
    requests: Sequence[SlotsRequested],
    counts: SlotCounts,
    drained: int,
    timeout_ms: int,
    now_ms: int,
) -> client_pb2.SlotWait:
    """What clients see of requests for slots, the oldest first."""
    return client_pb2.SlotWait(
        needed=sum(request.count for request in requests),
        free=counts.free,
        total=counts.total,
        waited_ms=timeout_ms - (requests[0].deadline_ms - now_ms),
        timeout_ms=timeout_ms,
        drained_taskmanagers=drained,
    )


def facts_of(request: internal_pb2.RegisterTaskManagerRequest) -> TaskManagerFacts:
    """What a TaskManager that registers says of itself."""
    return TaskManagerFacts(
        request.taskmanager_id,
        request.python_version,
        request.cloudpickle_version,
        tuple(request.packages),
        request.java_version,
        request.version,
    )


def check_registration(request: internal_pb2.RegisterTaskManagerRequest) -> None:
    """Refuses a TaskManager that says nothing that could be used.

    Raises:
        JobRejected: it has no id, incarnation, address, version of Python or slot, or what it has cannot be one.
        ProtocolMismatch: it speaks another protocol of daemons.
    """
    named = (request.taskmanager_id, request.incarnation, request.rpc_address)
    if not all(named) or request.slots < 1:
        raise JobRejected(
            "a TaskManager must register with an id, an incarnation, an address and at least one slot, "
            f"not {', '.join(map(repr, named))}, {request.slots}"
        )
    require_name("taskmanager.id", request.taskmanager_id)
    check_protocol(
        f"TaskManager {request.taskmanager_id} at {request.rpc_address}",
        request.version,
        request.protocol_version,
        "this JobManager",
        penstock_version(),
    )
    try:
        Version(request.python_version)
    except InvalidVersion as error:
        raise JobRejected(
            f"TaskManager {request.taskmanager_id} says that it runs Python {request.python_version!r}, which is no "
            "version"
        ) from error
    try:
        parse_address(request.rpc_address)
    except ConfigurationError as error:
        raise JobRejected(
            f"TaskManager {request.taskmanager_id} cannot be called: {error}; check its taskmanager.host"
        ) from error
