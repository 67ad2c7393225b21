"""A TaskManager that has registered, and what a job is told through."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from common.pb import internal_pb2
from jobmanager.messages import job_events
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.admission import TaskManagerFacts
from jobmanager.scheduler.taskmanager_watch_runner import TaskManagerWatch
from penstock.client.addresses import parse_address
from penstock.errors import ConfigurationError, JobRejected


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
    memory_bytes: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """What metrics show; replaced as a whole, so that any thread may read it."""

    total: int = 0
    free: int = 0
    taskmanagers: int = 0
    waiting_jobs: int = 0
    dropped_events: int = 0


def check_registration(request: internal_pb2.RegisterTaskManagerRequest) -> None:
    """Refuses a TaskManager that says nothing that could be used.

    Raises:
        JobRejected: it has no id, incarnation, address or slot, or its address cannot be one.
    """
    named = (request.taskmanager_id, request.incarnation, request.rpc_address)
    if not all(named) or request.slots < 1:
        raise JobRejected(
            "a TaskManager must register with an id, an incarnation, an address and at least one slot, "
            f"not {', '.join(map(repr, named))}, {request.slots}"
        )
    try:
        parse_address(request.rpc_address)
    except ConfigurationError as error:
        raise JobRejected(
            f"TaskManager {request.taskmanager_id} cannot be called: {error}; check its taskmanager.host"
        ) from error
