"""Aim: what TaskManagers hold is known, shown, and released when no job needs it.

Method: the pure table by examples; then a JobManager in this process with fake TaskManagers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from common.pb import internal_pb2
from jobmanager.partitions.held_partitions import HeldPartition, HeldPartitions, Holdings
from jobmanager.partitions.promoted import PromotedSet
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.held_partitions_runner import HeldPartitionsRunner
from penstock.errors import Unrecoverable
from penstock.partition_id import PartitionId
from penstock.pb import client_pb2

DEADLINE_S = 90.0


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await scenario()

    asyncio.run(limited())


def held(job_id: str, subtask_index: int = 0, promoted_as: str = "") -> HeldPartition:
    return HeldPartition(job_id, PartitionId("e0", "v0", subtask_index, 1), 7, 70, promoted_as)


def message(job_id: str, promoted_as: str = "") -> internal_pb2.HeldPartition:
    partition = internal_pb2.PartitionId(edge_id="e0", vertex="v0", subtask_index=3, attempt=1)
    return internal_pb2.HeldPartition(
        job_id=job_id, partition=partition, rows=7, size_bytes=70, promoted_as=promoted_as
    )


def whole(name: str, job_id: str) -> internal_pb2.PromotedSet:
    return internal_pb2.PromotedSet(name=name, job_id=job_id, partition_count=1, confirmed=True)


def wanted(*indices: int) -> set[PartitionId]:
    return {held("a", index).partition_id for index in indices}


def test_partitions_are_found_with_whoever_holds_them_for_their_job() -> None:
    table = HeldPartitions()
    table.observe("tm1", Holdings((held("a"), held("b", 1), held("a", 2, promoted_as="mine"))))
    table.observe("tm2", Holdings((held("a", 3),)))
    found = table.find("a", wanted(0, 1, 2, 3))
    assert {id.subtask_index: holder for id, holder in found.items()} == {0: "tm1", 3: "tm2"}


def test_taskmanagers_that_may_still_register_are_waited_for() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        settled_at = loop.time() + 0.2
        runner = HeldPartitionsRunner(_no_client, _no_work, lambda: settled_at - loop.time())
        runner.observe("tm1", Holdings((held("a"),)))
        assert await runner.locate("a", wanted(0)) == {held("a").partition_id: "tm1"}
        assert loop.time() < settled_at
        late = Holdings((held("a", 1),))
        loop.call_later(0.05, runner.observe, "tm2", late)
        assert set((await runner.locate("a", wanted(0, 1))).values()) == {"tm1", "tm2"}
        assert loop.time() < settled_at
        assert await runner.locate("a", wanted(1, 2)) == {held("a", 1).partition_id: "tm2"}
        assert loop.time() >= settled_at

    run(scenario)


def test_a_persisted_set_is_read_when_those_who_hold_it_have_registered() -> None:
    """A JobManager that has just started again; then, what is not there when all could have registered is gone."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        settled_at = loop.time() + 0.2
        runner = HeldPartitionsRunner(_no_client, _no_work, lambda: settled_at - loop.time())
        whole_set = PromotedSet("mine", "old", b"", 2, 0, True)
        holdings = [Holdings((held("old", n, "mine"),), 1, 70, (whole_set,)) for n in range(2)]
        runner.observe("tm1", holdings[0])
        loop.call_later(0.05, runner.observe, "tm2", holdings[1])
        parts = await runner.registered_parts_of("mine", "old")
        assert [part.taskmanager_id for part in parts] == ["tm1", "tm2"]
        assert loop.time() < settled_at
        runner.lost("tm2")
        with pytest.raises(Unrecoverable, match="1 of the 2 partitions"):
            await runner.registered_parts_of("mine", "old")
        assert loop.time() >= settled_at

    run(scenario)


def _no_client(taskmanager_id: str) -> TaskManagerClient:
    raise AssertionError(taskmanager_id)


def _no_work(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError(work)


def test_what_no_job_needs() -> None:
    table = HeldPartitions()
    partitions = (held("a"), held("a", 1), held("b"), held("c", promoted_as="mine"))
    table.observe("tm1", Holdings(partitions, 4, 280))
    table.observe("tm2", Holdings((held("c", promoted_as="mine"),), 1, 70))
    assert table.unneeded_jobs("tm1", lambda job_id: job_id == "a") == ("b",)
    assert table.unneeded_jobs("tm1", lambda _job_id: False) == ("a", "b")
    assert table.unneeded_jobs("tm2", lambda _job_id: False) == ()
    assert table.unneeded_jobs("unknown", lambda _job_id: False) == ()
    assert table.holders_of("mine") == ["tm1", "tm2"]
    assert table.holders_of("") == ["tm1"]
    assert (table.count, table.size_bytes, len(table.all())) == (5, 350, 5)
    table.lost("tm1")
    assert (table.count, table.size_bytes, table.of("tm1")) == (1, 70, Holdings())


def test_what_ended_and_unknown_jobs_left_is_released(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            job = await cluster.submit(make_graph())
            await cluster.wait_for(job, "RUNNING")
            taskmanager.held = [message(job), message("gone"), message("old", "mine")]
            taskmanager.promoted = [whole("mine", "old")]
            taskmanager.refuse_releasing = True
            slots = [(slot, job) for slot in taskmanager.allocated]
            async with asyncio.timeout(DEADLINE_S):
                # Again and again until it is gone; never what a job needs, or what was promoted.
                for _ in range(2):
                    assert await taskmanager.beat(slots)
                    assert await taskmanager.released.get() == ("gone", 0)
                taskmanager.refuse_releasing = False
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job))
                await cluster.wait_for(job, "CANCELED")
                del taskmanager.held[1]
                assert await taskmanager.beat()
                assert await taskmanager.released.get() == (job, 0)

    run(scenario)


def test_clients_see_what_is_held(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            job = await cluster.submit(make_graph())
            taskmanager.held = [message(job), message(job, "mine"), message(job, "yours")]
            taskmanager.promoted = [whole("mine", job), whole("yours", job)]
            assert await taskmanager.beat()
            details = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            (shown,) = details.taskmanagers
            assert (shown.held_partitions, shown.held_partitions_bytes) == (3, 210)

            async def names(*, promoted: bool) -> list[str]:
                request = client_pb2.ListPartitionsRequest(promoted=promoted)
                listed = (await cluster.client.ListPartitions(request)).partitions
                assert {(one.taskmanager_id, one.job_id) for one in listed} == {("tm1", job)}
                assert {(one.edge_id, one.vertex, one.subtask_index) for one in listed} == {
                    ("e0", "v0", 3)
                }
                return [one.promoted_as for one in listed]

            assert await names(promoted=False) == ["", "mine", "yours"]
            assert await names(promoted=True) == ["mine", "yours"]
            drop = client_pb2.DropPartitionsRequest(name="mine")
            assert (await cluster.client.DropPartitions(drop)).dropped == 1
            assert await taskmanager.beat()
            assert await names(promoted=True) == ["yours"]
            with pytest.raises(grpc.aio.AioRpcError, match="no partitions are promoted as 'mine'"):
                await cluster.client.DropPartitions(drop)

    run(scenario)
