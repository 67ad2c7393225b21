"""Aim: a host that nobody reaches any more costs what ran there and no row, also when it comes back; two hosts that
do not reach each other for a moment cost nothing.

Method: a JobManager and three TaskManagers on hosts that are network namespaces, whose packets are dropped.
Needs root; skipped where the machine forbids namespaces.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from penstock.client.client import Client
from tests.support.hosts import Hosts
from tests.support.numbered_job import NumberedJob
from tests.support.processes import DaemonCluster, Site, site, wait_ended, wait_in_directory
from tests.support.watched_job import WatchedJob, placed, submitted

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(240)]

PORT = 6123
TOKEN = "0123456789abcdef" * 4
TASKMANAGERS = 3
CACHING = {"execution.exchange.default": "caching"}


class HostCluster(DaemonCluster):
    """A cluster whose JobManager is on host 0, and TaskManager ``tm-n`` on host n."""

    def __init__(self, place: Site, hosts: Hosts, token: Path) -> None:
        super().__init__(place)
        self._hosts = hosts
        self._token = token
        self.directory.mkdir()
        (self.directory / "checkpoints").mkdir()

    def begin(self) -> None:
        """Starts all daemons; returns when they serve."""
        address = self._hosts.address(0)
        self._daemon(0, "jobmanager", f"jobmanager.bind-host={address}")
        for host in range(1, TASKMANAGERS + 1):
            own = self._hosts.address(host)
            self._daemon(
                host,
                "taskmanager",
                f"taskmanager.id=tm-{host}",
                f"taskmanager.host={own}",
                f"taskmanager.bind-host={own}",
                "taskmanager.numberOfTaskSlots=1",
                "taskmanager.network.local-sockets=false",
            )
        self.jobmanager = f"{address}:{PORT}"
        run = self.directory / "run"
        run.mkdir(exist_ok=True)
        wait_in_directory(
            run, lambda: len(list(run.glob("*.json"))) > TASKMANAGERS, "all daemons", 90
        )
        for host in range(1, TASKMANAGERS + 1):
            self.wait_for_log("jobmanager", "taskmanager.registered", taskmanager_id=f"tm-{host}")

    def _daemon(self, host: int, role: str, *settings: str) -> None:
        common = (
            f"jobmanager.rpc.address={self._hosts.address(0)}",
            f"jobmanager.rpc.port={PORT}",
            f"security.token-file={self._token}",
            f"execution.checkpointing.dir={self.directory / 'checkpoints'}",
            "heartbeat.interval=200ms",
            "heartbeat.timeout=3s",
        )
        options = [part for setting in (*common, *settings) for part in ("-D", setting)]
        python = [sys.executable]
        command = [*python, "-P", "-m", role, "--dir", str(self.directory), *options]
        self.site.start(*self._hosts.command(host, *command))

    def end(self) -> None:
        """Stops all daemons; nothing is left of them."""
        for daemon in self.daemons():
            os.kill(daemon["pid"], signal.SIGTERM)
            wait_ended(daemon["pid"])
        self.site.wait_for_no_process()
        self.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(1 + TASKMANAGERS).up() as made:
        yield made


@pytest.fixture(scope="module")
def shared(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    directory = tmp_path_factory.mktemp("hosts")
    token = directory / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with site(directory) as place:
        place.environment["PENSTOCK_TOKEN"] = TOKEN
        place.environment["NUMBA_CACHE_DIR"] = str(Path.home() / ".cache" / "penstock" / "kernels")
        cluster = HostCluster(place, hosts, token)
        cluster.begin()
        yield cluster
        cluster.end()


@pytest.fixture
def cluster(
    hosts: Hosts, shared: HostCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HostCluster]:
    """The cluster; its network is whole again when the test has ended."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    yield shared
    hosts.heal()


def host_of(job: WatchedJob, subtask: tuple[str, int]) -> int:
    return int(job.placed()[subtask].taskmanager_id.removeprefix("tm-"))


@pytest.mark.parametrize("exchange", ["pipelined", "caching"])
def test_a_host_is_isolated_and_comes_back(
    hosts: Hosts, cluster: HostCluster, tmp_path: Path, exchange: str
) -> None:
    numbered = NumberedJob(16_000, 2_000, tmp_path / "out")
    with Client(cluster.jobmanager, token=TOKEN) as client:
        config = {"execution.exchange.default": exchange}
        job = submitted(cluster, client, numbered.build, parallelism=2, config=config)
        job.await_running()
        job.await_checkpoints()
        host = host_of(job, ("v1", 0))
        before = job.placed()
        since = SystemClock().now_ms() / 1000
        hosts.isolate(host)
        job.await_that(
            lambda details: all(
                one.taskmanager_id != f"tm-{host}" and one.state == "RUNNING"
                for one in placed(details).values()
            )
        )
        job.await_checkpoints()
        # What still runs there works on, and must not be able to commit anything.
        hosts.heal()
        cluster.wait_for_log("taskmanager", "slots.dropped", since=since)
        job.finish()
        numbered.check()
        (entry,) = job.handle.exceptions()
        assert entry.root_cause.error_class == "TaskManagerLost"
        assert f"tm-{host}" in job.told()
        if exchange == "caching":
            again = {s for s, one in job.placed().items() if one.attempt != before[s].attempt}
            assert again == {s for s, one in before.items() if one.taskmanager_id == f"tm-{host}"}


def test_two_hosts_do_not_reach_each_other_for_a_moment(
    hosts: Hosts, cluster: HostCluster, tmp_path: Path
) -> None:
    numbered = NumberedJob(16_000, 2_000, tmp_path / "out")
    with Client(cluster.jobmanager, token=TOKEN) as client:
        job = submitted(cluster, client, numbered.build, parallelism=2, config=CACHING)
        job.await_running()
        job.await_checkpoints()
        hosts.cut(host_of(job, ("v1", 0)), host_of(job, ("v1", 1)))
        job.await_stuck(2_000)
        hosts.heal()
        job.finish(90)
        numbered.check()
        assert job.handle.exceptions() == []


def test_two_hosts_do_not_reach_each_other_until_their_connections_break(
    hosts: Hosts, cluster: HostCluster, tmp_path: Path
) -> None:
    numbered = NumberedJob(16_000, 2_000, tmp_path / "out")
    with Client(cluster.jobmanager, token=TOKEN) as client:
        job = submitted(cluster, client, numbered.build, parallelism=2, config=CACHING)
        job.await_running()
        job.await_checkpoints()
        since = SystemClock().now_ms() / 1000
        hosts.cut(host_of(job, ("v1", 0)), host_of(job, ("v1", 1)))
        # The kernel gives a connection up whose packets nobody acknowledges for half a minute.
        cluster.wait_for_log("jobmanager", "taskmanager.doubted", 60, since=since)
        hosts.heal()
        job.finish(90)
        numbered.check()


def test_the_jobmanager_is_isolated_and_comes_back(
    hosts: Hosts, cluster: HostCluster, tmp_path: Path
) -> None:
    numbered = NumberedJob(16_000, 2_000, tmp_path / "out")
    with Client(cluster.jobmanager, token=TOKEN) as client:
        job = submitted(cluster, client, numbered.build, parallelism=2, config=CACHING)
        job.await_running()
        job.await_checkpoints()
    since = SystemClock().now_ms() / 1000
    hosts.isolate(0)
    cluster.wait_for_log("taskmanager", "jobmanager.silent", since=since)
    hosts.heal()
    with Client(cluster.jobmanager, token=TOKEN) as client:
        job = WatchedJob(cluster, client, job.job_id)
        job.finish(90)
        numbered.check()
