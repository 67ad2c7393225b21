"""Aim: complete partitions on real daemons: listed, promoted, released with their job, swept after a kill.

Method: partitions are put where slots put them; the command line tells.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from common.pb import internal_pb2
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from penstock.client.client import Client
from penstock.partition_id import PartitionId
from tests.support.processes import DEADLINE_S, DaemonCluster, own_cluster, wait_ended
from tests.support.sealed_partitions import partition_message, seal_rows

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

ONE, TWO = PartitionId("e0", "v0", 0, 0), PartitionId("e0", "v0", 1, 0)


def until(condition: Callable[[], object]) -> None:
    """For what no message tells."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaemonCluster]:
    """One TaskManager that spills to a directory of its own."""
    (tmp_path / "spill" / "of-the-user").mkdir(parents=True)
    with own_cluster(
        tmp_path, slots=1, taskmanager_spill_dir=str(tmp_path / "spill"), heartbeat_interval="100ms"
    ) as cluster:
        yield cluster
    assert [path.name for path in (tmp_path / "spill").iterdir()] == ["of-the-user"]


def spill_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "spill").glob("spill-*")
    return path


def endless(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})


def promote(
    cluster: DaemonCluster, client: Client, job_id: str, name: str, partition: PartitionId
) -> None:
    """What a JobMaster does."""
    token = (cluster.directory / "token").read_text().strip()
    registered = cluster.wait_for_log("jobmanager", "taskmanager.registered")

    async def call() -> None:
        (shown,) = client.cluster().taskmanagers
        taskmanager = TaskManagerClient(
            shown.taskmanager_id,
            shown.address,
            token=token,
            leader_epoch=client.hello().leader_epoch,
            rpc_timeout_ms=10_000,
            silence_max_ms=10_000,
            incarnation=registered["incarnation"],
        )
        try:
            promoted = internal_pb2.PromotedSet(
                name=name, job_id=job_id, partition_count=1, confirmed=True
            )
            await taskmanager.promote_partitions(promoted, [partition_message(partition)])
        finally:
            await taskmanager.close()

    asyncio.run(call())


def test_the_life_of_partitions(cluster: DaemonCluster, tmp_path: Path) -> None:
    def listed(*options: str) -> set[tuple[str, int, str | None]]:
        arguments = ("partitions", "--json", "--jobmanager", cluster.jobmanager, *options)
        shown = cluster.site.penstock(*arguments).json["partitions"]
        return {(one["job_id"], one["subtask_index"], one["promoted_as"]) for one in shown}

    spill = spill_of(tmp_path)
    with Client(cluster.jobmanager) as client, ps.Environment(cluster.jobmanager) as env:
        env.generate(endless, rate=10).discard()
        job = env.submit("endless")
        for partition in (ONE, TWO):
            seal_rows(spill, job.job_id, partition, 5)
        seal_rows(spill, "unknown", ONE, 5)
        # What no job needs is released, what one needs is kept and shown.
        until(lambda: not (spill / "unknown").exists())
        until(lambda: len(client.partitions()) == 2)
        assert listed() == {(job.job_id, 0, None), (job.job_id, 1, None)}
        status = cluster.site.penstock(
            "cluster", "status", "--json", "--dir", str(cluster.directory)
        ).json
        held = {daemon["role"]: daemon["held_partitions"] for daemon in status["daemons"]}
        assert held == {"jobmanager": None, "taskmanager": 2}

        promote(cluster, client, job.job_id, "mine", TWO)
        job.cancel()
        until(lambda: not (spill / job.job_id).exists())
        until(lambda: len(client.partitions()) == 1)
        assert listed() == listed("--promoted") == {(job.job_id, 1, "mine")}
        table = cluster.site.penstock("partitions", "--jobmanager", cluster.jobmanager).stdout
        assert "mine" in table
        drop = ("partitions", "--jobmanager", cluster.jobmanager, "--drop", "mine")
        assert cluster.site.penstock(*drop).stdout == "dropped 1 partitions of mine\n"
        until(lambda: not client.partitions())
        again = cluster.site.penstock(*drop)
        assert again.status == 1
        assert "no partitions are promoted as 'mine'" in again.stderr


def test_no_orphan_survives_a_kill_and_a_restart(cluster: DaemonCluster, tmp_path: Path) -> None:
    spill = spill_of(tmp_path)
    seal_rows(spill, "job", ONE, 5)
    taskmanager = cluster.pid("taskmanager")
    os.kill(taskmanager, signal.SIGKILL)
    wait_ended(taskmanager)
    assert list(spill.rglob("*.arrow"))
    cluster.start()
    # The next one of the same id has taken the place.
    assert spill_of(tmp_path) == spill
    assert list(spill.rglob("*.arrow")) == []
