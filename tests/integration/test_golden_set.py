"""Aim: what a version before wrote can still be started from.

Method: checkpoints and savepoints of every format lie in ``tests/golden`` (``python -m tests.golden`` adds those of a new
format). A job goes on from each at another parallelism; a canonical one with either backend. Its result is that of a job
that ran through.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2
from penstock.storage.entries.file_names import FORMAT_VERSION as ROCKSDB_VERSION
from penstock.storage.run_columns import RUN_VERSION
from tests.integration.conftest import NewEnvironment
from tests.integration.test_nexmark_rescaled import kill_slots
from tests.support.golden_job import build, result
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

GOLDEN = Path(__file__).parents[1] / "golden"
SETS = sorted(GOLDEN.glob("runs-*/*.tar.gz"))


def cases() -> list[Any]:
    """Each with the backends that can be started from it: the run format is read by both."""
    found = []
    for path in SETS:
        backend, kind = path.name.removesuffix(".tar.gz").split("-")
        in_runs = backend == "hashmap" or kind == "canonical"
        for after in ["hashmap", "rocksdb"] if in_runs else ["rocksdb"]:
            found.append(pytest.param(path, after, id=f"{path.parent.name}/{path.name}-{after}"))
    return found


@pytest.fixture(scope="module")
def wanted(address: str, tmp_path_factory: pytest.TempPathFactory) -> Counter[Any]:
    output = tmp_path_factory.mktemp("wanted")
    with ps.Environment(address, parallelism=2) as env:
        build(env, output)
        assert env.submit("golden").wait(DEADLINE_S).status == "FINISHED"
    return result(output)


def test_there_is_a_set_of_the_present_formats() -> None:
    names = {path.parent.name for path in SETS}
    assert f"runs-{RUN_VERSION}-rocksdb-{ROCKSDB_VERSION}" in names, "run python -m tests.golden"


@pytest.mark.parametrize(("path", "backend"), cases())
def test_goes_on_from_what_was_written(
    new_env: NewEnvironment, wanted: Counter[Any], tmp_path: Path, path: Path, backend: str
) -> None:
    kept = tmp_path / "kept"
    with tarfile.open(path) as archive:
        archive.extractall(kept, filter="data")
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.backend.type": backend,
    }
    env = new_env(3, config)
    build(env, tmp_path / "out")
    handle = env.submit("again", from_savepoint=kept)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert result(tmp_path / "out") == wanted


@pytest.mark.parametrize("backend", ["rocksdb", "hashmap"])
def test_a_restore_that_is_killed_begins_anew(
    new_env: NewEnvironment,
    cluster: LocalCluster,
    client: Client,
    wanted: Counter[Any],
    tmp_path: Path,
    backend: str,
) -> None:
    other = {"rocksdb": "hashmap", "hashmap": "rocksdb"}[backend]
    newest = f"runs-{RUN_VERSION}-rocksdb-{ROCKSDB_VERSION}"
    with tarfile.open(GOLDEN / newest / f"{other}-canonical.tar.gz") as archive:
        archive.extractall(tmp_path / "kept", filter="data")
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.backend.type": backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "infinite",
        "restart-strategy.fixed-delay.delay": "0ms",
    }
    env = new_env(3, config)
    build(env, tmp_path / "out")
    handle = env.submit("killed", from_savepoint=tmp_path / "kept")
    restoring = client_pb2.ATTEMPT_STATE_INITIALIZING
    deadline = Deadline("a subtask restores")
    while not any(
        subtask.state >= restoring
        for vertex in client.job(handle.job_id).vertices
        for subtask in vertex.subtasks
    ):
        deadline.left()
    kill_slots(cluster)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert client.job(handle.job_id).summary.restarts
    assert result(tmp_path / "out") == wanted
