"""Aim: whom the next JobManager has to ask for attempts is known before there are any; where nobody is named, the job has
only waited, and begins as if it had just been submitted.

Method: over real gRPC with a TaskManager that only pretends; the note takes longer than a deployment would, and a
JobManager is "killed" by putting its job's record back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobmanager.job import history_runner, taskmanagers_in_use_runner
from jobmanager.stores.job_store import JobStore
from penstock.errors import StoreTransient
from penstock.pb import client_pb2
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S
from tests.unit.jobmanager.test_jobmanager_checkpoints import JOB, Checkpointed, run, settings

LONGER_S = 0.3


def test_attempts_are_deployed_behind_the_note_of_their_taskmanagers(
    make_graph: Any, cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    is_deployed = threading.Event()
    note = JobStore.note_taskmanagers

    def slow(store: JobStore, job_id: str, addresses: Mapping[str, str]) -> None:
        is_deployed.wait(LONGER_S)
        note(store, job_id, addresses)
        order.append("noted")

    monkeypatch.setattr(JobStore, "note_taskmanagers", slow)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)

            def deploy(task: Any) -> None:
                order.append("deployed")
                is_deployed.set()
                fake.deploy(task)

            taskmanager.on_deploy = deploy
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
        assert order[0] == "noted"

    run(scenario)


@pytest.mark.parametrize("reason", ["no room", "storage does not answer"])
def test_of_a_job_that_must_not_run_twice_nothing_is_deployed_that_is_not_noted(
    make_graph: Any, cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The next JobManager would take it for one that has only waited, and begin it."""
    is_over = threading.Event()

    def fails(store: JobStore, job_id: str, addresses: Mapping[str, str]) -> None:
        if reason != "no room":
            is_over.wait(DEADLINE_S)
        raise StoreTransient("no room")

    monkeypatch.setattr(JobStore, "note_taskmanagers", fails)
    monkeypatch.setattr(taskmanagers_in_use_runner, "_PATIENCE_WHERE_NEEDED_S", LONGER_S)
    of_one_run = {"restart-strategy.type": "none", "execution.checkpointing.interval": "none"}
    config = settings(tmp_path, **of_one_run)

    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            taskmanager = await cluster.add("tm1")
            deployed: list[Any] = []
            taskmanager.on_deploy = deployed.append
            await cluster.submit(make_graph())
            details = await cluster.wait_for(JOB, "FAILED")
            is_over.set()
            assert f"could not be written: {reason}" in details.failure.message
            assert not deployed

    run(scenario)


@pytest.mark.parametrize("note", ["note_taskmanagers", "note_history"])
def test_storage_that_hangs_takes_no_thread_that_others_need(
    make_graph: Any, cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    """Names of hosts are looked up there, as everything is that has no threads of its own."""
    hangs, is_over = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        hangs.set()
        is_over.wait(DEADLINE_S)
        raise StoreTransient("at last")

    monkeypatch.setattr(JobStore, note, hang)
    monkeypatch.setattr(history_runner, "_PAUSE_S", 0.0)
    monkeypatch.setattr(taskmanagers_in_use_runner, "_PATIENCE_S", 0.0)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            try:
                with ThreadPoolExecutor(1) as waiting:
                    assert await loop.run_in_executor(waiting, hangs.wait, DEADLINE_S)
                async with asyncio.timeout(DEADLINE_S / 2):
                    await loop.run_in_executor(None, int)
            finally:
                is_over.set()

    run(scenario)


@pytest.mark.parametrize("strategy", ["none", "exponential-delay"])
@pytest.mark.parametrize("takes_checkpoints", [False, True])
def test_a_job_that_has_waited_for_slots_under_a_jobmanager_that_dies_begins_under_the_next(
    make_graph: Any, cluster_of: Any, tmp_path: Path, strategy: str, takes_checkpoints: bool
) -> None:
    config = settings(tmp_path, **{"restart-strategy.type": strategy})
    if not takes_checkpoints:
        config["execution.checkpointing.interval"] = "none"

    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            await cluster.submit(make_graph())
            asked = client_pb2.GetJobRequest(job_id=JOB)
            while not (await cluster.client.GetJob(asked)).HasField("slot_wait"):  # noqa: ASYNC110 - over gRPC
                await asyncio.sleep(0.01)
            kept = JobRecords(tmp_path).copy()
        JobRecords(tmp_path).put_back(kept)
        assert JobRecords(tmp_path).all()[JOB].attempts_end > 0
        async with cluster_of(config) as cluster:
            shown = await cluster.client.GetJob(asked)
            assert shown.summary.state == client_pb2.JOB_STATE_CREATED, "it waits as it did"
            Checkpointed(await cluster.add("tm1"))
            details = await cluster.wait_for(JOB, "RUNNING")
            assert details.summary.restarts == 0
            told = client_pb2.ListExceptionsRequest(job_id=JOB)
            assert not (await cluster.client.ListExceptions(told)).entries

    run(scenario)
