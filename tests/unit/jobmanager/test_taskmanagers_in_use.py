"""Aim: whom the next JobManager has to ask for attempts is known before there are any.

Method: over real gRPC with a TaskManager that only pretends; the note takes longer than a deployment would.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobmanager.stores.job_store import JobStore
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
