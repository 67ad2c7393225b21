"""Aim: a history that Spark makes is read once, whole and before the live rows, whatever is killed while it is made and
behind the cut; a savepoint goes on at another parallelism, and nothing of it runs Spark again.

Method: a cluster of its own. The tasks of the first attempt wait until something has been killed; live rows wait for files
that the test makes. What comes out is compared with what follows from the rows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.dataset as ds
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.spark.conftest import IN_ALL, SMALL, START_S, tree_of, wait_all_ended
from tests.integration.spark.test_spark_kills import victim_of, waiting
from tests.integration.test_history_then_live import (
    HISTORY,
    KEYS,
    ROW,
    SEEN,
    STEP_MS,
    Order,
    check,
    live_of,
)
from tests.integration.test_load_first import await_checkpoint, restarting
from tests.support.processes import wait_ended, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), IN_ALL]

TASKMANAGERS, SLOTS = 2, 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose daemons may be killed."""
    cluster = LocalCluster(tmp_path_factory.mktemp("killed"))
    try:
        cluster.start(taskmanagers=TASKMANAGERS, slots=SLOTS)
        yield cluster
    finally:
        cluster.stop()


def job(cluster: LocalCluster, directory: Path, parallelism: int) -> ps.Environment:
    """The history of Spark, in four files, then the live rows, of which those behind the first 500 wait."""
    waits = waiting(directory)

    def history(spark: object) -> object:
        rows = spark.range(0, HISTORY, numPartitions=4)  # type: ignore[attr-defined]
        made = waits(rows.withColumnRenamed("id", "n"))
        return made.selectExpr("n", f"n % {KEYS} k", f"n * {STEP_MS} ts")

    config = SMALL | restarting(directory) | {"restart-strategy.fixed-delay.attempts": 9}
    env = ps.Environment(cluster.address, parallelism=parallelism, config=config)
    made = env.spark(history, schema=ROW).uid("history")
    live = env.source(live_of(directory / "live", {500: directory / "more"})).uid("live")
    both = made.union(live).key_by("k").process(Order(), schema=SEEN).uid("order")
    both.write_json(directory / "out").uid("out")
    return env


@pytest.mark.parametrize("target", ["driver", "jvm", "slot", "taskmanager"])
def test_killed_while_spark_makes_it_and_behind_the_cut_then_rescaled(
    killed: LocalCluster, tmp_path: Path, target: str
) -> None:
    handle = job(killed, tmp_path, 2).submit(f"kill the {target}")
    wait_in_directory(tmp_path, (tmp_path / "driver").exists, "a task", START_S)
    driver = int((tmp_path / "driver").read_text())
    tree = tree_of(driver)
    victim = victim_of(target, driver, killed)
    assert not (tmp_path / "live").exists(), "live is not opened before the history is there"
    os.kill(victim, signal.SIGKILL)
    wait_ended(victim)
    wait_all_ended(tree)
    killed.start(taskmanagers=TASKMANAGERS, slots=SLOTS)
    (tmp_path / "go").touch()
    wait_in_directory(tmp_path, (tmp_path / "live").exists, "live rows", START_S)
    await_checkpoint(handle)
    attempts = (tmp_path / "attempts").read_text().split()
    assert len(attempts) == 2

    # Behind the cut a TaskManager with half of the job is lost: what is restored makes no history again.
    taskmanager = next(one.pid for one in killed.daemons() if one.role == "taskmanager")
    slots = psutil.Process(taskmanager).children(recursive=True)
    os.kill(taskmanager, signal.SIGKILL)
    wait_all_ended([taskmanager, *(slot.pid for slot in slots)])
    killed.start(taskmanagers=TASKMANAGERS, slots=SLOTS)
    await_checkpoint(handle)
    path = handle.stop(tmp_path / "savepoints")

    (tmp_path / "more").touch()
    job(killed, tmp_path, 3).submit("rescaled", from_savepoint=path).wait(START_S)
    assert (tmp_path / "attempts").read_text().split() == attempts
    table = ds.dataset(tmp_path / "out", format="json").to_table()
    check([SimpleNamespace(**row) for row in table.to_pylist()])
