"""Aim: what a start has settled is not in the way of the next checkpoint, and that one is waited for as any other; and
files that are being deleted when the job ends are no sign of storage that hangs.

Method: the runner alone, with a store whose calls the test lets go.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from common.clock import SystemClock
from jobmanager.checkpoint import messages as c
from jobmanager.job import job_calls_runner
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.checkpoint_storing_runner import CheckpointStoringRunner
from jobmanager.job.job_calls_runner import JobCallsRunner
from penstock.errors import StoreTransient
from penstock.storage.head import HeadOutcomeUnknown
from tests.support.jobs import DEADLINE_S


class Store:
    """Does not say of checkpoint 1 whether it is stored, and stores checkpoint 2 when the test lets it."""

    def __init__(self) -> None:
        self.is_away = True
        self.may_hang = threading.Event()
        self.was_asked = threading.Event()
        self.begins = threading.Event()
        self.go_on = threading.Event()

    def store(self, stored: Any, *_: object) -> c.CheckpointStored:
        if stored.checkpoint_id == 1:
            raise HeadOutcomeUnknown("no answer")
        self.begins.set()
        assert self.go_on.wait(DEADLINE_S)
        return c.CheckpointStored(stored.checkpoint_id, "manifest", 0)

    def settle(self, checkpoint_id: int) -> c.CheckpointStored:
        if self.is_away:
            self.was_asked.set()
            if self.may_hang.is_set():
                assert self.go_on.wait(DEADLINE_S)
            raise StoreTransient("away")
        return c.CheckpointStored(checkpoint_id, "manifest", 0)

    def give_up(self, checkpoint_id: int) -> None:
        pass


def wanted(checkpoint_id: int) -> Any:
    stored = SimpleNamespace(checkpoint_id=checkpoint_id, finished=(), snapshots=())
    return SimpleNamespace(stored=stored, done_splits=(), done_before=())


@pytest.mark.parametrize("meanwhile", ["pauses", "hangs"])
def test_the_next_checkpoint_is_stored_at_once_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    monkeypatch.setattr(job_calls_runner, "_FIRST_PAUSE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(job_calls_runner, "_LAST_PAUSE_S", 10 * DEADLINE_S)
    store, posted = Store(), list[Any]()
    if meanwhile == "hangs":
        store.may_hang.set()

    async def scenario() -> None:
        collects: Any = SimpleNamespace(last_states=lambda _: {}, committed=lambda _: {})
        results: Any = SimpleNamespace(commit=lambda *_: None)
        its_own: Any = store
        storing = CheckpointStoringRunner(
            "1",
            its_own,
            JobCallsRunner("1", int(10_000 * DEADLINE_S), CheckpointGauges()),
            collects,
            results,
            SystemClock(),
            posted.append,
            posted.append,
        )

        async def lane() -> None:
            await storing.store(wanted(1))
            await storing.store(wanted(2))

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            storing.begin(1)
            tasks.create_task(lane())
            await asyncio.to_thread(store.was_asked.wait)
            while meanwhile == "pauses" and not said("checkpoint.not_settled"):  # noqa: ASYNC110 - a log tells
                await asyncio.sleep(0.001)
            store.is_away = False
            await storing.settle()  # as a start does
            storing.begin(2)
            await asyncio.to_thread(store.begins.wait)
            waits = tasks.create_task(storing.wait())
            await asyncio.sleep(0)
            assert not waits.done(), "checkpoint 2 is being stored"
            store.go_on.set()

    def said(event: str) -> bool:
        return any(one["event"] == event for one in logs)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    assert said("checkpoint.settled_again") == (meanwhile == "pauses"), "the outage is over"
    known = [event.checkpoint_id for event in posted if isinstance(event, c.CheckpointStored)]
    assert known == [1, 2]


def test_a_job_that_ends_while_files_are_deleted_has_not_given_up_on_its_storage() -> None:
    go_on, begins = threading.Event(), threading.Event()

    def delete(paths: tuple[str, ...]) -> c.FilesDeleted:
        begins.set()
        assert go_on.wait(DEADLINE_S)
        return c.FilesDeleted(paths, 0)

    async def scenario() -> None:
        nothing: Any = None
        its_own: Any = SimpleNamespace(deletions=SimpleNamespace(delete=delete))
        calls = JobCallsRunner("1", int(10_000 * DEADLINE_S), CheckpointGauges())
        storing = CheckpointStoringRunner(
            "1", its_own, calls, nothing, nothing, SystemClock(), posted.append, posted.append
        )
        async with asyncio.timeout(DEADLINE_S):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(storing.delete(c.DeleteFiles(("old",))))
                await asyncio.to_thread(begins.wait)
                calls.end()
            go_on.set()
            await calls.calls.wait_for_all(int(1000 * DEADLINE_S))

    posted = list[Any]()
    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    assert not logs, "its disk does not hang"
    assert [event.left for event in posted] == [("old",)]
