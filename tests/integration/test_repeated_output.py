"""Aim: output that may be there twice is named, file by file, whatever becomes of the JobManager.

Method: real daemons; the newest checkpoints of a job that writes files are damaged on disk and the JobManager
is killed, twice; what info, exceptions, the log and the metric say is compared with the files that are there.
"""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from tests.support.jobs import await_details
from tests.support.processes import DaemonCluster, site, wait_ended, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaemonCluster]:
    with site(tmp_path / "site") as place:
        cluster = DaemonCluster(place)
        cluster.start(
            taskmanagers=1,
            slots=2,
            jobmanager_metrics_port="0",
            heartbeat_interval="200ms",
        )
        yield cluster
        cluster.stop()
        cluster.assert_nothing_left()


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


def kill_jobmanager(cluster: DaemonCluster) -> None:
    pid = cluster.pid("jobmanager")
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    cluster.start(taskmanagers=1)


def metric(cluster: DaemonCluster, job_id: str) -> float:
    [daemon] = cluster.daemons("jobmanager")
    with urllib.request.urlopen(
        f"http://{daemon['metrics_address']}/metrics", timeout=10
    ) as answer:
        lines = answer.read().decode().splitlines()
    name = "penstock_job_output_repeated_total{"
    [value] = [line.split()[-1] for line in lines if line.startswith(name) and job_id in line]
    return float(value)


def said(cluster: DaemonCluster, job_id: str) -> Any:
    """What info and exceptions say, which is the same."""
    shown = []
    for command in ("info", "exceptions"):
        options = (command, job_id, "--jobmanager", cluster.jobmanager)
        shown.append(cluster.site.penstock(*options, "--json").json["repeated_output"])
        text = cluster.site.penstock(*options).stdout
        for one in shown[-1]:
            assert one["message"] in text
            assert all(name in text for name in one["files"][:1])
    assert shown[0] == shown[1]
    return shown[0]


@pytest.mark.parametrize("damage", [b"junk", None])
def test_the_files_are_named_after_the_newest_checkpoints_are_damaged(
    cluster: DaemonCluster, tmp_path: Path, damage: bytes | None
) -> None:
    out = tmp_path / "out"
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "1h",
        "execution.checkpointing.num-retained": 3,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 10,
        "restart-strategy.fixed-delay.delay": "10ms",
    }

    def has_read(handle: ps.JobHandle, more: int) -> None:
        before = handle.metrics()["totals"]["records_in"]
        await_details(
            handle,
            lambda metrics, state: (
                state == "RUNNING" and metrics["totals"]["records_in"] > before + more
            ),
        )

    with ps.Environment(cluster.jobmanager, parallelism=2, config=config) as env:
        env.generate(numbers, rate=2_000).write_csv(str(out))
        handle = env.submit("twice")
        has_read(handle, 200)
        first = handle.checkpoint()
        has_read(handle, 200)
        handle.checkpoint()
        has_read(handle, 200)
        newest = handle.checkpoint()
        store = LocalStore(tmp_path / "checkpoints" / handle.job_id)
        head = HeadStore(store).read()
        assert head is not None
        assert [one.checkpoint_id for one in head.retained] == [first, first + 1, newest]
        files = [Path(name) for retained in head.retained for name in retained.files]
        wait_in_directory(out, lambda: all(map(Path.exists, files)) or None, "committed files")
        for retained in head.retained[1:]:
            if damage is None:
                store.delete(retained.manifest_path)
            else:
                store.put(retained.manifest_path, [damage])
        by_first = set(head.retained[0].files)
        kill_jobmanager(cluster)
        cluster.wait_for_log("jobmanager", "checkpoint.output_repeated", job_id=handle.job_id)
        await_details(handle, lambda _, state: state == "RUNNING")
        [repeated] = said(cluster, handle.job_id)
        assert (repeated["from_checkpoint_id"], repeated["to_checkpoint_id"]) == (first, newest)
        assert repeated["places"] == []
        there = {str(path) for path in out.rglob("part-*")}
        assert there - by_first == set(repeated["files"]), "the first copies, and nothing else"
        assert len(repeated["files"]) == repeated["file_count"] >= 2
        assert metric(cluster, handle.job_id) == 1
        # HEAD names the damaged ones no longer: what was said is known all the same.
        has_read(handle, 200)
        handle.checkpoint()
        kill_jobmanager(cluster)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert said(cluster, handle.job_id) == [repeated]
        assert metric(cluster, handle.job_id) == 1
        handle.cancel()
