"""A JobManager over real gRPC, and peers that send what nobody should.

Aim: whatever one peer, one request or the disk does at the end of one job, the JobManager and its other jobs go on.
Method: hostile registrations and requests, a directory that refuses; then a job must run, and the daemon's own
tasks must be alive.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.pb import internal_pb2, internal_pb2_grpc
from jobmanager.dispatcher import ended_jobs_runner
from jobmanager.installed_version import penstock_version
from jobmanager.liveness.reachability import Reachability
from jobmanager.rpc.reachability_client import ReachabilityClient
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock import errors
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.pb import client_pb2
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S

STATES = client_pb2.AttemptState


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


async def raised(call: Any) -> errors.StreamError:
    try:
        await call
    except grpc.RpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the call succeeded")


def registration(**fields: Any) -> internal_pb2.RegisterTaskManagerRequest:
    usable = {"taskmanager_id": "bad", "rpc_address": "127.0.0.1:1", "slots": 1, "incarnation": "i"}
    usable |= {"python_version": "3.11.4", "protocol_version": DAEMON_PROTOCOL_VERSION}
    return internal_pb2.RegisterTaskManagerRequest(**usable | fields)


def test_a_taskmanager_of_another_protocol_is_refused_with_both_versions(cluster_of: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            internal = internal_pb2_grpc.JobManagerInternalStub(cluster.channel)
            for spoken, told in ((0, "an earlier protocol"), (99, "protocol 99")):
                request = registration(protocol_version=spoken, version="9.9")
                error = await raised(internal.RegisterTaskManager(request))
                assert isinstance(error, errors.ProtocolMismatch)
                assert f"TaskManager bad at 127.0.0.1:1 (penstock 9.9) speaks {told}" in str(error)
                assert f"(penstock {penstock_version()}) speaks {DAEMON_PROTOCOL_VERSION}" in str(
                    error
                )
            await cluster.add("tm1")
            info = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            assert [found.version for found in info.taskmanagers] == ["9.8"]

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rpc_address": "tm-1..example.org:6122"}, "cannot be the name of a host"),
        ({"rpc_address": f"{'x' * 64}.org:6122"}, "cannot be the name of a host"),
        ({"rpc_address": "nonsense"}, "is not an address"),
        ({"rpc_address": "host:99999"}, "is not an address"),
        ({"slots": 2**31 - 1}, "slots"),
        ({"incarnation": ""}, "an incarnation"),
        ({"taskmanager_id": "../x"}, "is not usable"),
        ({"python_version": "127.0.0.1:1"}, "is no version"),
        ({"packages": ["x"] * 100_001}, "packages"),
    ],
)
def test_a_registration_that_cannot_be_used_is_refused_and_harms_nobody(
    cluster_of: Any, make_graph: Any, fields: dict[str, Any], word: str
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            internal = internal_pb2_grpc.JobManagerInternalStub(cluster.channel)
            error = await raised(internal.RegisterTaskManager(registration(**fields)))
            assert isinstance(error, errors.JobRejected)
            assert word in str(error)
            await cluster.add("tm1")
            await cluster.wait_for(await cluster.submit(make_graph()), "RUNNING")
            info = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            assert [found.taskmanager_id for found in info.taskmanagers] == ["tm1"]

    run(scenario)


def test_taskmanagers_are_bounded(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({"jobmanager.taskmanagers.max": "2"}) as cluster:
            internal = internal_pb2_grpc.JobManagerInternalStub(cluster.channel)
            first = await cluster.add("tm1")
            await cluster.add("tm2")
            error = await raised(internal.RegisterTaskManager(registration()))
            assert isinstance(error, errors.JobRejected)
            assert "jobmanager.taskmanagers.max" in str(error)
            # Those that are in may come back, and one that leaves makes room.
            first.incarnation = "tm1-2"
            await first.register()
            await first.jobmanager.Goodbye(
                internal_pb2.GoodbyeRequest(taskmanager_id="tm1", incarnation="tm1-2")
            )
            await cluster.add("tm3", slots=4)
            await cluster.wait_for(await cluster.submit(make_graph()), "RUNNING")

    run(scenario)


@pytest.mark.parametrize("host", ["tm-1..example.org", "does-not-exist.invalid"])
def test_a_host_that_cannot_be_resolved_is_unreachable(host: str) -> None:
    async def scenario() -> None:
        client = ReachabilityClient(f"{host}:6122", token="", leader_epoch=1, incarnation="i")
        assert await client.probe(2.0) is Reachability.UNREACHABLE
        await client.close()

    run(scenario)


def test_a_watch_that_crashes_ends_nothing_else(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async def crash(self: ReachabilityClient) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(ReachabilityClient, "wait_until_broken", crash)
        async with cluster_of() as cluster:
            await cluster.add("tm1")
            await cluster.wait_for(await cluster.submit(make_graph()), "RUNNING")

    run(scenario)


def test_a_slot_that_cannot_be_ended_as_nobody_foresaw_ends_nothing_else(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def broken(*_: object) -> None:
        asked.set()
        raise RuntimeError("a bug")

    async def scenario() -> None:
        async with cluster_of() as cluster:
            fake = await cluster.add("tm1")
            with monkeypatch.context() as patch:
                patch.setattr(TaskManagerClient, "free_slots", broken)
                assert await fake.beat([("tm1-9", "f" * 32)])
                await asked.wait()
            await cluster.submit(make_graph())
            await cluster.wait_for("0" * 32, "RUNNING")
            assert await fake.beat()

    run(scenario)


def test_too_many_artifact_ids_are_refused_and_many_do_not_hold_up_the_loop(
    cluster_of: Any,
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            many = client_pb2.MissingArtifactsRequest(ids=["0" * 64] * 500_000)
            assert "500,000" in str(await raised(cluster.client.MissingArtifacts(many)))
            some = client_pb2.MissingArtifactsRequest(ids=[f"{i:064x}" for i in range(10_000)])
            assert len((await cluster.client.MissingArtifacts(some)).ids) == 10_000

    run(scenario)


async def ended_while_full(
    cluster: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> tuple[str, str, asyncio.Event]:
    """Of two jobs one comes to an end that cannot be stored: the healthy one, the other, and whether the disk is full."""
    taskmanager = await cluster.add("tm1", slots=4)
    healthy = await cluster.submit(make_graph())
    await cluster.wait_for(healthy, "RUNNING")
    sick = await cluster.submit(make_graph(), "1" * 32)
    await cluster.wait_for(sick, "RUNNING")
    store = cluster.jobmanager.dispatcher._store
    note_end, is_full = store.note_end, asyncio.Event()
    is_full.set()

    def refuse(job_id: str, *noted: Any) -> None:
        if job_id == sick and is_full.is_set():
            raise errors.StoreTransient("no space left on device")
        note_end(job_id, *noted)

    monkeypatch.setattr(store, "note_end", refuse)
    if end == "CANCELED":
        await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=sick))
    else:
        cluster.jobmanager.dispatcher.fail(sick, errors.Unrecoverable("on purpose"))
    for task in taskmanager.deployed:
        if task.attempt.job_id == sick:
            taskmanager.report_state(task.attempt, STATES.ATTEMPT_STATE_CANCELED)
    return healthy, sick, is_full


@pytest.mark.parametrize("end", ["CANCELED", "FAILED"])
def test_a_directory_that_refuses_at_the_end_of_a_job_holds_up_nothing_else(
    cluster_of: Any,
    make_graph: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: str,
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            healthy, sick, is_full = await ended_while_full(cluster, make_graph, monkeypatch, end)
            # Nobody is told of an end that the next JobManager would not know.
            request = client_pb2.GetJobRequest(job_id=sick)
            while "no space" not in (await cluster.client.GetJob(request)).summary.problem:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await cluster.wait_for(healthy, "RUNNING")
            assert not JobRecords(tmp_path).all()[sick].HasField("end")
            is_full.clear()
            details = await cluster.wait_for(sick, end)
            assert not details.summary.problem
            assert JobRecords(tmp_path).all()[sick].end.state == end
            third = await cluster.submit(make_graph(), "2" * 32)
            await cluster.wait_for(third, "RUNNING")

    run(scenario)


@pytest.mark.parametrize("end", ["CANCELED", "FAILED"])
def test_a_job_of_a_jobmanager_that_is_alone_ends_although_its_end_cannot_be_stored(
    cluster_of: Any,
    make_graph: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: str,
) -> None:
    monkeypatch.setattr(ended_jobs_runner, "ALONE_PATIENCE_S", 0.1)

    async def scenario() -> None:
        async with cluster_of() as cluster:
            healthy, sick, is_full = await ended_while_full(cluster, make_graph, monkeypatch, end)
            # Who waits for the job hears of its end, and that the next JobManager would not know it.
            details = await cluster.wait_for(sick, end)
            assert "no space" in details.summary.problem
            await cluster.wait_for(healthy, "RUNNING")
            assert not JobRecords(tmp_path).all()[sick].HasField("end")
            is_full.clear()
            while not JobRecords(tmp_path).all()[sick].end.is_clean:  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)
            assert JobRecords(tmp_path).all()[sick].end.state == end
            third = await cluster.submit(make_graph(), "2" * 32)
            await cluster.wait_for(third, "RUNNING")

    run(scenario)


def test_a_jobmanager_is_healthy_until_it_is_told_to_stop(cluster_of: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher = cluster.jobmanager.dispatcher
            assert dispatcher.why_not_serving == ""
            await dispatcher.stop()
            assert dispatcher.why_not_serving == "the JobManager is stopping"

    run(scenario)


RESTARTS = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1",
    "restart-strategy.fixed-delay.delay": "10ms",
}


def test_a_stale_slot_at_the_first_allocation_is_restarted(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of(RESTARTS) as cluster:
            taskmanager = await cluster.add("tm1")
            calls = taskmanager.allocations
            taskmanager.allocation_errors = [
                errors.NoResourceAvailable("slot tm1-0 is held by another job")
            ]
            details = await cluster.wait_for(await cluster.submit(make_graph()), "RUNNING")
            assert details.summary.restarts == 1
            assert {call.incarnation for call in calls} == {taskmanager.incarnation}
            assert 0 < calls[0].allocation_id < calls[1].allocation_id

    run(scenario)


@pytest.mark.parametrize("config", [RESTARTS, {"restart-strategy.type": "none"}])
def test_a_taskmanager_that_is_told_to_end_uses_up_no_restart(
    cluster_of: Any, make_graph: Any, config: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            # More often than there are restarts.
            for planned_stops in range(3):
                leaving = await cluster.add(f"tm{planned_stops}")
                if planned_stops == 0:
                    job_id = await cluster.submit(make_graph())
                details = await cluster.wait_for(job_id, "RUNNING")
                while not leaving.deployed or details.summary.restarts < planned_stops:
                    details = await cluster.wait_for(job_id, "RUNNING", "FAILED")
                    assert details.summary.state != client_pb2.JOB_STATE_FAILED
                await leaving.jobmanager.Goodbye(
                    internal_pb2.GoodbyeRequest(
                        taskmanager_id=leaving.id,
                        incarnation=leaving.incarnation,
                        reason="it was told to end",
                        is_planned=True,
                    )
                )
                await cluster.wait_for(job_id, "RESTARTING", "FAILED")
            await cluster.add("last")
            details = await cluster.wait_for(job_id, "RUNNING", "FAILED")
            assert details.summary.state == client_pb2.JOB_STATE_RUNNING
            assert details.summary.restarts == 3

    run(scenario)


@pytest.mark.parametrize(("is_planned", "reason"), [(True, "goodbye"), (False, "gave-up")])
def test_metrics_tell_who_was_told_to_end_from_who_could_not_go_on(
    cluster_of: Any, is_planned: bool, reason: str
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            leaving = await cluster.add("tm1")
            await leaving.jobmanager.Goodbye(
                internal_pb2.GoodbyeRequest(
                    taskmanager_id="tm1",
                    incarnation=leaving.incarnation,
                    is_planned=is_planned,
                )
            )
            losses = cluster.jobmanager.cluster.losses
            assert {loss.value: count for loss, count in losses.items()} == {reason: 1}

    run(scenario)


def test_who_was_drained_under_an_earlier_leader_and_begins_anew_is_in_use(
    cluster_of: Any,
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            known = cluster.jobmanager.cluster
            known.drained.update({"tm1": "tm1-0", "tm2": "tm2-1"})  # as the storage says
            for name in ("tm1", "tm2"):
                await cluster.add(name)
            assert known.drained == {"tm2": "tm2-1"}
            assert [known.offered(name) for name in ("tm1", "tm2")] == [(2, 2), (0, 0)]

    run(scenario)
