"""Aim: whatever becomes of ZooKeeper's servers or of the way to them, one JobManager leads at most, and jobs go on.

Method: three real ZooKeepers, two JobManagers and two TaskManagers as processes. Servers are killed and stopped, the
session of a leader is ended behind its back, and a leader is stopped while another one is elected; what it does once it goes
on is read in its log, and in the rows that are counted into files.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.high_availability.conftest import elected
from tests.support.elected_cluster import (
    RATE,
    SESSION_S,
    await_roles,
    await_written,
    epoch_of,
    slots_of,
    stop,
    submitted,
    written,
)
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline
from tests.support.zookeeper import ZookeeperServer, ensemble, quorum

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ZookeeperServer]]:
    """Three instead of the one of the other modules."""
    with ensemble(tmp_path_factory.mktemp("ensemble"), 3) as servers:
        yield servers


@pytest.fixture(scope="module")
def made(
    zookeeper: list[ZookeeperServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with elected(tmp_path_factory.mktemp("elected"), zookeeper) as cluster:
        yield cluster


def leader_of(servers: list[ZookeeperServer]) -> ZookeeperServer:
    """Of the ensemble."""
    deadline = Deadline("a leader of the ensemble", DEADLINE_S)
    while True:
        for server in servers:
            if server.mode == "leader":
                return server
        deadline.left()
        time.sleep(0.05)


def password_of(session: int) -> bytes:
    """The password of a session, which a server computes from its number (java.util.Random's bytes)."""
    state = (session ^ 0xB3415C00 ^ 0x5DEECE66D) & ((1 << 48) - 1)
    password = b""
    for _ in range(4):
        state = (state * 0x5DEECE66D + 0xB) & ((1 << 48) - 1)
        password += (state >> 16).to_bytes(4, "little")
    return password


def end_session(servers: list[ZookeeperServer], address: str) -> None:
    """Takes the session of a JobManager over by its number and its password, and ends it."""
    observer = KazooClient(quorum(servers))
    observer.start()
    [cluster_id] = observer.get_children("/penstock")
    election = f"/penstock/{cluster_id}/election"
    owners = {}
    for node in observer.get_children(election):
        content, stat = observer.get(f"{election}/{node}")
        owners[content.decode()] = stat.ephemeralOwner
    observer.stop()
    observer.close()
    session = owners[address]
    twin = KazooClient(quorum(servers), client_id=(session, password_of(session)))
    twin.start()
    assert twin.client_id[0] == session, "it is the same session"
    twin.stop()
    twin.close()


def test_the_ensembles_leader_is_killed_and_the_same_jobmanager_leads(
    cluster: LocalCluster, zookeeper: list[ZookeeperServer], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        leader, _ = await_roles(cluster)
        epoch, slots = epoch_of(cluster), slots_of(cluster, handle.job_id)
        log = cluster.directory / "logs" / f"jobmanager-{leader.id}.log"
        told = log.read_text()
        first = leader_of(zookeeper)
        first.kill()
        second = leader_of([server for server in zookeeper if server is not first])
        assert second is not first
        await_written(out, written(out) + int(SESSION_S * RATE))
        first.start()
        first.await_serving()
        leads, _ = await_roles(cluster)
        # On a slow machine it may come to the next one too late for its session.
        is_over = "leadership.over" in log.read_text()[len(told) :]
        assert (leads.pid, epoch_of(cluster)) == (leader.pid, epoch) or is_over
        assert slots_of(cluster, handle.job_id) == slots != {}
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
        handle.cancel()


def test_a_session_that_another_takes_over_and_ends_makes_the_standby_lead(
    cluster: LocalCluster, zookeeper: list[ZookeeperServer], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        old, standby = await_roles(cluster)
        epoch = epoch_of(cluster)
        end_session(zookeeper, old.address)
        deadline = Deadline("the end of the old leader's time", DEADLINE_S)
        while True:
            leader, again = await_roles(cluster)
            if leader.pid == standby.pid:
                break
            deadline.left()
        assert again.pid == old.pid, "it has executed itself anew"
        assert epoch_of(cluster) == epoch + 1
        log = (cluster.directory / "logs" / f"jobmanager-{old.id}.log").read_text()
        # By the word of ZooKeeper, or of a swap that was refused before that came.
        assert "leadership.over" in log
        stop(handle, tmp_path)
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
        assert written(out) > RATE


def test_servers_that_come_and_go_restart_no_job(
    cluster: LocalCluster, zookeeper: list[ZookeeperServer], tmp_path: Path
) -> None:
    """Whoever leads: where the quorum is away for longer than sessions live, that may change."""
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        slots, epochs = slots_of(cluster, handle.job_id), [epoch_of(cluster)]
        stopped: list[ZookeeperServer] = []
        try:
            for seconds, count in ((0.2, 1), (0.5, 2), (1.5 * SESSION_S, 2), (0.2, 3), (0.2, 1)):
                stopped = [leader_of(zookeeper)]
                stopped += [server for server in zookeeper if server not in stopped][: count - 1]
                for server in stopped:
                    server.signal(signal.SIGSTOP)
                await_written(out, written(out) + int(seconds * RATE))
                for server in stopped:
                    server.signal(signal.SIGCONT)
                stopped = []
                await_roles(cluster)
                if count > 1:  # whose session is over hears of it as the quorum is back, and ends
                    await_written(out, written(out) + int(SESSION_S * RATE))
                    await_roles(cluster)
                epochs.append(epoch_of(cluster))
        finally:
            for server in stopped:
                server.signal(signal.SIGCONT)
        assert epochs == sorted(epochs)
        await_written(out, written(out) + RATE)
        assert slots_of(cluster, handle.job_id) == slots != {}
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
        handle.cancel()
        written(out)
