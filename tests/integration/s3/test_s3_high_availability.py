"""Aim: JobManagers that keep what they know in a bucket hand jobs over as those that share a directory do.

Method: a real ZooKeeper and a real S3 server, two JobManagers and two TaskManagers as processes, with no directory that
they share; a leader is killed, the server is away for a while, all JobManagers are killed and ZooKeeper is emptied.
Requests are counted by a proxy between the daemons and the server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from kazoo.client import KazooClient

import penstock as ps
from jobmanager.stores.stored_job import decode_record
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2
from penstock.storage.s3.s3_store import S3Store
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.elected_cluster import (
    RATE,
    SESSION_S,
    await_roles,
    await_written,
    epoch_of,
    jobmanagers,
    slots_of,
    submitted,
    written,
)
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline, wait_ended
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.s3_proxy import S3Proxy
from tests.support.zookeeper import ZookeeperServer, ensemble, quorum

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(2)]


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[list[ZookeeperServer]]:
    with ensemble(tmp_path / "zookeeper") as servers:
        yield servers


@pytest.fixture
def elected(
    zookeeper: list[ZookeeperServer], proxy: S3Proxy, tmp_path: Path
) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path / "cluster")
    cluster.configure(
        {
            **s3_options(proxy.endpoint),
            "high-availability.type": "zookeeper",
            "high-availability.zookeeper.quorum": quorum(zookeeper),
            "high-availability.zookeeper.client.session-timeout": f"{SESSION_S:g}s",
            "high-availability.storageDir": f"s3://{BUCKET}/{tmp_path.name}/kept",
            "jobmanager.rpc.port": 0,
            "heartbeat.interval": "200ms",
            "heartbeat.timeout": "6s",
            "execution.checkpointing.dir": f"s3://{BUCKET}/{tmp_path.name}/checkpoints",
            "execution.checkpointing.interval": "500ms",
            "s3.retry.timeout": "3s",
        }
    )
    try:
        cluster.start(jobmanagers=2, taskmanagers=2, slots=2)
        yield cluster
    finally:
        cluster.stop()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)


def listed(proxy: S3Proxy, prefix: str) -> list[str]:
    """What was listed of the objects below a prefix."""
    asked = [parse_qs(urlsplit(one.path).query) for one in proxy.requests if one.kind == "LIST"]
    return [found for query in asked for found in query.get("prefix", []) if prefix in found]


def test_what_jobmanagers_keep_is_in_a_bucket(
    elected: LocalCluster,
    zookeeper: list[ZookeeperServer],
    proxy: S3Proxy,
    s3_server: RadosGateway,
    tmp_path: Path,
) -> None:
    kept = f"{tmp_path.name}/kept/default"
    store = S3Store(BUCKET, kept, settings_of(s3_server.endpoint))
    out = tmp_path / "out"
    with ps.Environment(elected.address, parallelism=2) as env:
        ended = submitted(env, tmp_path / "ended", rows=RATE)
        ended.wait(DEADLINE_S)
        handle = submitted(env, out)
        await_written(out, RATE)
        before = slots_of(elected, handle.job_id)
        assert not (elected.directory / "shared").exists()
        assert set(store.first_parts()) >= {"LEADER", "jobs"}
        record = decode_record(store.get(f"jobs/{handle.job_id}/record"), "record")

        # A leader dies.
        leader, standby = await_roles(elected)
        proxy.forget()
        kill(leader.pid)
        await_written(out, written(out) + RATE)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert slots_of(elected, handle.job_id) == before != {}
        with elected.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
            assert client.job(ended.job_id).summary.state == client_pb2.JOB_STATE_FINISHED
        assert listed(proxy, kept) == [f"{kept}/jobs/"], "one listing, of the names of jobs"
        taken_over = decode_record(store.get(f"jobs/{handle.job_id}/record"), "record")
        assert taken_over.leader_epoch > record.leader_epoch

        # The server is away: the leader says so, goes on, and deletes nothing.
        paths = {one.path for one in store.list("")}
        epoch, rows = epoch_of(elected), written(out)
        s3_server.kill()
        log = elected.directory / "logs" / f"jobmanager-{standby.id}.log"
        deadline = Deadline("the leader misses its storage", DEADLINE_S)
        while "leader.unreadable" not in log.read_text():
            deadline.left()
        s3_server.start_gateway()
        await_written(out, rows + RATE)
        assert epoch_of(elected) == epoch
        assert {one.path for one in store.list("")} >= paths
        with elected.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0

        # No JobManager, and nothing in ZooKeeper: all of it is in the bucket.
        for daemon in jobmanagers(elected).values():
            if daemon.alive:
                kill(daemon.pid)
        emptied = KazooClient(quorum(zookeeper))
        emptied.start()
        emptied.delete("/penstock", recursive=True)
        emptied.stop()
        emptied.close()
        rows = written(out)
        elected.start(jobmanagers=2, taskmanagers=2)
        await_written(out, rows + RATE)
        assert epoch_of(elected) > epoch
        with elected.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
            states = {job.job_id: job.state for job in client.jobs()}
            assert states[ended.job_id] == client_pb2.JOB_STATE_FINISHED
        # Code that has been uploaded is there as well: what begins again gets it.
        for daemon in elected.daemons():
            if daemon.role == "taskmanager":
                kill(daemon.pid)
        elected.start(jobmanagers=2, taskmanagers=2)
        await_written(out, written(out) + RATE)
        handle.cancel()
