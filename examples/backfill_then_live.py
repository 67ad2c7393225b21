"""History first, then live: a year of bids is aggregated into a savepoint, and a job goes on from there.

The history is aggregated by Spark (`--engine spark`: any cluster would do) or by plain pyarrow, and becomes the state of the
job's windows. The savepoint says which files that was, so the job begins with the first file that is not among them. What it
writes is compared with what the same job writes that has streamed everything.

    python examples/backfill_then_live.py [--days 365] [--bids 2000] [--engine arrow|spark] [--dir .penstock/backfill]
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import penstock as ps

DAY_MS = 24 * 60 * 60 * 1000
AUCTIONS = 50
AGGREGATES = {"bids": ps.count(), "average": ps.mean("price"), "best": ps.max("price")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--bids", type=int, default=2000, help="a day")
    parser.add_argument("--engine", choices=["arrow", "spark"], default="arrow")
    parser.add_argument("--dir", type=Path, default=Path(".penstock/backfill"))
    options = parser.parse_args()
    home = options.dir.absolute()
    shutil.rmtree(home, ignore_errors=True)
    bids = home / "bids"
    write_bids(bids, range(options.days), options.bids)

    history = ps.files_done(bids)  # the cut: these files, and no others
    spark = session() if options.engine == "spark" else None
    table = by_arrow(history) if spark is None else by_spark(spark, history)
    job = ps.Environment(parallelism=2)
    build(job, bids, home / "after-history")
    savepoint = ps.write_savepoint(
        home / "savepoint",
        {"daily": {"slices": table}},
        job=job,
        sources={"bids": history},
    )
    if spark is not None:
        spark.stop()
    print(f"{len(history)} files of history are in {savepoint}")

    write_bids(bids, range(options.days - 1, options.days + 2), options.bids, "live")
    with job:
        job.submit("live", from_savepoint=Path(savepoint)).wait(300)
    with ps.Environment(parallelism=2) as everything:
        build(everything, bids, home / "all-streamed")
        everything.execute("all of it")
    live, streamed = result(home / "after-history"), result(home / "all-streamed")
    assert live.equals(streamed), "the numbers differ"
    print(
        f"{live.num_rows} windows, {sum(live['bids'].to_pylist())} bids: the same as when all is streamed"
    )
    return 0


def build(env: ps.Environment, bids: Path, output: Path) -> None:
    """The job: what was bid on each auction on each day."""
    rows = (
        env.read_parquet(bids).uid("bids").with_event_time("ts", out_of_orderness="1d").uid("time")
    )
    daily = rows.key_by("auction").window(ps.tumbling("1d")).aggregate(**AGGREGATES).uid("daily")
    daily.write_parquet(output).uid("files")


def write_bids(directory: Path, days: Iterable[int], count: int, name: str = "history") -> None:
    """A file of bids per day."""
    directory.mkdir(parents=True, exist_ok=True)
    for day in days:
        random = np.random.default_rng([day, len(name)])
        columns = {
            "auction": random.integers(0, AUCTIONS, count),
            "price": random.integers(1, 10_000, count),
            "ts": pa.array(day * DAY_MS + random.integers(0, DAY_MS, count)).cast(
                pa.timestamp("ms", "UTC")
            ),
        }
        pq.write_table(pa.table(columns), directory / f"{name}-{day:04}.parquet")


def by_arrow(history: Iterable[str]) -> pa.Table:
    """What the windows hold after the history."""
    rows = ds.dataset(list(history), format="parquet").to_table()
    day = pa.compute.floor_temporal(rows["ts"], unit="day")
    columns = ps.accumulators(**AGGREGATES)
    wanted = [
        ([], "count_all") if column is None else (column, function)
        for function, column in columns.values()
    ]
    grouped = rows.append_column("window_start", day).group_by(["auction", "window_start"])
    return grouped.aggregate(wanted).rename_columns(["auction", "window_start", *columns])


def session():
    """A session of Spark in this process, which nobody outside of this machine reaches."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else "python3", whichever that is
    builder = SparkSession.builder.master("local[2]").appName("backfill")
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def by_spark(spark, history: Iterable[str]):
    """The same, on Spark."""
    from pyspark.sql import functions as f

    rows = spark.read.parquet(*history)
    columns = ps.accumulators(**AGGREGATES)
    wanted = [
        f.expr(f"{function}({column or '*'})").alias(name)
        for name, (function, column) in columns.items()
    ]
    day = f.date_trunc("day", "ts").alias("window_start")
    return rows.groupBy("auction", day).agg(*wanted)


def result(output: Path) -> pa.Table:
    """What a job has written, in order."""
    table = ds.dataset(output, format="parquet").to_table()
    return table.sort_by([("window_start", "ascending"), ("auction", "ascending")])


if __name__ == "__main__":
    sys.exit(main())
