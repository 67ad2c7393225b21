"""One real cluster for all integration tests: a JobManager and two TaskManagers with four slots each.

Every wait has a deadline. What a failed test leaves running is cancelled, so that the next one finds
its slots free.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import TERMINAL_STATES, JobHandle
from penstock.local import local_cluster
from penstock.local.local_cluster import LocalCluster
from tests.support.forked_daemons import in_place_of_subprocess
from tests.support.jobs import DEADLINE_S
from tests.support.warm_command_line import start_daemon

TASKMANAGERS, SLOTS = 2, 4


class NewEnvironment(Protocol):
    """Makes environments on the cluster."""

    def __call__(
        self, parallelism: int = 2, config: Mapping[str, object] | None = None
    ) -> ps.Environment: ...


@pytest.fixture(scope="session", autouse=True)
def _daemons_are_forked() -> Iterator[None]:
    """Those that tests start in this process need not import what others have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_cluster, "subprocess", in_place_of_subprocess(start_daemon))
        yield


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The cluster."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    options = {"jobmanager.rpc.port": "0", "taskmanager.numberOfTaskSlots": str(SLOTS)}
    cluster.start(taskmanagers=TASKMANAGERS, overrides=options)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def address(cluster: LocalCluster) -> str:
    """Where its JobManager is."""
    return next(daemon.address for daemon in cluster.daemons() if daemon.role == "jobmanager")


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[Client]:
    """A connection to its JobManager."""
    with Client(address) as client:
        yield client


@pytest.fixture
def new_env(address: str, client: Client) -> Iterator[NewEnvironment]:
    """Environments; jobs that still run at the end of the test are cancelled."""
    with contextlib.ExitStack() as stack:

        def make(
            parallelism: int = 2, config: Mapping[str, object] | None = None
        ) -> ps.Environment:
            return stack.enter_context(
                ps.Environment(address, parallelism=parallelism, config=config)
            )

        yield make
        for summary in client.jobs():
            if summary.state not in TERMINAL_STATES:
                handle = JobHandle(client, summary.job_id)
                handle.cancel()
                with contextlib.suppress(ps.JobCanceled, ps.JobFailed):
                    handle.wait(DEADLINE_S)


@pytest.fixture
def env(new_env: NewEnvironment) -> ps.Environment:
    """An environment of parallelism 2."""
    return new_env()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data next to the checkout, or where PENSTOCK_TEST_DATA says."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    directory = Path(os.environ.get("PENSTOCK_TEST_DATA", beside))
    if not (directory / "flights-20k.json").exists():
        pytest.skip(f"no real data: {directory} has no flights-20k.json (PENSTOCK_TEST_DATA=DIR)")
    return directory
