"""Aim: who stands by leads at once when the leader ends, whether it could say so or not.

Method: a real ZooKeeper and two JobManagers as processes. The session is so long that nobody gets to lead by its end: of
a leader that was killed the standby has to find out by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli.context import jobmanager_addresses
from penstock.client.addresses import parse_address
from penstock.client.client import Client
from penstock.local.local_cluster import Daemon, LocalCluster
from tests.support.elected_cluster import (
    LEADS,
    await_roles,
    epoch_of,
    health,
    token_of,
    told_health,
)
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline, wait_ended
from tests.support.span_collector import Received, SpanCollector, span_collector
from tests.support.zookeeper import ZookeeperServer, quorum

pytestmark = pytest.mark.integration

LONG_SESSION_S = 60
"""Within half of it a session that was alive cannot end."""


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as made:
        yield made


@pytest.fixture(scope="module")
def pair(
    zookeeper: list[ZookeeperServer],
    tmp_path_factory: pytest.TempPathFactory,
    collector: SpanCollector,
) -> Iterator[LocalCluster]:
    root: Path = tmp_path_factory.mktemp("pair")
    cluster = LocalCluster(root / "cluster")
    cluster.configure(
        {
            "high-availability.type": "zookeeper",
            "high-availability.cluster-id": "pair",
            "high-availability.zookeeper.quorum": quorum(zookeeper),
            "high-availability.zookeeper.client.session-timeout": f"{LONG_SESSION_S}s",
            "jobmanager.rpc.port": 0,
            "traces.reporter.type": "otel",
            "traces.reporter.otel.exporter.endpoint": collector.address,
        }
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize("told", [signal.SIGKILL, signal.SIGTERM], ids=lambda told: told.name)
def test_the_standby_leads_at_once(
    pair: LocalCluster, collector: SpanCollector, told: signal.Signals
) -> None:
    pair.start(jobmanagers=2, taskmanagers=0)
    leader, standby = await_roles(pair)
    epoch = epoch_of(pair)
    # Who knows the standby alone is never refused, neither at its port nor where its health is told.
    with knocking(standby) as healths, Client(standby.address, token_of(pair)) as client:
        await_told(healths, f"standby; {leader.address} leads")
        killed = time.monotonic()
        os.kill(leader.pid, told)
        wait_ended(leader.pid)
        assert client.cluster().leader_epoch == epoch + 1
        assert time.monotonic() - killed < LONG_SESSION_S / 2
        await_told(healths, LEADS)
    election = collector.await_span("election", lambda span: epoch_in(span) == epoch + 1)
    assert election.attributes["penstock.previous_leader"] == leader.address
    assert election.attributes["penstock.leader"] == standby.address
    parts = sorted(collector.parts_of(election).values(), key=lambda part: part.start_ms)
    names = [part.name for part in parts]
    assert names[-2:] == ["claim", "recover"]
    if told == signal.SIGKILL:  # one that hands over need not have been missed
        assert names[0] == "elect"
    assert parts[0].start_ms == election.start_ms
    assert parts[-1].end_ms == election.end_ms


def test_who_begins_to_lead_is_known_all_the_time(pair: LocalCluster) -> None:
    """Whoever starts daemons would start it a second time, which its directory does not allow."""
    pair.start(jobmanagers=2, taskmanagers=0)
    leader, standby = await_roles(pair)
    os.kill(leader.pid, signal.SIGKILL)
    wait_ended(leader.pid)
    deadline = Deadline("the next leader", DEADLINE_S)
    while health(standby_of(pair, standby.id)) != LEADS:
        deadline.left()
    pair.start(jobmanagers=2, taskmanagers=0)
    assert standby_of(pair, standby.id).pid == standby.pid


def test_the_command_line_knows_all_of_them_dead_or_alive(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_DIR", str(pair.directory))
    pair.start(jobmanagers=2, taskmanagers=0)
    leader, standby = await_roles(pair)
    for told in (signal.SIGKILL, signal.SIGTERM):
        os.kill(leader.pid, told)
        wait_ended(leader.pid)
        assert jobmanager_addresses(None) == f"{standby.address},{leader.address}"
        assert pair.status()["leader"] == standby.address
        pair.start(jobmanagers=2, taskmanagers=0)
        leader, standby = await_roles(pair)


def epoch_in(span: Received) -> int:
    return int(span.attributes["penstock.leader_epoch"])


@contextmanager
def knocking(daemon: Daemon) -> Iterator[set[str]]:
    """Connects to both ports of a daemon again and again, which must not refuse once; yields what its health says."""
    healths: set[str] = set()
    failures: list[Exception] = []
    is_over = threading.Event()

    def knock() -> None:
        while not is_over.is_set() and not failures:
            try:
                socket.create_connection(parse_address(daemon.address), timeout=DEADLINE_S).close()
                healths.add(told_health(daemon))
            except OSError as error:
                failures.append(error)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield healths
    finally:
        is_over.set()
        thread.join()
        assert not failures


def await_told(healths: set[str], health: str) -> None:
    deadline = Deadline(health, DEADLINE_S)
    while health not in healths:
        deadline.left()
        time.sleep(0.01)


def standby_of(pair: LocalCluster, id: str) -> Daemon:
    """A JobManager that lives, and is therefore told of."""
    [found] = [one for one in pair.daemons() if one.role == "jobmanager" and one.id == id]
    assert found.alive
    return found
