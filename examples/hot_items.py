"""The main job: the most wanted auctions in windows of ten seconds.

Generates Nexmark events as Parquet, starts a local cluster of real daemons (one JobManager, two
TaskManagers), runs bids -> filter -> key_by auction -> 10 s event-time windows -> count, sum, max ->
Parquet, and checks the result against a plain pyarrow computation.

    python examples/hot_items.py [--events 5000000] [--dir .penstock/demo] [--parallelism 2]
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from rich.console import Console
from rich.table import Table

import penstock as ps
from penstock import col
from penstock.client.progress import ProgressDisplay, rows_read
from penstock.local.local_cluster import LocalCluster
from penstock.nexmark.generator import write_nexmark

MIN_PRICE = 100
WINDOW_MS = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--dir", type=Path, default=Path(".penstock/demo"))
    parser.add_argument("--parallelism", type=int, default=2)
    options = parser.parse_args()
    events_dir = (options.dir / f"events-{options.events}").absolute()
    output_dir = (options.dir / "hot-items").absolute()

    if not (events_dir / "bids").exists():
        print(f"generating {options.events:,} Nexmark events in {events_dir}")
        write_nexmark(options.events, events_dir)
    shutil.rmtree(output_dir, ignore_errors=True)

    cluster = LocalCluster(options.dir / "cluster")
    print(f"starting a local cluster in {cluster.directory}")
    cluster.start(taskmanagers=2, slots=2, overrides={"jobmanager.rpc.port": "0"})
    try:
        seconds, rows = run(cluster.address, events_dir, output_dir, options.parallelism)
    finally:
        cluster.stop()

    result = ds.dataset(output_dir, format="parquet").to_table()
    print_top_ten(result)
    print(f"{rows:,} bids in {seconds:.2f} s: {rows / seconds:,.0f} rows/s")
    print(f"{result.num_rows:,} result rows in {output_dir}")
    return verify(result, events_dir)


def run(address: str, events_dir: Path, output_dir: Path, parallelism: int) -> tuple[float, int]:
    """Runs the job; returns how long it took and how many bids it read."""
    env = ps.Environment(address, parallelism=parallelism)
    bids = env.read_parquet(str(events_dir / "bids")).with_event_time("ts", out_of_orderness="5s")
    hot = (
        bids.filter(col("price") > MIN_PRICE)
        .key_by("auction")
        .window(ps.tumbling("10s"))
        .aggregate(bids=ps.count(), total=ps.sum("price"), best=ps.max("price"))
        .uid("hot-items")
    )
    hot.write_parquet(str(output_dir))
    started = time.monotonic()
    handle = env.submit("hot-items")
    with ProgressDisplay() as display:
        handle.wait(on_progress=display)
    return time.monotonic() - started, rows_read(handle.details())


def print_top_ten(result: pa.Table) -> None:
    top = result.sort_by([("bids", "descending"), ("total", "descending")]).slice(0, 10)
    table = Table(title="Most wanted auctions in a window of 10 s")
    for name in ("auction", "window_start", "bids", "total", "best"):
        table.add_column(name, justify="right")
    for row in top.to_pylist():
        table.add_row(
            str(row["auction"]),
            f"{row['window_start']:%H:%M:%S}",
            f"{row['bids']:,}",
            f"{row['total']:,}",
            f"{row['best']:,}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def verify(result: pa.Table, events_dir: Path) -> int:
    """Computes the same with pyarrow alone and compares."""
    bids = ds.dataset(events_dir / "bids").to_table(columns=["auction", "price", "ts"])
    bids = bids.filter(pc.greater(bids["price"], MIN_PRICE))
    ts = bids["ts"].cast(pa.int64())
    start = pc.multiply(pc.divide(ts, WINDOW_MS), WINDOW_MS)
    expected = (
        bids.append_column("window_start", start)
        .group_by(["auction", "window_start"])
        .aggregate([("price", "count"), ("price", "sum"), ("price", "max")])
        .rename_columns({"price_count": "bids", "price_sum": "total", "price_max": "best"})
    )
    names = ["auction", "window_start", "bids", "total", "best"]
    actual = result.set_column(
        result.schema.get_field_index("window_start"),
        "window_start",
        result["window_start"].cast(pa.int64()),
    )
    order = [("auction", "ascending"), ("window_start", "ascending")]
    same = (
        actual.select(names).sort_by(order).combine_chunks().cast(expected.select(names).schema)
        == expected.select(names).sort_by(order).combine_chunks()
    )
    if not same:
        print(f"WRONG: pyarrow alone finds {expected.num_rows:,} rows that differ from the result")
        return 1
    print(f"verified: equal to the {expected.num_rows:,} rows that pyarrow alone computes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
