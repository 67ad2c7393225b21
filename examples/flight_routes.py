"""Enrichment: each flight with the yearly traffic of its route, from a table that is read whole first.

    python examples/flight_routes.py [--flights flights.json --routes routes.csv]

A flight is an object with `delay` (minutes), `origin`, `destination`; a route is a line with `origin`, `destination`,
`count`. Without files it makes some.
"""

import argparse
import csv
import json
import random
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import penstock as ps

AIRPORTS = ("ATL", "DEN", "DFW", "JFK", "LAX", "ORD", "SEA", "SFO")


class Traffic(ps.BroadcastProcessFunction):
    """Looks up the traffic of a flight's route."""

    flights_per_year = ps.BroadcastState("flights per year", pa.string(), pa.int64())

    def process_broadcast(self, row, ctx, out):
        self.flights_per_year.put(f"{row.origin}-{row.destination}", row.count)

    def process(self, row, ctx, out):
        route = f"{row.origin}-{row.destination}"
        out.emit(route=route, delay=row.delay, traffic=self.flights_per_year.get(route))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flights", help="JSON lines or one JSON array; default: made up")
    parser.add_argument("--routes", help="CSV; default: made up")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory, ps.Environment(parallelism=2) as env:
        made = make_input(Path(directory))
        flights = env.read_json(options.flights or made[0])
        routes = env.read_csv(options.routes or made[1])
        rows = (
            flights.connect(routes.broadcast(load_first=True))
            .process(Traffic(), schema={"route": str, "delay": int, "traffic": int})
            .uid("traffic")
            .collect()
        )
        env.execute("flight-routes")

    known = [row for row in rows if row.traffic is not None]
    busy = [row for row in known if row.traffic >= 1_000]
    quiet = [row for row in known if row.traffic < 1_000]
    for name, part in (("busy", busy), ("quiet", quiet)):
        late = sum(row.delay > 15 for row in part)
        print(
            f"{name + ' routes:':14}{late:6,} of {len(part):6,} flights more than 15 minutes late"
        )
    print(
        f"{len(rows):,} flights, {len(rows) - len(known):,} on routes that the table does not have"
    )
    return 0


def make_input(directory: Path) -> tuple[str, str]:
    """Files of flights and of routes, one of which is missing."""
    draw = random.Random(2001)
    routes = [(a, b) for a in AIRPORTS for b in AIRPORTS if a != b]
    flights = directory / "flights.json"
    with flights.open("w") as file:
        for _ in range(20_000):
            origin, destination = draw.choice(routes)
            delay = int(draw.gauss(5, 20))
            flight = {"delay": delay, "origin": origin, "destination": destination}
            file.write(json.dumps(flight) + "\n")
    table = directory / "routes.csv"
    with table.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("origin", "destination", "count"))
        lines.writerows((*route, draw.randrange(5_000)) for route in routes[1:])
    return str(flights), str(table)


if __name__ == "__main__":
    sys.exit(main())
