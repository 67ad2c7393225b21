"""A bulk stage on Spark, and the same program of PySpark alone: Parquet in, Parquet out, five columns each.

Both run on as many cores of one machine, with the same settings of the session, each run in a fresh JVM; starting the
session is not counted, up to the call of the function. ``seconds`` are those of the job
``read_parquet(...).spark(fn).write_parquet(...)`` from RUNNING to FINISHED, commit of its output included; ``exchange_seconds`` those of the job that has filters of ours on both sides of the
stage, so that all rows go through exchanges of ours. CPU seconds are those of the driver, its JVM and the slots.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from benchmarks.input import SCHEMA, input_batches
from benchmarks.measure import await_free_slots, bench_cluster
from benchmarks.workload import RATE
from benchmarks.workloads import MIN_PRICE
from penstock import col
from penstock.client.client import Client
from penstock.config import Configuration
from penstock.local.local_cluster import LocalCluster
from taskmanager.spark.session_settings import session_settings

ROWS = 50_000_000
_FILE_BATCHES = 512
_KEYS = 1_000_000
_OUTPUT = pa.schema([*(SCHEMA.field(name) for name in SCHEMA.names[:-1]), ("euro", pa.float64())])
_WAIT_S = 1800.0
_LOOK_S = 0.2


def bulk(started: Path, frame: Any) -> Any:
    """The stage: most of the rows, with a column that is computed. Notes what Spark took to be there: time, and CPU."""
    start = {"seconds": _age_s(), "cpu_s": sum(cpu_of_tree(psutil.Process()).values())}
    started.write_text(json.dumps(start))
    from pyspark.sql.functions import col as column

    kept = frame.where(column("price") > MIN_PRICE)
    return kept.select(*_OUTPUT.names[:-1], (column("price") * RATE).alias("euro"))


def _age_s() -> float:
    """How long this process has been there; of psutil it can be told to a second only."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took, without what Spark took to be there, and how many rows it has left."""

    seconds: float
    cpu_s: float
    rows: int


class CpuWatch:
    """CPU seconds that a process and all below it take during a block: asked for often, since processes end.

    Attributes:
        cpu_s: in the block, once it has ended.
    """

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._last: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="cpu")
        self.cpu_s = 0.0

    def __enter__(self) -> Self:
        self._before = sum(cpu_of_tree(self._root).values())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.cpu_s = sum(self._last.values()) - self._before

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with suppress(psutil.NoSuchProcess):
                self._last.update(cpu_of_tree(self._root))


def cpu_of_tree(root: psutil.Process) -> dict[int, float]:
    """CPU seconds of each process of a tree, so far."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = sum(process.cpu_times()[:2])
    return found


def run_spark(rows: int, cores: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        bench_cluster(cores + 1, {"taskmanager.numberOfTaskSlots": str(cores + 1)}) as cluster,
    ):
        directory = Path(name)
        source = directory / "in"
        write_parquet(source, rows)
        for _ in range(repeat):
            alone = _alone(source, directory / "alone", cores)
            job = _job(cluster, source, directory / "job", cores, has_filters=False)
            exchanges = _job(cluster, source, directory / "job", cores, has_filters=True)
            assert alone.rows == job.rows == exchanges.rows, "they are the same rows"
            yield {
                "workload": "spark",
                "rows": rows,
                "rows_out": alone.rows,
                "cores": cores,
                "seconds": round(job.seconds, 3),
                "spark_alone_s": round(alone.seconds, 3),
                "ratio": round(job.seconds / alone.seconds, 3),
                "cpu_s": round(job.cpu_s, 1),
                "spark_alone_cpu_s": round(alone.cpu_s, 1),
                "cpu_ratio": round(job.cpu_s / alone.cpu_s, 3),
                "exchange_seconds": round(exchanges.seconds, 3),
                "exchange_ratio": round(exchanges.seconds / alone.seconds, 3),
                "exchange_cpu_s": round(exchanges.cpu_s, 1),
            }


def write_parquet(directory: Path, rows: int) -> None:
    """Writes the input, in files of four million rows."""
    directory.mkdir()
    batches = input_batches(rows, _KEYS)
    number = 0
    while some := list(islice(batches, _FILE_BATCHES)):
        pq.write_table(pa.Table.from_batches(some), directory / f"{number}.parquet")
        number += 1


def _alone(source: Path, target: Path, cores: int) -> Run:
    """The program without us."""
    program = [sys.executable, "-m", "benchmarks.spark", str(source), str(target), str(cores)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        with CpuWatch(process.pid) as watch:
            told, _ = process.communicate()
        assert process.returncode == 0, "the program alone has failed"
    found = json.loads(told)
    return Run(found["seconds"], watch.cpu_s - found["start_cpu_s"], _taken(target))


def _taken(directory: Path) -> int:
    """How many rows there are; the files go."""
    files = [path for path in directory.rglob("*.parquet") if not path.name.startswith(".")]
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    shutil.rmtree(directory)
    return rows


def _job(
    cluster: LocalCluster, source: Path, target: Path, cores: int, *, has_filters: bool
) -> Run:
    """The job."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        started = Path(name) / "started"
        env = ps.Environment(cluster.address, parallelism=cores)
        env.set_runtime_mode("batch")
        rows = env.read_parquet(str(source))
        if has_filters:
            rows = rows.filter(col("price") > 0)
        results = rows.spark(partial(bulk, started), schema=_OUTPUT, cores=cores)
        if has_filters:
            results = results.filter(col("price") > 0)
        results.write_parquet(str(target))
        [taskmanager] = [one.pid for one in cluster.daemons() if one.role == "taskmanager"]
        with CpuWatch(taskmanager) as watch:
            handle = env.submit("bulk")
            handle.wait(timeout=_WAIT_S)
        with closing(Client(cluster.address)) as client:
            summary = client.job(handle.job_id).summary
            await_free_slots(client)
        start = json.loads(started.read_text())
    seconds = (summary.ended_at_ms - summary.running_at_ms) / 1000
    return Run(seconds - start["seconds"], watch.cpu_s - start["cpu_s"], _taken(target))


def _run_alone(source: str, target: str, cores: int) -> dict[str, float]:
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        settings = session_settings(Configuration.from_mapping({}), "alone", cores, Path(name))
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        try:
            started = Path(name) / "started"
            frame = session.read.parquet(source)
            bulk(started, frame).write.parquet(target)
            start = json.loads(started.read_text())
            return {"seconds": _age_s() - start["seconds"], "start_cpu_s": start["cpu_s"]}
        finally:
            session.stop()


if __name__ == "__main__":
    print(json.dumps(_run_alone(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
