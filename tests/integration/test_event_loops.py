"""Aim: no event loop of a daemon makes, lists or removes a directory, or opens a file of a store: on a disk that is
slow, or that holds a hundred thousand files, all its heartbeats and calls would wait for that.

Method: real daemons, in each of which the interpreter tells of such calls by its audit events, go through the life of
jobs: code that is shipped, state and kept rows on disk, checkpoints, a savepoint, a failure, a cancellation, a stop,
logs that are asked for, their own end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.test_start_again import Count, numbers
from tests.support.jobs import DEADLINE_S, await_details, cancel
from tests.support.processes import slot_pids

pytestmark = pytest.mark.integration

WATCH = Path(__file__).parents[1] / "support" / "loop_watch"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose daemons tell of it."""
    told = tmp_path / "told"
    told.mkdir()
    cluster = LocalCluster(tmp_path / "cluster")
    options = {"jobmanager.rpc.port": "0", "heartbeat.interval": "200ms"}
    environment = {"PYTHONPATH": str(WATCH), "EVENT_LOOP_WATCH": str(told)}
    cluster.start(taskmanagers=2, slots=2, overrides=options, environment=environment)
    try:
        yield cluster
    finally:
        cluster.stop()


def fails_at(row: Any) -> int:
    """A row that no job gets over."""
    return 1 // (500 - row.n)


def build(env: ps.Environment, output: Path) -> None:
    schema = {"n": "int64"}
    rows = env.generate(numbers, rate=2_000, schema=schema).exchange("caching")
    keyed = rows.select(key=ps.col("n") % 7, n=ps.col("n")).key_by("key")
    counts = keyed.process(Count(), schema={"key": "int64", "count": "int64"})
    counts.write_parquet(output)


def test_no_event_loop_touches_directories_and_files(watched: LocalCluster, tmp_path: Path) -> None:
    daemons = watched.daemons()
    [address] = [one.address for one in daemons if one.role == "jobmanager"]
    taskmanagers = [one.pid for one in daemons if one.role == "taskmanager"]
    config: dict[str, Any] = {
        "execution.checkpointing.interval": "100ms",
        "execution.checkpointing.local-backup.enabled": True,
        "state.backend.type": "rocksdb",
        "restart-strategy.fixed-delay.delay": "0s",
    }

    with ps.Environment(address, parallelism=2, config=config) as env:
        build(env, tmp_path / "out")
        handle = env.submit("watched")
        await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 1)
        saved = handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S)
        os.kill(next(slot for pid in taskmanagers for slot in slot_pids(pid)), signal.SIGKILL)
        await_details(handle, lambda _m, _s: handle.details().summary.restarts)
        before = handle.details().last_checkpoint_id
        await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > before)
        assert handle.logs()
        handle.stop(tmp_path / "kept", timeout=DEADLINE_S)
        handle.wait(DEADLINE_S)
        build(env, tmp_path / "out")
        claimed = env.submit("claims", from_savepoint=saved, claim=True)
        await_details(
            claimed, lambda _m, _s: claimed.details().started_from.independent_since_checkpoint_id
        )
        cancel(claimed)
    config["restart-strategy.type"] = "none"
    with ps.Environment(address, parallelism=1, config=config) as env:
        rows = env.generate(numbers, rows=1_000, schema={"n": "int64"})
        rows.map(fails_at, schema={"n": "int64"}).discard()
        with pytest.raises(ps.JobFailed):
            env.submit("fails").wait(DEADLINE_S)
    watched.stop()
    told = [path.read_text() for path in sorted((tmp_path / "told").iterdir())]
    assert not told, f"{len(told)} calls:\n" + "\n".join(told)
