"""A bulk stage on Spark, and the same program of PySpark alone: Parquet in, Parquet out, five columns each.

Both run on as many cores of one machine, with the same settings of the session, each run in a fresh JVM; starting the
session is not counted. ``seconds`` are those of the job ``read_parquet(...).spark(fn).write_parquet(...)`` from RUNNING to
FINISHED, commit of its output included; ``exchange_seconds`` those of the job that has filters of ours on both sides of the
stage, so that all rows go through exchanges of ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from benchmarks.input import SCHEMA, input_batches
from benchmarks.measure import await_free_slots, bench_cluster
from benchmarks.workloads import MIN_PRICE, RATE
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


def bulk(started: Path, frame: Any) -> Any:
    """The stage: most of the rows, with a column that is computed. Notes how long Spark took to be there."""
    started.write_text(str(time.time() - psutil.Process().create_time()))  # noqa: TID251
    from pyspark.sql.functions import col as column

    kept = frame.where(column("price") > MIN_PRICE)
    return kept.select(*_OUTPUT.names[:-1], (column("price") * RATE).alias("euro"))


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
            alone_s, kept = _alone(source, directory / "alone", cores)
            job_s, rows_out = _job(cluster, source, directory / "job", cores, has_filters=False)
            exchanges_s, others = _job(cluster, source, directory / "job", cores, has_filters=True)
            assert kept == rows_out == others, "they are the same rows"
            yield {
                "workload": "spark",
                "rows": rows,
                "rows_out": kept,
                "cores": cores,
                "seconds": round(job_s, 3),
                "spark_alone_s": round(alone_s, 3),
                "ratio": round(job_s / alone_s, 3),
                "exchange_seconds": round(exchanges_s, 3),
                "exchange_ratio": round(exchanges_s / alone_s, 3),
            }


def write_parquet(directory: Path, rows: int) -> None:
    """Writes the input, in files of four million rows."""
    directory.mkdir()
    batches = input_batches(rows, _KEYS)
    number = 0
    while some := list(islice(batches, _FILE_BATCHES)):
        pq.write_table(pa.Table.from_batches(some), directory / f"{number}.parquet")
        number += 1


def _alone(source: Path, target: Path, cores: int) -> tuple[float, int]:
    """The program without us: seconds, and rows that it has left."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.spark", str(source), str(target), str(cores)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(json.loads(found.stdout)["seconds"]), _taken(target)


def _taken(directory: Path) -> int:
    """How many rows there are; the files go."""
    files = [path for path in directory.rglob("*.parquet") if not path.name.startswith(".")]
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    shutil.rmtree(directory)
    return rows


def _job(
    cluster: LocalCluster, source: Path, target: Path, cores: int, *, has_filters: bool
) -> tuple[float, int]:
    """The job: seconds without those that Spark took to be there, and rows that it has left."""
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
        handle = env.submit("bulk")
        handle.wait(timeout=_WAIT_S)
        with closing(Client(cluster.address)) as client:
            summary = client.job(handle.job_id).summary
            await_free_slots(client)
        start_s = float(started.read_text())
    seconds = (summary.ended_at_ms - summary.running_at_ms) / 1000 - start_s
    return seconds, _taken(target)


def _run_alone(source: str, target: str, cores: int) -> float:
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        settings = session_settings(Configuration.from_mapping({}), "alone", cores, Path(name))
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        try:
            started_s = time.perf_counter()
            frame = session.read.parquet(source)
            bulk(Path(name) / "started", frame).write.parquet(target)
            return time.perf_counter() - started_s
        finally:
            session.stop()


if __name__ == "__main__":
    print(json.dumps({"seconds": _run_alone(sys.argv[1], sys.argv[2], int(sys.argv[3]))}))
