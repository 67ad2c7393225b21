"""Aim: what peers say of a TaskManager makes the JobManager look, and nothing else.

Method: a JobManager in this process, two TaskManagers that pretend; one says that it cannot reach the
other, which answers, or does not.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.pb import internal_pb2
from penstock.pb import client_pb2
from tests.support.jobs import DEADLINE_S


def unreachable(
    task: internal_pb2.TaskDeployment, slot_id: str, unix_path: str = ""
) -> internal_pb2.TaskEvent:
    """An attempt's report about the process that serves a slot, or partitions."""
    path = unix_path or f"/{slot_id}"
    peer = internal_pb2.DataEndpoint(slot_id=slot_id, host_id="h", unix_path=path)
    report = internal_pb2.PeerUnreachable(peer=peer, reason="connection reset")
    return internal_pb2.TaskEvent(attempt=task.attempt, peer_unreachable=report)


@pytest.fixture
def run() -> Any:
    def run_bounded(work: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await work()

        asyncio.run(bounded())

    return run_bounded


@pytest.mark.parametrize("is_partition_server", [False, True])
def test_a_taskmanager_that_answers_is_not_doubted(
    cluster_of: Any, make_graph: Any, run: Any, is_partition_server: bool
) -> None:
    async def work() -> None:
        async with cluster_of() as cluster:
            reporter, accused = await cluster.add("tm1", slots=1), await cluster.add("tm2", slots=1)
            probed = asyncio.Event()

            async def note() -> None:
                probed.set()

            accused.on_probe = note
            job_id = await cluster.submit(make_graph())
            await cluster.wait_for(job_id, "RUNNING")
            reporter.report(unreachable(reporter.deployed[0], "nobody"))
            peer = ("partitions", "/tm2") if is_partition_server else (accused.allocated[0],)
            reporter.report(unreachable(reporter.deployed[0], *peer))
            await probed.wait()
            assert await accused.beat()
            info = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            assert len(info.taskmanagers) == 2
            details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=job_id))
            assert details.summary.state == client_pb2.JOB_STATE_RUNNING
            assert cluster.jobmanager.dispatcher.dropped_reports == 0

    run(work)


def test_one_that_does_not_answer_may_be_silent_for_a_shorter_time(
    cluster_of: Any, make_graph: Any, run: Any
) -> None:
    async def work() -> None:
        config = {"heartbeat.interval": 20, "heartbeat.timeout": 2_000}
        async with cluster_of(config) as cluster:
            reporter, accused = await cluster.add("tm1", slots=1), await cluster.add("tm2", slots=1)
            accused.on_probe = asyncio.Event().wait
            job_id = await cluster.submit(make_graph())
            await cluster.wait_for(job_id, "RUNNING")

            async def live() -> None:
                while await reporter.beat():  # noqa: ASYNC110 - the interval of heartbeats
                    await asyncio.sleep(0.02)

            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(live())
                reporter.report(unreachable(reporter.deployed[0], accused.allocated[0]))
                failure = (await cluster.wait_for(job_id, "FAILED")).failure
                beating.cancel()
            assert failure.error_class == "TaskManagerLost"
            assert "TaskManager tm2" in failure.message
            assert "could not be reached by tm1: its machine is down" in failure.message

    run(work)
