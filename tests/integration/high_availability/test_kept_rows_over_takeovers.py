"""Aim: jobs whose exchanges keep their rows go on under the next leader, which knows what is kept and who reads what.

Method: as in ``test_takeovers``, with caching exchanges. After leaders were killed, consumers fail and read kept rows
again, and producers fail and are replaced under consumers that go on; attempts tell who has begun again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.support.elected_cluster import (
    KEYS,
    RATE,
    Number,
    await_roles,
    await_written,
    numbers,
    slots_of,
    written,
)
from tests.support.jobs import await_details
from tests.support.processes import wait_ended

pytestmark = pytest.mark.integration

DELAY_MS = 4_000


def fails_where_told(path: str) -> bool:
    """Once for each time that the file is made."""
    if not Path(path).exists():
        return False
    Path(path).unlink(missing_ok=True)
    return True


class FallibleNumber(Number):
    """Numbers rows, and fails where it is told to."""

    def __init__(self, told: Path) -> None:
        self._told = str(told)

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if row["n"] % 100 == 0 and fails_where_told(self._told):
            raise ValueError("a consumer was told to fail")
        super().process(row, ctx, out)


def keyed_where_told(told: Path) -> Any:
    """Gives rows their key, and fails where it is told to."""
    path = str(told)

    def keyed(row: Any) -> dict[str, int]:
        if row.n % 100 == 0 and fails_where_told(path):
            raise ValueError("a producer was told to fail")
        return {"n": row.n, "key": row.n % KEYS}

    return keyed


def submitted(env: ps.Environment, root: Path) -> ps.JobHandle:
    """Numbers that are counted into files, behind a producer whose rows are kept, and come again as they were."""
    stream = env.generate(numbers, rate=RATE, schema={"n": "int64"}).uid("numbers")
    keyed = stream.parallelism(1).map(
        keyed_where_told(root / "producer"), schema={"n": "int64", "key": "int64"}
    )
    kept = keyed.parallelism(1).deterministic(True).uid("keys").exchange("caching").key_by("key")
    schema = {"key": "int64", "number": "int64"}
    counted = kept.process(FallibleNumber(root / "consumer"), schema=schema).uid("counts")
    counted.write_parquet(root / "out").uid("files")
    return env.submit("kept rows")


def kill_leader(cluster: LocalCluster) -> None:
    leader, _ = await_roles(cluster)
    os.kill(leader.pid, signal.SIGKILL)
    wait_ended(leader.pid)
    cluster.start(jobmanagers=2, taskmanagers=2)


def told(cluster: LocalCluster, handle: ps.JobHandle) -> tuple[int, dict[str, list[int]]]:
    """Restarts, and the numbers of the attempts by the name of their vertex."""
    with cluster.client() as client:
        job = client.job(handle.job_id)
    attempts = {
        "producers" if len(vertex.subtasks) == 1 else "consumers": [
            one.attempt for one in vertex.subtasks
        ]
        for vertex in job.vertices
    }
    return job.summary.restarts, attempts


def await_progress(out: Path) -> None:
    """More than one checkpoint's rows become visible."""
    await_written(out, written(out) + RATE // 2)


def await_running(handle: ps.JobHandle) -> None:
    await_details(handle, lambda _, state: state == "RUNNING")


def test_what_keeps_rows_goes_on_and_what_fails_later_is_mended_as_ever(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, tmp_path)
        await_progress(out)
        slots, first = slots_of(cluster, handle.job_id), told(cluster, handle)
        assert first[0] == 0
        kill_leader(cluster)
        await_progress(out)
        await_running(handle)
        assert told(cluster, handle) == first, "nothing has begun again"
        assert slots_of(cluster, handle.job_id) == slots != {}
        # A consumer fails: it reads kept rows again, and their producer runs on.
        (tmp_path / "consumer").touch()
        await_details(handle, lambda _, state: told(cluster, handle)[0] == 1)
        await_progress(out)
        restarts, second = told(cluster, handle)
        assert (restarts, second["producers"]) == (1, first[1]["producers"])
        assert sum(map(int.__gt__, second["consumers"], first[1]["consumers"])) == 1
        kill_leader(cluster)
        await_progress(out)
        await_running(handle)
        assert told(cluster, handle) == (1, second)
        # A producer fails: it is replaced, and its consumers go on where they are.
        (tmp_path / "producer").touch()
        await_details(handle, lambda _, state: told(cluster, handle)[0] == 2)
        await_progress(out)
        restarts, third = told(cluster, handle)
        assert (restarts, third["consumers"]) == (2, second["consumers"])
        assert third["producers"] > second["producers"]
        kill_leader(cluster)
        await_running(handle)
        assert told(cluster, handle) == (2, third)
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


def test_a_leader_dies_while_a_producer_is_replaced_under_its_consumers(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = {"restart-strategy.fixed-delay.delay": f"{DELAY_MS}ms"}
    with ps.Environment(cluster.address, parallelism=2, config=config) as env:
        handle = submitted(env, tmp_path)
        await_progress(out)
        _, first = told(cluster, handle)
        (tmp_path / "producer").touch()
        await_details(handle, lambda _, state: told(cluster, handle)[0] == 1)
        kill_leader(cluster)
        await_details(handle, lambda _, state: told(cluster, handle)[1] != first)
        await_progress(out)
        restarts, after = told(cluster, handle)
        assert (restarts, after["consumers"]) == (1, first["consumers"])
        assert after["producers"] > first["producers"]
        handle.stop(str(tmp_path / "savepoints"))
        written(out)
