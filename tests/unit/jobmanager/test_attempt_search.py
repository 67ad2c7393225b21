"""Aim: a TaskManager that runs tasks of a job, and knows of no JobManager but the one before, hears who leads, however late.

Method: the search alone, with a cluster in which a TaskManager registers when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import structlog

from common.clock import SystemClock
from jobmanager.graph.slot import Slot
from jobmanager.job import attempt_search_runner
from jobmanager.job.attempt_search_runner import AttemptSearchRunner
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.scheduler.sought_attempts import SoughtAttempts
from penstock.errors import StoreTransient
from tests.support.jobs import DEADLINE_S

JOB = "1"


class Cluster:
    """Has waited for its TaskManagers long enough."""

    settles_in_s = 0.0

    def __init__(self, deaf: int) -> None:
        self.sought = SoughtAttempts()
        self.registered: dict[str, str] = {}
        self._deaf = deaf
        self.told: list[str] = []
        self.was_told = asyncio.Event()

    async def tell_leader(self, address: str, _timeout_s: float) -> None:
        self.told.append(address)
        if len(self.told) <= self._deaf:
            raise StoreTransient("no answer")
        self.was_told.set()

    def addresses(self, _ids: Iterable[str]) -> dict[str, str]:
        return self.registered

    def held_slots(self, _job_id: str) -> dict[str, tuple[Slot, ...]]:
        return {}


class NothingKept:
    """No partition of the job is anywhere."""

    async def wait_for(self, _partitions: object) -> None:
        pass

    async def found_shared(self, _ids: object) -> tuple[()]:
        return ()

    def held(self) -> tuple[()]:
        return ()

    def endpoints(self, _ids: object) -> tuple[()]:
        return ()


@pytest.mark.parametrize("hears", [True, False])
def test_who_is_waited_for_no_longer_is_told_who_leads(
    monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    for name in ("_NEWS_PAUSE_S", "_LATE_NEWS_PAUSE_S"):
        monkeypatch.setattr(attempt_search_runner, name, 0.001)

    async def scenario() -> None:
        cluster, posted = Cluster(deaf=2 if hears else 10**9), list[job_events.JobEvent]()
        its_own: Any = cluster
        kept: Any = NothingKept()
        search = AttemptSearchRunner(
            JOB,
            1,
            {"loyal": "tm:1"},
            its_own,
            kept,
            SystemClock(),
            OperationsRunner(JOB),
            DEADLINE_S if hears else 1.0,
            posted.append,
        )
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(search.find(job_effects.FindAttempts(1, ())))
            if hears:
                await cluster.was_told.wait()
                cluster.registered["loyal"] = "tm:1"
        assert set(cluster.told) == {"tm:1"}
        [found] = posted
        assert isinstance(found, job_events.AttemptsFound)
        assert found.is_anyone_missing

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    said = [one["event"] for one in logs if one["event"].startswith("leader.")]
    assert said.count("leader.unheard") >= 1
    assert [one["log_level"] for one in logs if one["event"] == "leader.unheard"].count("info") == 1
    assert ("leader.heard" in said) == hears
