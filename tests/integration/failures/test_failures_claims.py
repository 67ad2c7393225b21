"""Aim: a JobManager that is killed when it has claimed what a job is to start from, and has not stored the job yet, leaves
no claim behind: what was claimed is its original's again, and another job may claim it.

Method: the JobManager dies at a fault point (``tests/support/fault_points``), and the client that waits for its answer with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from penstock.storage.kept_state import list_savepoints
from tests.integration.test_start_again import SLOW, build, config
from tests.support.examples import RUNS_ALL
from tests.support.fault_point_cluster import FaultPoints
from tests.support.jobs import await_details, cancel, started_from

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not RUNS_ALL, reason="starts and kills daemons; PENSTOCK_TESTS=all"),
]

SUBMIT = f"""
import sys
from pathlib import Path
import penstock as ps
from tests.integration.test_start_again import build
address, out, path = sys.argv[1:]
with ps.Environment(address, parallelism=2) as env:
    build(env, Path(out), {SLOW})
    env.submit("killed", from_savepoint=path, claim=True)
"""


@pytest.fixture
def points(tmp_path: Path) -> Iterator[FaultPoints]:
    cluster = LocalCluster(tmp_path / "cluster")
    cluster.configure(config(tmp_path, **{"jobmanager.rpc.port": 0}))
    found = FaultPoints(cluster, tmp_path / "points", jobmanagers=1)
    found.start()
    yield found
    cluster.stop()


def submit_and_kill(points: FaultPoints, out: Path, path: str) -> None:
    """Kills the JobManager before it stores the job."""
    points.arm("before_save")
    command = [sys.executable, "-c", SUBMIT, points.cluster.address, str(out), path]
    client = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        points.await_death("before_save")
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_what_was_claimed_is_free_again(points: FaultPoints, tmp_path: Path, kind: str) -> None:
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        build(env, tmp_path / "out", SLOW)
        first = env.submit("first")
        await_details(first, lambda _m, _s: first.details().last_checkpoint_id > 2)
        if kind == "checkpoint":
            cancel(first)
            path = first.details().summary.restorable_from
            assert path
        else:
            path = first.stop(str(tmp_path / "savepoints"))
    submit_and_kill(points, tmp_path / "out", path)
    points.start()
    with points.cluster.client() as client:
        known = {job.job_id: job.restorable_from for job in client.jobs(look_again=True)}
    if kind == "checkpoint":
        assert known == {first.job_id: path}
    else:
        assert [one.owner for one in list_savepoints(str(tmp_path / "savepoints"))] == [""]
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        build(env, tmp_path / "out", SLOW)
        last = env.submit("last", from_savepoint=path, claim=True)
        assert started_from(last).claimed
        cancel(last)
