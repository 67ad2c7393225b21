"""Aim: a stage does on executors elsewhere, and over Spark Connect, what it does beside the slot.

Method: a real master with two workers, of whose executors one is killed while its task runs; a real server of Spark
Connect. Files lie in the directory that all have in common, and some beside it, which only we see.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from taskmanager.spark.connect_address import INTERRUPT_S
from tests.integration.spark.conftest import IN_ALL, spark_drivers, wait_all_ended
from tests.integration.spark.test_engine_jobs import bids, hot
from tests.support.engines import assert_same_rows
from tests.support.processes import DEADLINE_S, wait_in_directory
from tests.support.spark_servers import SECRET, SMALL_JVM, connect_server, standalone

pytestmark = [pytest.mark.integration, IN_ALL, pytest.mark.timeout(900)]

ROWS = pa.schema([("n", pa.int64()), ("file", pa.string())])
START_S = 400.0


@contextlib.contextmanager
def cluster_of(directory: Path, spark: dict[str, str]) -> Iterator[LocalCluster]:
    """A cluster of its own, whose daemons' configuration says where Spark is."""
    shared = directory / "shared"
    shared.mkdir()
    cluster = LocalCluster(directory / "cluster")
    cluster.configure(
        {
            "jobmanager.rpc.port": "0",
            "taskmanager.numberOfTaskSlots": "4",
            "execution.spark.directory": str(shared),
            "spark.sql.shuffle.partitions": "2",
            **spark,
        }
    )
    try:
        cluster.start(taskmanagers=1)
        yield cluster
    finally:
        cluster.stop()


def stage_of(directory: Path, *, waits: bool) -> Any:
    """Says of each row which file it lies in; the function that tasks run is the job's own."""

    def where(frame: Any, other: Any) -> Any:
        from pyspark.sql.functions import input_file_name

        def check(batches: Any) -> Any:
            for batch in batches:
                if waits and not (directory / "killed").exists():
                    (directory / f"task-{os.getppid()}").touch()
                    threading.Event().wait(600)
                yield named(batch)

        both = frame.select("n", input_file_name().alias("file")).union(
            other.select("n", input_file_name().alias("file"))
        )
        return both.mapInArrow(check, "n long, file string")

    return where


def named(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with the names of their files alone."""
    names = [text.as_py().rpartition("/")[2] for text in batch["file"]]
    return batch.set_column(1, "file", pa.array(names, pa.string()))


def run_stage(cluster: LocalCluster, directory: Path, *, waits: bool = False) -> ps.JobHandle:
    """Starts a job with files in the common directory and elsewhere, and output in both."""
    shared = directory / "shared"
    (shared / "in").mkdir()
    (directory / "own").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), shared / "in" / "seen.parquet")
    pq.write_table(pa.table({"n": [3]}), directory / "own" / "unseen.parquet")
    env = ps.Environment(cluster.address, parallelism=1)
    env.set_runtime_mode("batch")
    seen = env.read_parquet(str(shared / "in"))
    unseen = env.read_parquet(str(directory / "own"))
    function = stage_of(directory, waits=waits)
    seen.spark(function, unseen, schema=ROWS).write_parquet(str(shared / "out"))
    if not waits:
        seen.spark(function, unseen, schema=ROWS).write_parquet(str(directory / "out"))
    return env.submit("elsewhere")


def rows_in(directory: Path) -> list[tuple[int, str]]:
    """What a sink shows; nothing else is left in its directory."""
    files = list(directory.iterdir())
    assert all(file.name.startswith("part-") for file in files), files
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted((row["n"], row["file"]) for row in rows)


def assert_rows(directory: Path) -> None:
    """All rows are there once, and what Spark sees was read in place."""
    found = rows_in(directory)
    assert [n for n, _ in found] == [1, 2, 3]
    assert [file for _, file in found[:2]] == ["seen.parquet"] * 2
    assert found[2][1] != "unseen.parquet"  # written anew, where Spark sees it


def assert_engines_agree(cluster: LocalCluster, directory: Path) -> None:
    """A job that is compiled as a whole, and one whose part is, have the rows of our own engine."""
    source = bids(directory / "shared" / "bids")
    found = {}
    for engine in ("penstock", "spark"):
        env = ps.Environment(cluster.address, parallelism=2)
        env.set_runtime_mode("batch")
        whole = hot(env.read_parquet(str(source))).collect()
        ours = env.read_parquet(str(source)).map_batches(lambda rows: rows).engine("penstock")
        part = hot(ours).collect()
        env.execute(f"on {engine}", engine=engine)
        found[engine] = whole.to_pylist(), part.to_pylist()
    assert len(found["penstock"][0]) > 30
    for mine, sparks in zip(found["penstock"], found["spark"], strict=True):
        assert_same_rows(mine, sparks)


def test_a_stage_on_executors_elsewhere_outlives_one_of_them(tmp_path: Path) -> None:
    with standalone(tmp_path, workers=2) as spark:
        keys = {
            "spark.master": spark.url,
            "spark.authenticate": "true",
            "spark.authenticate.secret": SECRET,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": SMALL_JVM,
            "spark.driver.extraJavaOptions": SMALL_JVM,
            "execution.spark.driver-memory": "512mb",
        }
        with cluster_of(tmp_path, keys) as cluster:
            handle = run_stage(cluster, tmp_path, waits=True)
            wait_in_directory(tmp_path, lambda: any(tmp_path.glob("task-*")), "a task", START_S)
            drivers = spark_drivers(cluster)
            assert len(drivers) == 1
            executors = spark.executor_pids()
            assert len(executors) == 2
            (tmp_path / "killed").touch()
            for pid in executors:
                os.kill(pid, signal.SIGKILL)
            handle.wait(START_S)
            assert_rows(tmp_path / "shared" / "out")
            assert spark_drivers(cluster) in ([], drivers)  # it was no failure of ours
            assert_engines_agree(cluster, tmp_path)
            wait_all_ended(drivers)


def hanging(directory: Path) -> Callable[[Any], Any]:
    """A source whose task on the server never ends; it says who runs it."""

    def hangs(spark: Any) -> Any:
        def in_task(batches: Any) -> Any:
            for batch in batches:
                part = directory / "part"
                part.write_text(str(os.getpid()))
                part.rename(directory / "worker")
                threading.Event().wait(600)
                yield batch

        return spark.range(0, 1, 1, numPartitions=1).mapInArrow(in_task, "id long")

    return hangs


def test_what_is_left_on_a_server_of_spark_connect_is_ended_whoever_is_killed(
    tmp_path: Path,
) -> None:
    def start_and_kill(whom: str) -> int:
        """Kills the driver, its slot or the TaskManager in the middle of a stage; who runs the task."""
        env = ps.Environment(cluster.address, parallelism=1)
        env.set_runtime_mode("batch")
        env.spark(hanging(tmp_path), schema={"id": "int64"}).discard()
        handle = env.submit(f"without {whom}")
        wait_in_directory(tmp_path, (tmp_path / "worker").exists, "a task", START_S)
        [driver] = spark_drivers(cluster)
        [taskmanager] = [one.pid for one in cluster.daemons() if one.role == "taskmanager"]
        pids = {"driver": driver, "slot": psutil.Process(driver).ppid()}
        if whom == "machine":
            kill_in_order(driver, taskmanager)  # the driver has no moment to say goodbye
        else:
            os.kill(pids[whom], signal.SIGKILL)
        if whom == "machine":
            cluster.start(taskmanagers=1)
        with pytest.raises(ps.JobFailed):
            handle.wait(START_S)
        worker = tmp_path / "worker"
        pid = int(worker.read_text())
        worker.unlink()
        return pid

    with (
        connect_server(tmp_path) as address,
        cluster_of(tmp_path, {"spark.remote": address}) as cluster,
    ):
        for whom in ("driver", "slot", "machine"):
            wait_all_ended([start_and_kill(whom)], INTERRUPT_S)


def kill_in_order(*pids: int) -> None:
    """Stops all of them before it kills them: none has a moment between. None is there when it returns."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_all_ended(pids, DEADLINE_S)


def test_a_stage_runs_over_spark_connect_without_java_of_ours(tmp_path: Path) -> None:
    with (
        connect_server(tmp_path) as address,
        cluster_of(tmp_path, {"spark.remote": address}) as cluster,
    ):
        handle = run_stage(cluster, tmp_path)
        handle.wait(START_S)
        assert_rows(tmp_path / "shared" / "out")
        assert_rows(tmp_path / "out")
        assert_engines_agree(cluster, tmp_path)
