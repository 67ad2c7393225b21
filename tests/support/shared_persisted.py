"""The story of rows that outlive their job on shared storage, on whatever storage that is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

import penstock as ps
from penstock import col
from penstock.client.client import Client
from penstock.client.job import JobHandle
from tests.support.processes import DEADLINE_S, DaemonCluster, Deadline, wait_ended

ROWS = 20_000


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})


def replace_all(cluster: DaemonCluster, options: Sequence[str], jobmanager_too: bool) -> None:
    """Kills every TaskManager, and starts others; what they had on their disks is gone."""
    roles = ["taskmanager"] + ["jobmanager"] * jobmanager_too
    pids = [int(one["pid"]) for role in roles for one in cluster.daemons(role)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_ended(pid)
    cluster.start(*options, taskmanagers=2, slots=2)


def read(cluster: DaemonCluster) -> list[int]:
    with ps.Environment(cluster.jobmanager, parallelism=3) as env:
        rows = env.read_persisted("kept").collect()
        env.execute("read")
        return sorted(row["n"] for row in rows)


def rows_outlive_whoever_made_them(
    cluster: DaemonCluster, options: Sequence[str], paths: Callable[[], list[str]]
) -> None:
    """Persists, kills everything, reads, compacts, drops.

    Args:
        cluster: with shared storage; two TaskManagers of two slots.
        options: that it was started with.
        paths: of all objects of the cluster on its storage.
    """
    with ps.Environment(cluster.jobmanager, parallelism=4) as env:
        env.generate(numbers, rows=ROWS).filter(col("n") >= 0).persist("kept")
        env.execute("persist")
    with Client(cluster.jobmanager) as client:
        held = client.partitions(promoted=True)
    assert [one.taskmanager_id for one in held] == [""] * 4, "no TaskManager holds anything"
    assert sum(one.rows for one in held) == ROWS
    assert len(index_paths(paths)) == 4
    replace_all(cluster, options, jobmanager_too=False)
    assert read(cluster) == list(range(ROWS))
    replace_all(cluster, options, jobmanager_too=True)  # the next one sweeps
    assert read(cluster) == list(range(ROWS))
    listed = cluster.site.penstock("partitions", "--jobmanager", cluster.jobmanager)
    assert "shared storage" in listed.stdout

    # Killed in the middle of what is to take its place.
    command = cluster.site.start_penstock(
        "partitions", "--compact", "kept", "--sort-by", "n", "--jobmanager", cluster.jobmanager
    )
    cluster.wait_for_log("jobmanager", "job.accepted", name="compact kept")
    jobmanager = cluster.pid("jobmanager")
    os.kill(jobmanager, signal.SIGKILL)
    wait_ended(jobmanager)
    cluster.start(*options, taskmanagers=2, slots=2)
    command.wait()
    with Client(cluster.jobmanager) as client:
        (job_id,) = [job.job_id for job in client.jobs() if job.name == "compact kept"]
        JobHandle(client, job_id).wait(DEADLINE_S)
    assert read(cluster) == list(range(ROWS))
    deadline = Deadline("that what was replaced is removed")
    while len(index_paths(paths)) > 1:
        deadline.left()
        time.sleep(0.1)
    assert read(cluster) == list(range(ROWS))
    dropped = cluster.site.penstock(
        "partitions", "--drop", "kept", "--jobmanager", cluster.jobmanager
    )
    assert dropped.stdout == "dropped 1 partitions of kept\n", dropped.stderr
    assert paths() == []


def index_paths(paths: Callable[[], list[str]]) -> list[str]:
    return [path for path in paths() if path.endswith("/index")]
