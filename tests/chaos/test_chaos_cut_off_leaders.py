"""Aim: who is cut off from ZooKeeper only neither stops jobs nor leads beside another; nothing is lost, doubled or restarted.

Method: two JobManagers and a TaskManager on hosts that are network namespaces, whose packets are dropped; ZooKeeper runs
at an address that nobody else has, so that it alone can be cut off. Needs root; skipped where the machine forbids namespaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.local.local_cluster import Daemon, LocalCluster
from tests.support.elected_cluster import LEADS, RATE, await_written, submitted, written
from tests.support.hosts import Hosts
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline, Site, site, wait_ended
from tests.support.zookeeper import ensemble, quorum

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(240)]

PORT, SESSION_S, OUTAGE_S = 6123, 2.0, 30.0
TOKEN = "0123456789abcdef" * 4
TASKMANAGER = 2
"""Its host; those before it have a JobManager each."""


class CutOffCluster:
    """JobManager ``n + 1`` on host n, and a TaskManager behind them."""

    def __init__(self, place: Site, hosts: Hosts, zookeeper: str) -> None:
        self.hosts = hosts
        self.addresses = ",".join(f"{hosts.address(host)}:{PORT}" for host in (0, 1))
        self.storage = place.directory / "shared"
        self._local = LocalCluster(place.directory / "cluster")
        self._site = place
        self._options = {
            "high-availability.type": "zookeeper",
            "high-availability.zookeeper.quorum": zookeeper,
            "high-availability.zookeeper.client.session-timeout": f"{SESSION_S:g}s",
            "high-availability.storageDir": str(self.storage),
            "execution.checkpointing.dir": str(place.directory / "checkpoints"),
            "execution.checkpointing.interval": "200ms",
            "heartbeat.interval": "200ms",
            "heartbeat.timeout": "3s",
            "security.token-file": str(place.directory / "token"),
        }

    def start(self) -> None:
        """Starts what is not there; returns when one leads, one stands by, and the TaskManager has registered."""
        running = {(one.role, one.id) for one in self._local.daemons() if one.alive}
        for host in (0, 1):
            if ("jobmanager", str(host + 1)) not in running:
                own = self.hosts.address(host)
                self._start(
                    host,
                    "jobmanager",
                    f"jobmanager.id={host + 1}",
                    f"jobmanager.rpc.address={own}",
                    f"jobmanager.bind-host={own}",
                    f"jobmanager.rpc.port={PORT}",
                )
        if ("taskmanager", "tm") not in running:
            own = self.hosts.address(TASKMANAGER)
            self._start(
                TASKMANAGER,
                "taskmanager",
                "taskmanager.id=tm",
                f"taskmanager.host={own}",
                f"taskmanager.bind-host={own}",
                "taskmanager.numberOfTaskSlots=2",
            )
        self.roles()
        deadline = Deadline("the TaskManager", 90)
        while True:
            with contextlib.suppress(ps.StreamError), self.client() as client:
                if client.cluster().taskmanagers:
                    return
            deadline.left()
            time.sleep(0.1)

    def _start(self, host: int, role: str, *settings: str) -> None:
        given = [f"{key}={value}" for key, value in self._options.items()]
        options = [part for setting in (*given, *settings) for part in ("-D", setting)]
        own = ["--restart"] if role == "jobmanager" else ["--jobmanager", self.addresses]
        command = [sys.executable, "-P", "-m", role, "--dir", str(self._local.directory), *own]
        self._site.start(*self.hosts.command(host, *command, *options))

    def client(self) -> Client:
        """Calls to whoever leads."""
        return Client(self.addresses, token=TOKEN)

    def jobmanager(self, host: int) -> Daemon:
        """The one of a host."""
        return next(
            one
            for one in self._local.daemons()
            if (one.role, one.id) == ("jobmanager", str(host + 1))
        )

    def health(self, host: int) -> str:
        """What the JobManager of a host says of itself; "" = it does not."""
        with contextlib.suppress(OSError, URLError, StopIteration):
            address = self.jobmanager(host).metrics_address
            with urlopen(f"http://{address}/health", timeout=2) as answer:
                return str(answer.read().decode().strip())
        return ""

    def await_leader(self, host: int) -> None:
        """Waits until the JobManager of a host leads."""
        deadline = Deadline(f"JobManager {host + 1} to lead", 60)
        while self.health(host) != LEADS:
            deadline.left()
            time.sleep(0.05)

    def roles(self) -> tuple[int, int]:
        """The hosts of who leads, and of who stands by and knows it."""
        deadline = Deadline("a leader and a standby", 90)
        while True:
            deadline.left()
            told = [self.health(host) for host in (0, 1)]
            for host in (0, 1):
                if told[host] == LEADS and told[1 - host].startswith("standby;"):
                    return host, 1 - host
            time.sleep(0.1)

    def restarts(self, handle: ps.JobHandle) -> int:
        """Of a job."""
        with self.client() as client:
            return int(client.job(handle.job_id).summary.restarts)

    def end(self) -> None:
        """Stops all daemons."""
        for daemon in self._local.daemons():
            if daemon.alive:
                os.kill(daemon.pid, signal.SIGTERM)
                wait_ended(daemon.pid)
        self._site.wait_for_no_process()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(TASKMANAGER + 1).up() as made:
        yield made


@pytest.fixture(scope="module")
def shared(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutOffCluster]:
    directory = tmp_path_factory.mktemp("cut")
    (directory / "token").write_text(TOKEN)
    (directory / "token").chmod(0o600)
    for name in ("cluster", "shared", "checkpoints"):
        (directory / name).mkdir()
    with ensemble(directory, host=hosts.service) as servers, site(directory) as place:
        place.environment["PENSTOCK_TOKEN"] = TOKEN
        place.environment["NUMBA_CACHE_DIR"] = str(Path.home() / ".cache" / "penstock" / "kernels")
        cluster = CutOffCluster(place, hosts, quorum(servers))
        cluster.start()
        yield cluster
        cluster.end()


@pytest.fixture
def cluster(shared: CutOffCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[CutOffCluster]:
    """All of it runs; its network is whole again when the test has ended."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    shared.start()
    yield shared
    shared.hosts.heal()


def await_progress(out: Path) -> None:
    await_written(out, written(out) + RATE // 2)


def stopped(handle: ps.JobHandle, out: Path, place: Path) -> None:
    """Ends the job; every row is there once."""
    handle.stop(str(place))
    written(out)


def test_a_leader_without_zookeeper_goes_on_until_another_leads(
    cluster: CutOffCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.addresses, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        leader, standby = cluster.roles()
        process = cluster.jobmanager(leader).pid
        cluster.hosts.cut_from_service(leader)
        cluster.await_leader(standby)
        # LEADER is another's: it has ended, though ZooKeeper cannot tell it that its session is over.
        deadline = Deadline("the end of the former leader", DEADLINE_S)
        while cluster.health(leader) == LEADS:
            deadline.left()
            time.sleep(0.05)
        await_progress(out)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert cluster.restarts(handle) == 0
        assert cluster.health(leader) != LEADS, "who does not reach ZooKeeper leads nobody"
        cluster.hosts.heal()
        assert cluster.roles() == (standby, leader)
        assert cluster.jobmanager(leader).pid == process, "it has executed itself anew"
        assert cluster.restarts(handle) == 0
        stopped(handle, out, tmp_path / "savepoints")


def test_a_standby_without_zookeeper_does_not_lead(cluster: CutOffCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.addresses, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        leader, standby = cluster.roles()
        cluster.hosts.cut_from_service(standby)
        process = cluster.jobmanager(leader).pid
        await_progress(out)
        os.kill(process, signal.SIGKILL)
        wait_ended(process)
        until = time.monotonic() + 2 * SESSION_S
        while time.monotonic() < until:
            assert cluster.health(standby) != LEADS, "nobody has elected it"
            time.sleep(0.1)
        cluster.hosts.heal()
        cluster.await_leader(standby)
        await_progress(out)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert cluster.restarts(handle) == 0
        stopped(handle, out, tmp_path / "savepoints")


def test_a_taskmanager_that_sees_only_the_old_leader_is_adopted_when_it_sees_the_new_one(
    cluster: CutOffCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.addresses, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        leader, standby = cluster.roles()
        cluster.hosts.cut(TASKMANAGER, standby)
        await_progress(out)
        cluster.hosts.cut_from_service(leader)
        cluster.await_leader(standby)
        cluster.hosts.heal()
        await_progress(out)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert cluster.restarts(handle) == 0
        stopped(handle, out, tmp_path / "savepoints")


@contextlib.contextmanager
def hidden(path: Path, process: int) -> Iterator[None]:
    """For the time of the block one process of a host sees an empty directory there, as where nothing is mounted."""
    inside = ["nsenter", "--mount", "--target", str(process), "--"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", str(path)], check=True)


def test_a_taskmanager_without_tasks_leaves_a_leader_that_cannot_know_of_the_new_one(
    cluster: CutOffCluster,
) -> None:
    leader, standby = cluster.roles()
    process = cluster.jobmanager(leader).pid
    with hidden(cluster.storage, process):
        cluster.hosts.cut_from_service(leader)
        cluster.await_leader(standby)
        deadline = Deadline("the TaskManager to register with the new leader", DEADLINE_S)
        address = f"{cluster.hosts.address(standby)}:{PORT}"
        with Client(address, token=TOKEN) as client:
            while not client.cluster().taskmanagers:
                deadline.left()
                time.sleep(0.1)
        assert cluster.health(leader) == LEADS, "nobody has told it"
    deadline = Deadline("the end of the former leader", DEADLINE_S)
    while cluster.health(leader) == LEADS:
        deadline.left()
        time.sleep(0.1)


def test_half_a_minute_without_zookeeper_changes_nothing_and_the_end_of_the_session_is_heard(
    cluster: CutOffCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.addresses, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        leader, standby = cluster.roles()
        with cluster.client() as client:
            epoch = client.cluster().leader_epoch
        for host in (leader, standby):
            cluster.hosts.cut_from_service(host)
        until = time.monotonic() + OUTAGE_S
        while time.monotonic() < until:
            await_progress(out)
            assert cluster.health(leader) == LEADS
            assert cluster.health(standby) != LEADS
        with cluster.client() as client:
            assert client.cluster().leader_epoch == epoch
        assert cluster.restarts(handle) == 0
        # ZooKeeper has ended both sessions: the leader hears that now, ends, and one of them leads anew.
        cluster.hosts.heal()
        deadline = Deadline("the next leader", 60)
        while True:
            deadline.left()
            with contextlib.suppress(ps.StreamError), cluster.client() as client:
                if client.cluster().leader_epoch > epoch:
                    break
            time.sleep(0.1)
        cluster.roles()
        await_progress(out)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert cluster.restarts(handle) == 0
        stopped(handle, out, tmp_path / "savepoints")
