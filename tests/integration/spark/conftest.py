"""What the tests of Spark stages share: settings that keep the JVM small."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import psutil
import pytest

from penstock.config import Configuration
from penstock.local.local_cluster import LocalCluster
from taskmanager.spark.driver_runner import SparkDriverRunner, SparkPlace
from tests.support.examples import RUNS_ALL
from tests.support.processes import DEADLINE_S, Deadline, wait_ended

START_S = 200.0
"""Spark has to be there after this time, however busy the machine is."""

IN_ALL = pytest.mark.skipif(not RUNS_ALL, reason="starts Spark once more: make test-all runs it")

SMALL = {
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss1m -XX:ReservedCodeCacheSize=96m",
    "execution.spark.driver-memory": "512mb",
    "execution.spark.start-timeout": "180s",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkDriverRunner]:
    """A Spark driver, as a slot has one; stages of all tests of a module share its session."""
    directory = tmp_path_factory.mktemp("a slot")
    config = Configuration.from_mapping(SMALL)
    place = SparkPlace("job", directory, directory, (), config)
    runner = SparkDriverRunner(place, os.environ)
    try:
        yield runner
    finally:
        runner.close()


def tree_of(pid: int) -> list[int]:
    """A driver and all that it has started: the JVM, and what runs Python for that."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def jvm_of(pid: int) -> int:
    """The JVM of a driver."""
    return next(c.pid for c in psutil.Process(pid).children() if c.name() == "java")


def wait_all_ended(pids: Sequence[int], seconds: float = DEADLINE_S) -> None:
    """Waits until no process of them is left; within the time that they have together."""
    deadline = Deadline(f"the ends of {pids}", seconds)
    for pid in pids:
        wait_ended(pid, deadline.left())


def spark_drivers(cluster: LocalCluster) -> list[int]:
    """The Spark drivers that the TaskManagers of a cluster have under way."""
    found = []
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            for process in psutil.Process(daemon.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "taskmanager.spark.driver_process" in process.cmdline():
                        found.append(process.pid)
    return found
