"""Mean delay per origin and hour over a JSON file of flights.

    python examples/flight_delays.py flights.json [--out DIR]

A flight is an object with `date` ("YYYY/MM/DD HH:MM"), `delay` (minutes), `origin`, `destination`.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

import penstock as ps
from penstock import col


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("flights", help="JSON lines or one JSON array")
    parser.add_argument("--out", help="write the result as Parquet as well")
    options = parser.parse_args()

    env = ps.Environment(parallelism=2)
    delays = (
        env.read_json(options.flights)
        .with_columns(departure=col("date").strptime(format="%Y/%m/%d %H:%M", unit="ms"))
        .with_event_time("departure", out_of_orderness="1 min")
        .key_by("origin")
        .window(ps.tumbling("1h"))
        .aggregate(flights=ps.count(), mean_delay=ps.mean("delay"))
        .uid("hourly-delay")
    )
    rows = delays.collect()
    if options.out:
        delays.write_parquet(options.out)
    env.execute("flight-delays")

    table = Table(title="Worst hours")
    for name in ("origin", "hour", "flights", "mean delay (min)"):
        table.add_column(name, justify="right")
    busy = [row for row in rows if row.flights >= 3]
    for row in sorted(busy, key=lambda row: -row.mean_delay)[:15]:
        table.add_row(
            row.origin,
            f"{row.window_start:%Y-%m-%d %H:%M}",
            str(row.flights),
            f"{row.mean_delay:.1f}",
        )
    Console().print(table)
    print(f"{len(rows):,} hours, {sum(row.flights for row in rows):,} flights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
