"""State into Spark and out of it: how fast a savepoint is read as a DataFrame, and written from one.

    python -m benchmarks.spark_state [--directory DIR] [--mb N] [--cores N]

A savepoint of a ``ValueState`` (an integer key, a text of 40 letters) in two ranges of key-groups. Prints one JSON object:
``mb`` of its files, and MB of them per second: ``read_mb_s`` as a DataFrame into Spark's sink that keeps nothing,
``parquet_mb_s`` of the same rows as Parquet by Spark's own reader in the same run, ``write_mb_s`` of the DataFrame of that
Parquet into a new savepoint. ``..._mb_per_cpu_s`` are MB per CPU second of this process, the JVM and its workers
together, which other work on the machine changes less. Starting the session is not counted; the first of each is not, either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import penstock as ps

_ROW_BYTES = 60
_BATCH_ROWS = 1 << 16
_LETTERS = 40


class Kept(ps.KeyedProcessFunction):
    """Keeps a text per key."""

    text = ps.ValueState("text", pa.string())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.text.update(row.text)


def job() -> ps.Environment:
    """The job whose savepoint it is."""
    env = ps.Environment(parallelism=2)
    rows = env.from_rows([{"k": 1, "text": ""}], schema={"k": "int64", "text": "string"})
    kept = rows.uid("rows").key_by("k").process(Kept(), schema={"k": "int64"})
    kept.uid("kept").discard()
    return env


def batches(count: int) -> Iterator[pa.RecordBatch]:
    """So many rows."""
    generator = np.random.default_rng(1)
    for start in range(0, count, _BATCH_ROWS):
        rows = min(_BATCH_ROWS, count - start)
        letters = generator.integers(97, 123, rows * _LETTERS, np.uint8)
        offsets = np.arange(rows + 1, dtype=np.int32) * _LETTERS
        texts = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(letters))
        yield pa.record_batch({"k": pa.array(range(start, start + rows)), "value": texts})


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """How long it takes, and how many CPU seconds of all processes."""
    started_s, cpu_s = time.perf_counter(), _cpu_seconds()
    work()
    return time.perf_counter() - started_s, _cpu_seconds() - cpu_s


def _cpu_seconds() -> float:
    """Of this process, and those that it has started and their workers."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = process.cpu_times()
            total += spent.user + spent.system
            if process != own:  # workers that have ended
                total += spent.children_user + spent.children_system
    return total


def _session(cores: int) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
    }
    builder = SparkSession.builder.master(f"local[{cores}]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def measure(directory: Path, size_mb: int, cores: int) -> dict[str, float]:
    """The rates."""
    env = job()
    rows = size_mb * 1_000_000 // _ROW_BYTES
    first = ps.write_savepoint(directory / "first", {"kept": {"text": batches(rows)}}, job=env)
    files = [one for one in Path(first).rglob("*") if one.is_file()]
    of_files = sum(one.stat().st_size for one in files) / 1e6
    spark = _session(cores)
    try:
        state = ps.read_state(spark, first, "kept", "text")
        state.limit(1).collect()
        plain = str(directory / "plain")
        state.select("k", "value").write.parquet(plain)
        parquet = spark.read.parquet(plain)
        read = seconds(lambda: state.write.format("noop").mode("overwrite").save())
        plain_read = seconds(lambda: parquet.write.format("noop").mode("overwrite").save())
        given = {"kept": {"text": parquet}}
        write = seconds(lambda: ps.write_savepoint(directory / "second", given, job=env))
    finally:
        spark.stop()
    rates = {
        f"{name}_{unit}": round(of_files / taken, 1)
        for name, both in (("read", read), ("parquet", plain_read), ("write", write))
        for unit, taken in zip(("mb_s", "mb_per_cpu_s"), both, strict=True)
    }
    return {"mb": round(of_files, 1), "rows": rows, **rates}


def main() -> None:
    """Measures, and prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--cores", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        print(json.dumps(measure(Path(directory), asked.mb, asked.cores)))


if __name__ == "__main__":
    main()
