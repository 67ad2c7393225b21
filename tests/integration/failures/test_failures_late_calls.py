"""Aim: a call that reaches a TaskManager late, from before it registered anew or from before a slot was given out again,
does nothing: the job that runs there now is not touched.

Method: real daemons; the TaskManager is paused until the JobManager has given it up, and registers anew. Then the
calls of a JobManager for the earlier registration are made, and old ones for the one that holds, by the real
client, at the real port. The job must go on in the same process, without a restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from common.pb import internal_pb2
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock.client.client import Client
from penstock.client.job_result import state_name
from penstock.errors import Fenced
from penstock.pb import client_pb2
from tests.support.processes import DEADLINE_S, Beacon, DaemonCluster, logged_at, own_cluster, tell

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

Call = Callable[[TaskManagerClient], Awaitable[object]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaemonCluster]:
    """One TaskManager with one slot, quick to notice."""
    with own_cluster(
        tmp_path, slots=1, heartbeat_interval="200ms", heartbeat_timeout="3s"
    ) as cluster:
        yield cluster


def submit(env: ps.Environment, beacon: Beacon) -> ps.JobHandle:
    """An endless job whose attempts tell of their processes."""
    path = beacon.path

    class Tell(ps.MapFunction):
        def open(self, ctx: ps.RuntimeContext) -> None:
            tell(path, os.getpid())

        def __call__(self, row: ps.Row) -> object:
            return {"a": row.a}

    def make(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    rows = env.generate(make, rate=100, schema=pa.schema([("a", pa.int64())]))
    rows.map(Tell(), schema={"a": pa.int64()}).discard()
    return env.submit("endless")


def assert_goes_on(handle: ps.JobHandle, restarts: int) -> None:
    class Runs(Exception):  # noqa: N818 - not an error
        pass

    def look(details: client_pb2.JobDetails) -> None:
        assert details.summary.restarts == restarts
        if state_name(details) == "RUNNING":
            raise Runs

    with pytest.raises(Runs):
        handle.wait(DEADLINE_S, on_progress=look)


def cancel(handle: ps.JobHandle) -> None:
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_late_calls_do_not_reach_what_runs_now(cluster: DaemonCluster, tmp_path: Path) -> None:
    beacon = Beacon(tmp_path / "beacon")
    token = (cluster.directory / "token").read_text().strip()
    with (
        Client(cluster.jobmanager) as client,
        ps.Environment(cluster.jobmanager) as env,
    ):
        handle = submit(env, beacon)
        beacon.wait()
        earlier = cluster.wait_for_log("jobmanager", "taskmanager.registered")
        pid = cluster.pid("taskmanager")
        os.kill(pid, signal.SIGSTOP)
        try:
            lost = cluster.wait_for_log("jobmanager", "taskmanager.lost")
        finally:
            os.kill(pid, signal.SIGCONT)
        slot_pid = int(beacon.wait())
        now = cluster.wait_for_log("jobmanager", "taskmanager.registered", since=logged_at(lost))
        assert now["incarnation"] != earlier["incarnation"]
        (shown,) = client.cluster().taskmanagers
        epoch, restarts = client.hello().leader_epoch, handle.details().summary.restarts
        job_id, slot_id = handle.job_id, f"{shown.taskmanager_id}-0"
        attempt = internal_pb2.AttemptId(
            job_id=job_id, vertex="v0", subtask_index=0, attempt=restarts
        )

        async def made(incarnation: str, call: Call) -> None:
            late = TaskManagerClient(
                shown.taskmanager_id,
                shown.address,
                token=token,
                leader_epoch=epoch,
                rpc_timeout_ms=10_000,
                silence_max_ms=10_000,
                incarnation=incarnation,
            )
            try:
                await call(late)
            finally:
                await late.close()

        task = internal_pb2.TaskDeployment(attempt=attempt, slot_id=slot_id)
        end = internal_pb2.TaskCommand(
            attempt=attempt, cancel=internal_pb2.CancelTask(is_final=True)
        )
        calls: list[Call] = [
            lambda late: late.allocate_slots(job_id, [slot_id], [], {}, [], 1),
            lambda late: late.deploy_tasks([task]),
            lambda late: late.send_commands([end]),
            lambda late: late.free_slots(job_id, [slot_id]),
            lambda late: late.release_partitions(job_id, []),
            lambda late: late.sweep_output(job_id, []),
            lambda late: late.drop_promoted_partitions("all"),
        ]
        for call in calls:
            with pytest.raises(Fenced, match="incarnation"):
                asyncio.run(made(earlier["incarnation"], call))
        assert cluster.slot_pids(pid) == [slot_pid]
        assert_goes_on(handle, restarts)
        cancel(handle)

        # The registration holds, but the slot has been freed and given out since the first call of it.
        second = submit(env, beacon)
        slot_pid = int(beacon.wait())
        with pytest.raises(Fenced, match="given out again"):
            asyncio.run(made(now["incarnation"], calls[0]))
        asyncio.run(
            made(now["incarnation"], lambda late: late.free_slots(second.job_id, [slot_id]))
        )
        assert cluster.slot_pids(pid) == [slot_pid]
        assert_goes_on(second, 0)
        cancel(second)
    beacon.close()
