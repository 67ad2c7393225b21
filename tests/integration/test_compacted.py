"""Aim: `penstock partitions --compact` gives a name the same rows in fewer partitions, in order where that is asked for, and
takes nothing from jobs that read or go on from a savepoint; whatever is killed, the name has the old rows or the new ones, whole.

Method: a cluster of two TaskManagers and the command line, as a user would; rows are compared with what was written.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.errors import JobRejected
from tests.support.jobs import cancel_all
from tests.support.processes import (
    DEADLINE_S,
    DaemonCluster,
    Deadline,
    Ended,
    kill_all,
    own_cluster,
    slot_pids,
    wait_ended,
    wait_in_directory,
)
from tests.support.watched_job import WatchedJob

pytestmark = [pytest.mark.integration]

ROWS = 20_000
RESTARTS = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 5,
    "restart-strategy.fixed-delay.delay": "10ms",
}
SCHEMA = pa.schema([("n", pa.int64()), ("shuffled", pa.int64()), ("part", pa.string())])


def numbers(start: int, count: int) -> pa.RecordBatch:
    n = range(start, start + count)
    return pa.RecordBatch.from_pydict(
        {
            "n": n,
            "shuffled": [(i * 7_919) % ROWS for i in n],
            "part": [None if i % 3 == 0 else f"{i % 5}" for i in n],
        },
        schema=SCHEMA,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    with own_cluster(tmp_path_factory.mktemp("site"), taskmanagers=2, slots=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: DaemonCluster) -> Iterator[DaemonCluster]:
    """Nothing is persisted in it; a test names its rows as no other does, since jobs are called after them."""
    yield shared
    cancel_all(Client(shared.jobmanager))
    with Client(shared.jobmanager) as client:
        for name in {one.promoted_as for one in client.partitions(promoted=True)}:
            client.drop_partitions(name)
    await_swept(shared, 0)


def persist(cluster: DaemonCluster, name: str, rows: int = ROWS) -> None:
    with ps.Environment(cluster.jobmanager, parallelism=4) as env:
        env.generate(numbers, rows=rows).filter(col("n") >= 0).persist(name, overwrite=True)
        env.execute("persist")


def compact(cluster: DaemonCluster, *options: str, status: int = 0) -> Ended:
    ended = cluster.site.manage(
        "partitions", *options, "--jobmanager", cluster.jobmanager, seconds=90
    )
    assert ended.status == status, ended.stderr
    return ended


def read(cluster: DaemonCluster, name: str) -> list[dict[str, object]]:
    with ps.Environment(cluster.jobmanager, parallelism=1) as env:
        rows = env.read_persisted(name).collect()
        env.execute("read")
        return [dict(row) for row in rows]


def held(cluster: DaemonCluster) -> list[tuple[str, str]]:
    """Name and job of all partitions."""
    with Client(cluster.jobmanager) as client:
        return [(one.promoted_as, one.job_id) for one in client.partitions()]


def await_swept(cluster: DaemonCluster, partitions: int) -> None:
    """Waits until only so many are left: what was replaced goes when its last reader has ended and been noted."""
    deadline = Deadline("that what was replaced is swept")
    while len(held(cluster)) > partitions:
        deadline.left()
        time.sleep(0.1)


def test_a_user_compacts_and_sorts(cluster: DaemonCluster) -> None:
    persist(cluster, "numbers")
    written = read(cluster, "numbers")
    said = compact(cluster, "--compact", "numbers", "--json").json
    assert (said["before"]["partitions"], said["after"]["partitions"]) == (4, 1)
    assert said["before"]["rows"] == said["after"]["rows"] == ROWS
    await_swept(cluster, 1)
    assert held(cluster) == [("numbers", said["after"]["job_id"])]
    assert sorted(read(cluster, "numbers"), key=str) == sorted(written, key=str)
    shown = compact(cluster, "--compact", "numbers", "--sort-by", "shuffled").stdout
    assert "compacted numbers: 20000 rows, 1 partitions" in shown
    assert [row["shuffled"] for row in read(cluster, "numbers")] == list(range(ROWS))
    compact(
        cluster, "--compact", "numbers", "--sort-by", "part", "--sort-by", "n", "--partitions", "1"
    )
    ordered = sorted(written, key=lambda row: (row["part"] is None, row["part"] or "", row["n"]))
    assert read(cluster, "numbers") == ordered


def await_finished(cluster: DaemonCluster, name: str) -> None:
    with Client(cluster.jobmanager) as client:
        (job_id,) = [job.job_id for job in client.jobs() if job.name == name]
        JobHandle(client, job_id).wait(DEADLINE_S)


def hold_until(gate: Path, begun: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that says that it has rows, and keeps them until the gate is open."""
    opened, told = str(gate), str(begun)

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        Path(told).touch()
        while not Path(opened).exists():
            time.sleep(0.02)
        return batch

    return hold


@pytest.mark.sampled(4)
@pytest.mark.parametrize("killed", ["nothing", "the command", "its slots", "the JobManager"])
def test_readers_go_on_with_what_they_read_whatever_is_killed(
    cluster: DaemonCluster, tmp_path: Path, killed: str
) -> None:
    name = f"read-by-{killed.replace(' ', '-')}"
    persist(cluster, name)
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    with ps.Environment(cluster.jobmanager, parallelism=2, config=RESTARTS) as env:
        env.read_persisted(name).map_batches(hold_until(gate, begun), schema=SCHEMA).write_parquet(
            str(tmp_path / "output")
        )
        reader = env.submit("reader")
        wait_in_directory(tmp_path, begun.exists, "that the reader has rows")
        command = cluster.site.start_penstock(
            "partitions",
            "--compact",
            name,
            "--sort-by",
            "n",
            "--jobmanager",
            cluster.jobmanager,
        )
        cluster.wait_for_log("jobmanager", "job.accepted", name=f"compact {name}")
        match killed:
            case "the command":
                command.send(signal.SIGKILL)
            case "its slots":
                kill_all(slot_pids(cluster.pid("taskmanager")))
            case "the JobManager":
                jobmanager = cluster.pid("jobmanager")
                os.kill(jobmanager, signal.SIGKILL)
                wait_ended(jobmanager)
                cluster.start(taskmanagers=2, slots=3)
        ended = command.wait()
        if killed in ("nothing", "its slots"):
            assert ended.status == 0, ended.stderr
        else:  # the job goes on without it
            await_finished(cluster, f"compact {name}")
        assert len({job for _, job in held(cluster)}) == 2, "the reader's rows are kept"
        assert [row["n"] for row in read(cluster, name)] == list(range(ROWS))
        gate.touch()
        reader.wait(DEADLINE_S)
    rows = Counter(pq.read_table(tmp_path / "output")["n"].to_pylist())
    assert rows == Counter(range(ROWS))
    await_swept(cluster, 1)
    assert [row["n"] for row in read(cluster, name)] == list(range(ROWS))


def test_a_job_that_was_stopped_in_the_middle_does_not_read_it_twice(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    persist(cluster, "numbers", 40 * ROWS)  # a hundred batches, which take half a minute
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    storage = {"execution.checkpointing.dir": str(tmp_path / "checkpoints")}

    def slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.3)
        return batch

    def build(env: ps.Environment) -> None:
        rows = env.read_persisted("numbers").uid("read").map_batches(slowly, schema=SCHEMA)
        counts = rows.uid("slowly").key_by("part").aggregate(n=ps.count()).uid("counts")
        counts.map_batches(hold_until(gate, begun), schema=counts.schema).uid("told").discard()

    gate.touch()
    with (
        ps.Environment(cluster.jobmanager, parallelism=1, config=storage) as env,
        Client(cluster.jobmanager) as client,
    ):
        build(env)
        job = env.submit("stopped")
        WatchedJob(cluster, client, job.job_id).await_running()
        wait_in_directory(tmp_path, begun.exists, "that rows are counted")
        savepoint = job.stop(str(tmp_path / "savepoint"))
        build(env)
        with pytest.raises(JobRejected, match="was reading what is persisted as 'numbers'"):
            env.submit("again", from_savepoint=savepoint)


def test_what_cannot_be_done_is_refused(cluster: DaemonCluster) -> None:
    persist(cluster, "numbers", 100)
    with ps.Environment(cluster.jobmanager) as env:
        env.read_persisted("numbers").key_by("part").aggregate(n=ps.sum("n")).persist("updates")
        env.read_persisted("numbers").map(
            lambda row: {"many": [row.n]}, schema=pa.schema([("many", pa.list_(pa.int64()))])
        ).persist("lists")
        env.execute("persist")
    for options, reason in (
        (("--compact", "number"), "did you mean 'numbers'"),
        (("--compact", "numbers", "--sort-by", "m"), "no column 'm'"),
        (("--compact", "lists", "--sort-by", "many"), "whose values have no order"),
        (("--compact", "updates", "--sort-by", "n"), "which one is the last counts"),
    ):
        assert reason in compact(cluster, *options, status=1).stderr
    for options, reason in (
        (("--sort-by", "n"), "say how to --compact"),
        (("--compact", "numbers", "--drop", "numbers"), "choose one"),
        (("--compact", "numbers", "--spark", "--partitions", "2"), "leave --partitions out"),
    ):
        assert reason in compact(cluster, *options, status=2).stderr
    compact(cluster, "--compact", "updates")
    with ps.Environment(cluster.jobmanager) as env, pytest.raises(JobRejected, match="updates of"):
        env.read_persisted("updates").key_by("part").aggregate(n=ps.count())
    assert len(read(cluster, "numbers")) == 100
