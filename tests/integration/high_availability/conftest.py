"""A real ZooKeeper, and JobManagers and TaskManagers as processes: one of each for the modules that kill and replace them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.local_cluster import LocalCluster
from tests.support.elected_cluster import SESSION_S
from tests.support.fault_point_cluster import FaultPoints
from tests.support.jobs import cancel_all
from tests.support.zookeeper import ZookeeperServer, ensemble, quorum


@pytest.fixture(scope="package")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ZookeeperServer]]:
    with ensemble(tmp_path_factory.mktemp("zookeeper")) as servers:
        yield servers


@contextlib.contextmanager
def elected(
    root: Path, zookeeper: list[ZookeeperServer], cluster_id: str = "default"
) -> Iterator[LocalCluster]:
    """A cluster, not started yet, whose JobManagers are elected there."""
    cluster = LocalCluster(root / "cluster")
    cluster.configure(
        {
            "high-availability.type": "zookeeper",
            "high-availability.cluster-id": cluster_id,
            "high-availability.zookeeper.quorum": quorum(zookeeper),
            "high-availability.zookeeper.client.session-timeout": f"{SESSION_S:g}s",
            "jobmanager.rpc.port": 0,
            "heartbeat.interval": "200ms",
            "heartbeat.timeout": "6s",
            "execution.checkpointing.dir": str(root / "checkpoints"),
            "execution.checkpointing.interval": "200ms",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.delay": "100ms",
            "restart-strategy.fixed-delay.attempts": "100",
        }
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="package")
def made(
    zookeeper: list[ZookeeperServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with elected(tmp_path_factory.mktemp("takeovers"), zookeeper) as cluster:
        yield cluster


@pytest.fixture
def cluster(made: LocalCluster) -> Iterator[LocalCluster]:
    """All of it runs, whatever the test before has killed; a test that has failed leaves no job behind."""
    made.start(jobmanagers=2, taskmanagers=2, slots=2)
    yield made
    cancel_all(made.client())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points") / "points"


@pytest.fixture(scope="module")
def points_of_all(
    zookeeper: list[ZookeeperServer], tmp_path_factory: pytest.TempPathFactory, place: Path
) -> Iterator[FaultPoints]:
    """On a cluster of their own: its JobManagers are started to be killed there."""
    with elected(tmp_path_factory.mktemp("fault-points"), zookeeper, "fault-points") as cluster:
        yield FaultPoints(cluster, place)


@pytest.fixture
def points(points_of_all: FaultPoints) -> Iterator[FaultPoints]:
    points_of_all.start()
    yield points_of_all
    points_of_all.clear()
    points_of_all.start()
    cancel_all(points_of_all.cluster.client())
