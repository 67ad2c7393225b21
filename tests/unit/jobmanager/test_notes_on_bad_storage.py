"""Aim: what a job notes of itself is tried again at a pace where storage fails, takes one thread where it hangs, and is noted
in the end.

Method: the runners alone, with a store that fails or hangs as long as it is told to.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.pb import job_record_pb2
from jobmanager.job import history_runner, taskmanagers_in_use_runner
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.history_runner import HistoryRunner
from jobmanager.job.job_history import JobHistory
from jobmanager.job.taskmanagers_in_use_runner import TaskManagersInUseRunner
from penstock.errors import StoreTransient
from tests.support.jobs import DEADLINE_S

JOB = "0" * 32


class BadJobs:
    """A job store that fails or hangs; what was noted last."""

    def __init__(self) -> None:
        self.calls = self.under_way = self.most = 0
        self.fails, self.goes_on = False, threading.Event()
        self.noted: Any = None

    def note(self, _job_id: str, what: Any) -> None:
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if not self.fails:
            self.goes_on.wait(DEADLINE_S)
        self.under_way -= 1
        if self.fails:
            raise StoreTransient("no room")
        self.noted = what

    note_history = note_taskmanagers = note


def at_once(_lane: str, action: Callable[[], Awaitable[None]]) -> None:
    under_way.add(asyncio.ensure_future(action()))


under_way: set[asyncio.Future[None]] = set()


def history_of(jobs: BadJobs, monkeypatch: pytest.MonkeyPatch) -> tuple[HistoryRunner, Any]:
    monkeypatch.setattr(
        HistoryRunner, "encoded", lambda _: job_record_pb2.StoredHistory(rivals_won=7)
    )
    master: Any = SimpleNamespace(history_changes=(0,))
    store: Any = jobs
    gauges = CheckpointGauges()
    return HistoryRunner(JOB, master, "", gauges, JobHistory(), store, at_once), master


def test_storage_that_fails_is_asked_again_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_runner, "_PAUSE_S", 0.05)
    jobs = BadJobs()
    jobs.fails = True

    async def scenario() -> None:
        history, master = history_of(jobs, monkeypatch)
        master.history_changes = (1,)  # a failure, which is noted at once
        history.note()
        await asyncio.sleep(0.3)
        assert 1 < jobs.calls < 10
        jobs.goes_on.set()
        jobs.fails = False
        while jobs.noted is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        history.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["history", "taskmanagers"])
def test_storage_that_hangs_takes_one_thread(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(history_runner, "_PAUSE_S", 0.01)
    monkeypatch.setattr(history_runner, "_CALL_TIMEOUT_MS", 20)
    monkeypatch.setattr(taskmanagers_in_use_runner, "_CALL_TIMEOUT_MS", 20)
    jobs = BadJobs()

    async def scenario() -> None:
        history, master = history_of(jobs, monkeypatch)
        cluster: Any = SimpleNamespace(addresses=lambda ids: dict.fromkeys(ids, "host:1"))
        store: Any = jobs
        in_use = TaskManagersInUseRunner(JOB, (), cluster, store, at_once)
        for number in range(6):
            if what == "history":
                master.history_changes = (number,)
                history.note()
            else:
                in_use.note([f"tm{number}"])
            await asyncio.sleep(0.03)
        assert jobs.most == 1
        jobs.goes_on.set()
        wanted = {"tm5": "host:1"} if what != "history" else history.encoded()
        while jobs.noted != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        history.close()

    asyncio.run(scenario())
