"""Aim: what one job persists others read, whatever their parallelism, as long as it is there.

Method: a cluster of two TaskManagers; the command line lists and drops. What each job reads is compared with
what was written.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.client.client import Client
from penstock.errors import JobCanceled, JobFailed, JobRejected
from tests.support.processes import DaemonCluster, own_cluster

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

ROWS = 20_000
KEYS = 7


def numbers(start: int, count: int) -> pa.RecordBatch:
    n = range(start, start + count)
    return pa.RecordBatch.from_pydict(
        {"n": n, "key": [i % KEYS for i in n], "at": n, "unused": [0.5] * count}
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    with own_cluster(tmp_path_factory.mktemp("site"), taskmanagers=2, slots=3) as cluster:
        yield cluster


def environment(cluster: DaemonCluster, parallelism: int = 4, **config: object) -> ps.Environment:
    return ps.Environment(cluster.jobmanager, parallelism=parallelism, config=config)


def persist(
    cluster: DaemonCluster, name: str, *, rows: int = ROWS, overwrite: bool = False
) -> None:
    # Four subtasks: both TaskManagers hold some.
    with environment(cluster) as env:
        env.generate(numbers, rows=rows).filter(col("n") >= 0).persist(name, overwrite=overwrite)
        env.execute("persist")


def listed(cluster: DaemonCluster) -> dict[str, int]:
    shown = cluster.site.penstock(
        "partitions", "--promoted", "--json", "--jobmanager", cluster.jobmanager
    ).json["partitions"]
    rows: dict[str, int] = {}
    for one in shown:
        rows[one["promoted_as"]] = rows.get(one["promoted_as"], 0) + one["rows"]
    return rows


def drop(cluster: DaemonCluster, name: str) -> None:
    cluster.site.penstock("partitions", "--drop", name, "--jobmanager", cluster.jobmanager)


def test_other_jobs_read_it(cluster: DaemonCluster) -> None:
    persist(cluster, "numbers")
    assert listed(cluster) == {"numbers": ROWS}
    # In batch with more subtasks than partitions, and streaming with fewer, checkpoints and event time.
    with environment(cluster, 6, **{"execution.runtime-mode": "batch"}) as env:
        totals = env.read_persisted("numbers").key_by("key").aggregate(n=ps.sum("n")).collect()
        env.execute("batch")
        last = {row["key"]: row["n"] for row in totals}
        assert last == {key: sum(range(key, ROWS, KEYS)) for key in range(KEYS)}
    with environment(cluster, 3, **{"execution.checkpointing.interval": "100ms"}) as env:
        windows = (
            env.read_persisted("numbers")
            .with_event_time("at")
            .key_by("key")
            .window(ps.tumbling("1s"))
            .aggregate(count=ps.count())
            .collect()
        )
        env.execute("streaming")
        assert len(windows) == KEYS * ROWS // 1000
        assert sum(row["count"] for row in windows) == ROWS
    with environment(cluster) as env:
        with pytest.raises(JobRejected, match="did you mean 'numbers'"):
            env.read_persisted("number")
        env.from_rows([{"n": 1}]).persist("numbers")
        with pytest.raises(JobRejected, match="is persisted as 'numbers' already"):
            env.execute("clash")
    with environment(cluster) as env:
        outdated = env.read_persisted("numbers")
        persist(cluster, "numbers", rows=500, overwrite=True)
        assert listed(cluster) == {"numbers": 500}
        outdated.discard()
        with pytest.raises(JobRejected, match="has persisted as 'numbers' is gone"):
            env.execute("outdated")
    with environment(cluster) as env:
        rows = env.read_persisted("numbers").select("n").collect()
        env.execute("newest")
        assert sorted(row["n"] for row in rows) == list(range(500))
    drop(cluster, "numbers")
    assert listed(cluster) == {}
    with environment(cluster) as env, pytest.raises(JobRejected, match="names there are: none"):
        env.read_persisted("numbers")


def test_updates_are_updates_in_later_jobs_too(cluster: DaemonCluster) -> None:
    with environment(cluster) as env:
        sums = env.generate(numbers, rows=ROWS).key_by("key").aggregate(n=ps.sum("n")).name("sums")
        sums.filter(col("n") >= 0).persist("updates")
        sums.as_rows().persist("changes")
        env.execute("persist updates")
    with environment(cluster) as env:
        updates = env.read_persisted("updates").filter(col("n") >= 0)
        refusal = r"updates of 'sums' as 'updates'.*\.as_rows\(\) behind 'read_persisted'"
        with pytest.raises(JobRejected, match=refusal):
            updates.key_by("key").aggregate(n=ps.count())
        with pytest.raises(JobRejected, match=refusal):
            updates.window_all(ps.count_window(2)).aggregate(n=ps.count())
        meant = updates.as_rows().key_by("key").aggregate(n=ps.count()).collect()
        changes = env.read_persisted("changes").key_by("key").aggregate(n=ps.count()).collect()
        updates.persist("copies")
        env.execute("count")
        assert {row["key"] for row in meant} == {row["key"] for row in changes} == set(range(KEYS))
    with environment(cluster) as env, pytest.raises(JobRejected, match="updates of 'sums'"):
        env.read_persisted("copies").key_by("key").aggregate(n=ps.count())
    for name in ("updates", "changes", "copies"):
        drop(cluster, name)


def test_a_job_that_fails_or_is_cancelled_leaves_nothing(cluster: DaemonCluster) -> None:
    def fail(row: ps.Row) -> bool:
        if row.n == ROWS - 1:
            raise ValueError("the last one")
        return True

    with environment(cluster) as env:
        env.generate(numbers, rows=ROWS).filter(fail).persist("partly")
        with pytest.raises(JobFailed, match="the last one"):
            env.execute("fails")
        env.generate(numbers, rows=ROWS, rate=10).persist("partly")
        job = env.submit("cancelled")
        job.cancel()
        with pytest.raises(JobCanceled):
            job.wait()
    assert listed(cluster) == {}
    persist(cluster, "partly", rows=100)  # the name is free
    assert listed(cluster) == {"partly": 100}
    drop(cluster, "partly")


def test_what_a_lost_taskmanager_held_is_named(cluster: DaemonCluster) -> None:
    """Last: it takes a TaskManager."""
    persist(cluster, "gone")

    def slowly(row: ps.Row) -> bool:
        threading.Event().wait(0.01)
        return True

    # As many readers as one TaskManager has slots: wherever they run, what the lost one held is to be read there.
    with environment(
        cluster,
        3,
        **{"restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.attempts": 9},
    ) as env:
        env.read_persisted("gone").filter(slowly).discard()
        job = env.submit("reader")
        cluster.wait_for_log("jobmanager", "job.state_changed", job_id=job.job_id, state="RUNNING")
        os.kill(cluster.pid("taskmanager"), signal.SIGKILL)
        with pytest.raises(
            JobFailed, match=r"2 of the 4 partitions .* as 'gone' are gone"
        ) as failed:
            job.wait()
        assert "run the job that persists it again" in str(failed.value)
        with pytest.raises(JobRejected, match=r"2 of the 4 partitions"):
            env.read_persisted("gone")
    with Client(cluster.jobmanager) as client:
        assert {one.promoted_as for one in client.partitions(promoted=True)} == {"gone"}
    persist_on_one(cluster)


def persist_on_one(cluster: DaemonCluster) -> None:
    """The rest takes the name over."""
    with environment(cluster, 2) as env:
        env.generate(numbers, rows=10).persist("gone", overwrite=True)
        env.execute("again")
        rows = env.read_persisted("gone").collect()
        env.execute("read")
        assert sorted(row["n"] for row in rows) == list(range(10))
