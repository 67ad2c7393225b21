"""Aim: whatever is killed while a stage runs, no process of Spark outlives its slot, and the output is there once.

Method: a cluster of its own; tasks of the stage say who their driver is and wait, what is to be killed is found from there.
The next attempt does not wait. A disk that fills up is a small file system in memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.spark.conftest import IN_ALL, SMALL, START_S, jvm_of, tree_of, wait_all_ended
from tests.support.processes import wait_ended, wait_in_directory
from tests.support.small_disk import filled, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

N = {"n": "int64"}
TASKMANAGERS = 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose daemons may be killed."""
    cluster = LocalCluster(tmp_path_factory.mktemp("killed"))
    try:
        cluster.start(taskmanagers=TASKMANAGERS, slots=2)
        yield cluster
    finally:
        cluster.stop()


def waiting(directory: Path) -> Callable[[Any], Any]:
    """A function whose tasks say who drives them, and wait until they may go on."""

    def waits(frame: Any) -> Any:
        driver = os.getpid()
        with (directory / "attempts").open("a") as attempts:
            attempts.write(f"{driver}\n")

        def in_task(batches: Any) -> Any:
            for batch in batches:
                part = directory / f"part-{os.getpid()}"  # tasks run side by side
                part.write_text(str(driver))
                part.rename(directory / "driver")
                while not (directory / "go").exists():
                    time.sleep(0.05)
                yield batch

        return frame.mapInArrow(in_task, "n long")

    return waits


def victim_of(target: str, driver: int, cluster: LocalCluster) -> int:
    """The process to kill.

    Args:
        driver: of the stage.
    """
    slot = psutil.Process(driver).ppid()
    above = {process.pid for process in psutil.Process(slot).parents()}
    match target:
        case "driver":
            return driver
        case "jvm":
            return jvm_of(driver)
        case "slot":
            return slot
        case "taskmanager":
            return next(one.pid for one in cluster.daemons() if one.pid in above)
        case _:
            return next(one.pid for one in cluster.daemons() if one.role == target)


def shown(directory: Path) -> list[int]:
    """What the sink shows; nothing else is left in its directory."""
    files = list(directory.iterdir())
    assert all(file.name.startswith("part-") for file in files), files
    return sorted(n for file in files for n in pq.ParquetFile(file).read()["n"].to_pylist())


@IN_ALL
@pytest.mark.parametrize("target", ["slot", "driver", "jvm", "taskmanager", "jobmanager"])
def test_the_output_is_there_once_and_no_process_is_left(
    killed: LocalCluster, tmp_path: Path, target: str
) -> None:
    pq.write_table(pa.table({"n": range(10)}), tmp_path / "in.parquet")
    config = SMALL | {"restart-strategy.type": "fixed-delay"}
    env = ps.Environment(killed.address, parallelism=1, config=config)
    env.set_runtime_mode("batch")
    rows = env.read_parquet(str(tmp_path / "in.parquet"))
    if target in ("slot", "taskmanager"):
        rows = rows.rebalance()  # its files are those of an exchange, which go with the TaskManager
    rows.spark(waiting(tmp_path), schema=N).write_parquet(str(tmp_path / "out"))
    handle = env.submit(f"kill the {target}")
    wait_in_directory(tmp_path, (tmp_path / "driver").exists, "a task", START_S)
    driver = int((tmp_path / "driver").read_text())
    tree = tree_of(driver)
    assert len(tree) > 2  # the JVM, and Python for its tasks
    victim = victim_of(target, driver, killed)
    os.kill(victim, signal.SIGKILL)
    wait_ended(victim)
    is_spared = target == "jobmanager"
    if not is_spared:
        wait_all_ended(tree)
    killed.start(taskmanagers=TASKMANAGERS, slots=2)
    (tmp_path / "go").touch()
    handle.wait(START_S)
    assert shown(tmp_path / "out") == list(range(10))
    attempts = (tmp_path / "attempts").read_text().split()
    assert len(attempts) == (1 if is_spared else 2)
    wait_all_ended([int(pid) for pid in attempts])


@IN_ALL
def test_a_disk_that_fills_up_while_spark_writes(killed: LocalCluster, tmp_path: Path) -> None:
    def many(spark: Any) -> Any:
        return spark.range(500_000).selectExpr("id n", "uuid() text")

    def run(directory: Path) -> None:
        env = ps.Environment(killed.address, parallelism=1, config=SMALL)
        env.set_runtime_mode("batch")
        schema = {"n": "int64", "text": "string"}
        env.spark(many, schema=schema).name("many").write_parquet(str(directory))
        env.execute("full")

    with small_disk(tmp_path / "small", "64m") as small:
        out = small / "out"
        with filled(small, leave_bytes=2 << 20):
            with pytest.raises(ps.JobFailed, match="No space left on device") as failed:
                run(out)
            assert failed.value.operator == "many"
            assert "No space left on device" in str(failed.value).splitlines()[0]
        assert shown(out) == []
        run(out)
        assert shown(out) == list(range(500_000))
