"""Aim: what is complete of blocking exchanges on S3 needs no TaskManager, hiccups of the server cost nothing, a server
that is gone is told, and nothing stays behind.

Method: a batch job of two stages on real daemons, its output compared with what plain Python makes of the input; between
them and a real server a proxy that fails requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.storage.object_store import ObjectStore
from penstock.storage.s3.s3_store import S3Store
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.examples import RUNS_ALL
from tests.support.processes import DEADLINE_S, DaemonCluster, Deadline, site
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.s3_proxy import Fault, Request, S3Proxy
from tests.support.shared_persisted import rows_outlive_whoever_made_them
from tests.support.staged_job import StagedJob, kill_taskmanager
from tests.support.watched_job import placed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def proxy(s3_server: RadosGateway) -> Iterator[S3Proxy]:
    """That of the cluster, which all tests here share."""
    with S3Proxy(s3_server.port).running() as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{tmp_path_factory.mktemp('shared').name}/spill"


@pytest.fixture(scope="module")
def arguments(proxy: S3Proxy, shared: str) -> list[str]:
    """Of the daemons."""
    options = {
        **s3_options(proxy.endpoint),
        "s3.retry.timeout": "3s",
        "taskmanager.spill.shared-dir": f"s3://{BUCKET}/{shared}",
        "heartbeat.interval": "100ms",
        "heartbeat.timeout": "5s",
    }
    return [part for key, value in options.items() for part in ("-D", f"{key}={value}")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    with site(tmp_path_factory.mktemp("site")) as place:
        cluster = DaemonCluster(place)
        yield cluster
        cluster.stop()
        place.assert_nothing_left()


@pytest.fixture
def spilling(made: DaemonCluster, arguments: list[str], proxy: S3Proxy) -> Iterator[DaemonCluster]:
    """All of it runs, whatever the test before has killed, and the server is well."""
    made.start(*arguments, taskmanagers=2, slots=2)
    yield made
    proxy.faults = []


def of_rows(method: str) -> Callable[[Request], bool]:
    """Requests for spilled rows and indices, not for probes."""
    return lambda request: request.kind == method and "/part=" in request.path.replace("%3D", "=")


def paths(store: ObjectStore) -> list[str]:
    return [found.path for found in store.list("")]


def await_empty(store: ObjectStore) -> None:
    """Removal begins when the job has ended."""
    deadline = Deadline("that all of the job is removed")
    while paths(store):
        deadline.left()


def test_a_lost_taskmanager_and_hiccups_repeat_nothing_of_a_complete_stage(
    spilling: DaemonCluster, proxy: S3Proxy, s3_server: RadosGateway, tmp_path: Path, shared: str
) -> None:
    store = S3Store(BUCKET, shared, settings_of(s3_server.endpoint))
    proxy.faults = [
        Fault(of_rows("PUT"), 3, status=503, code="SlowDown"),
        Fault(of_rows("PUT"), 2, forwards=True),
        Fault(of_rows("GET"), 2, status=500),
        Fault(of_rows("GET"), 2),
    ]
    staged = StagedJob(tmp_path)
    with Client(spilling.jobmanager) as client, staged.submit(spilling, client) as job:
        before = staged.await_second_stage(job)
        assert len([path for path in paths(store) if path.endswith("/index")]) == 2
        assert client.partitions() == [], "no TaskManager holds anything"
        kill_taskmanager(spilling, before["v0", 0].taskmanager_id)
        job.await_that(lambda details: details.summary.restarts, "that something begins again")
        staged.gate.touch()
        job.finish()
        after = placed(job.handle.details())
        assert [fault.times for fault in proxy.faults] == [0] * 4
        assert {one.attempt for key, one in after.items() if key[0] == "v0"} == {0}
        await_empty(store)
    staged.check()


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
def test_what_outlives_its_job_outlives_whoever_made_it(
    spilling: DaemonCluster, arguments: list[str], s3_server: RadosGateway, shared: str
) -> None:
    store = S3Store(BUCKET, shared, settings_of(s3_server.endpoint))
    rows_outlive_whoever_made_them(spilling, arguments, lambda: paths(store))


def test_a_server_that_is_gone_is_told_and_waited_for_so_long(
    spilling: DaemonCluster, proxy: S3Proxy, tmp_path: Path, shared: str
) -> None:
    staged = StagedJob(tmp_path)
    never = {"restart-strategy.type": "none"}
    proxy.faults = [Fault(of_rows("PUT"), 10**6, status=503, code="SlowDown")]
    with Client(spilling.jobmanager) as client:
        with (
            staged.submit(spilling, client, config=never) as job,
            pytest.raises(
                ps.JobFailed, match=rf"cannot be written to s3://{BUCKET}/{shared}.*Slow"
            ),
        ):
            job.handle.wait(DEADLINE_S)
        proxy.faults = [Fault(lambda _: True, 10**6, status=503, code="SlowDown")]
        refused = StagedJob(tmp_path, "refused")
        with pytest.raises(ps.JobRejected, match="its blocking exchanges cannot be kept in s3://"):
            refused.submit(spilling, client)
        proxy.faults = []
        again = StagedJob(tmp_path, "again")
        again.gate.touch()
        with again.submit(spilling, client) as job:
            job.finish()
        again.check()
