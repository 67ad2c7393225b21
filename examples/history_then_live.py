"""History first, then live, in one job: a year of bids out of Spark, and then the files that come.

The history goes through an exchange that is complete before it is read: out of Spark (`--engine spark`), or what Penstock has read, over a
blocking one. In a union with the live stream it is read first, and the live source is not opened before it has been read to its end.
Where live begins is a position of its source, written into a savepoint: behind the files of the history. What comes out
is compared with what the same windows say when all has been streamed.

    python examples/history_then_live.py [--days 365] [--bids 2000] [--engine penstock|spark] [--dir .penstock/history]
"""

import argparse
import shutil
import sys
from pathlib import Path

import pyarrow as pa
from backfill_then_live import AGGREGATES, build, result, write_bids

import penstock as ps

BIDS = {"auction": "int64", "price": "int64", "ts": pa.timestamp("ms", "UTC")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--bids", type=int, default=2000, help="a day")
    parser.add_argument("--engine", choices=["penstock", "spark"], default="penstock")
    parser.add_argument("--dir", type=Path, default=Path(".penstock/history"))
    options = parser.parse_args()
    home = options.dir.absolute()
    shutil.rmtree(home, ignore_errors=True)
    bids = home / "bids"
    write_bids(bids, range(options.days), options.bids)

    files = ps.files_done(bids)  # the cut: these files, and no others
    with ps.Environment(parallelism=2) as env:
        if options.engine == "spark":
            rows = env.spark(lambda spark: spark.read.parquet(*files), schema=BIDS)
            history = rows.with_event_time("ts", out_of_orderness="1d").uid("past-time")
        else:
            rows = env.read_parquet(bids / "history-*.parquet").uid("past")
            history = rows.with_event_time("ts", out_of_orderness="1d").uid("past-time")
            history = history.exchange("blocking")
        live = env.read_parquet(bids).uid("bids")
        live = live.with_event_time("ts", out_of_orderness="1d").uid("time")
        daily = history.union(live).key_by("auction").window(ps.tumbling("1d"))
        daily.aggregate(**AGGREGATES).uid("daily").write_parquet(home / "in-one-job").uid("files")
        cut = ps.write_savepoint(home / "cut", {}, job=env, sources={"bids": files})
        print(f"live begins behind {len(files)} files")

        write_bids(bids, range(options.days - 1, options.days + 2), options.bids, "live")
        env.submit("history, then live", from_savepoint=Path(cut)).wait(300)
    with ps.Environment(parallelism=2) as everything:
        build(everything, bids, home / "all-streamed")
        everything.execute("all of it")
    one_job, streamed = result(home / "in-one-job"), result(home / "all-streamed")
    assert one_job.equals(streamed), "the numbers differ"
    print(
        f"{streamed.num_rows} windows, {sum(streamed['bids'].to_pylist())} bids: the same as when all is streamed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
