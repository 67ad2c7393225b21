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
