"""Aim: a job that is started from another one's checkpoint at another parallelism gives what one that was never
stopped gives, whatever kind of state it has.

Method: queries of Nexmark write files; of a job at parallelism 2 all processes are killed behind its third checkpoint, which
ends it, and it is started again at 3 and at 1, with both backends. The rows of both together are those of a job that ran
through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, assert_same_rows, await_details
from tests.support.nexmark_queries import QUERIES, RATE
from tests.support.processes import kill_all, slot_pids

pytestmark = [pytest.mark.integration, pytest.mark.sampled(9)]


def rows_in(output: Path) -> list[dict[str, Any]]:
    files = [path for path in output.glob("*.parquet") if not path.name.startswith((".", "_"))]
    return [row for path in files for row in pq.read_table(path).to_pylist()]


_golden: dict[str, list[dict[str, Any]]] = {}


def golden(new_env: NewEnvironment, output: Path, query: str) -> list[dict[str, Any]]:
    """The rows of a query that runs through, which it does once in a process of the tests."""
    if query not in _golden:
        env = new_env(2)
        QUERIES[query](env, None).write_parquet(output).uid("files")
        assert env.submit("golden").wait(DEADLINE_S).status == "FINISHED"
        _golden[query] = rows_in(output)
    return _golden[query]


def kill_slots(cluster: LocalCluster) -> None:
    """Kills the processes of all jobs."""
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            kill_all(slot_pids(daemon.pid))


@pytest.mark.parametrize("parallelism", [3, 1])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("query", QUERIES)
def test_one_result_whatever_the_parallelism(
    new_env: NewEnvironment,
    cluster: LocalCluster,
    tmp_path: Path,
    query: str,
    backend: str,
    parallelism: int,
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
        "restart-strategy.type": "none",
        "state.backend.type": backend,
    }
    wanted = golden(new_env, tmp_path / "golden", query)
    assert wanted
    env = new_env(2, config)
    QUERIES[query](env, RATE).write_parquet(tmp_path / "out").uid("files")
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    kill_slots(cluster)
    with pytest.raises(ps.JobFailed):
        handle.wait(DEADLINE_S)
    env = new_env(parallelism, config)
    QUERIES[query](env, None).write_parquet(tmp_path / "out").uid("files")
    path = tmp_path / "checkpoints" / handle.job_id
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    assert_same_rows(rows_in(tmp_path / "out"), wanted)
