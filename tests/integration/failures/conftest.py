"""One small cluster for all failures that leave the daemons alive, and a site per test for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.client.client import Client
from tests.support.job_records import JobRecords
from tests.support.processes import Beacon, DaemonCluster, Site, is_alive, site


@pytest.fixture(scope="package")
def failure_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Where the cluster of this directory lives; at its end nothing may be left."""
    with site(tmp_path_factory.mktemp("failures")) as place:
        yield place
        place.assert_nothing_left()


@pytest.fixture(scope="package")
def failure_cluster(failure_site: Site) -> Iterator[DaemonCluster]:
    """Two TaskManagers with two slots each; whatever a job does, they stay."""
    cluster = DaemonCluster(failure_site)
    cluster.start(taskmanagers=2, slots=2, without_privileges=True)
    pids = [daemon["pid"] for daemon in cluster.daemons()]
    yield cluster
    assert [daemon["pid"] for daemon in cluster.daemons()] == pids, "a job has ended a daemon"
    cluster.stop()
    cluster.assert_nothing_left()
    assert JobRecords(cluster.directory).are_clean


@pytest.fixture
def environment(failure_cluster: DaemonCluster) -> Iterator[Callable[..., ps.Environment]]:
    """Makes environments on the cluster; afterwards no slot process may live."""
    made: list[ps.Environment] = []

    def make(**options: Any) -> ps.Environment:
        made.append(ps.Environment(failure_cluster.jobmanager, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()
    failure_cluster.assert_slots_ended()


@pytest.fixture
def assert_slots_are_free(environment: Callable[..., ps.Environment]) -> Callable[[], None]:
    """Runs a job that gets its slots only when all of the cluster are free."""

    def run() -> None:
        env = environment(parallelism=4, config={"slot.request.timeout": "10s"})
        env.from_arrow(pa.table({"a": range(8)})).discard()
        env.execute("needs-all-slots")

    return run


@pytest.fixture
def client(failure_cluster: DaemonCluster) -> Iterator[Client]:
    """A client of the cluster."""
    with Client(failure_cluster.jobmanager) as connection:
        yield connection


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """A place for processes that a test kills."""
    with site(tmp_path) as place:
        yield place


@pytest.fixture
def beacon(tmp_path: Path) -> Iterator[Beacon]:
    """Tells the test that user code has come somewhere."""
    made = Beacon(tmp_path / "beacon")
    yield made
    made.close()


@pytest.fixture
def cluster(shared: DaemonCluster) -> DaemonCluster:
    """The ``shared`` one of a module, two TaskManagers, with what the last test has ended started again."""
    if len([daemon for daemon in shared.daemons() if is_alive(daemon["pid"])]) < 3:
        shared.start(taskmanagers=2)
    return shared
