"""Aim: jobs over real data (US flights of 2001) say what DuckDB says.

Method: the same question in both; the input is one JSON array, or the same rows cut into files that
overlap in time. Without the data (see ``data_dir``) these tests skip and say so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.support.jobs import assert_same_rows, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def flights_json(data_dir: Path) -> Path:
    return data_dir / "flights-20k.json"


@pytest.fixture(scope="module")
def db(flights_json: Path, data_dir: Path) -> duckdb.DuckDBPyConnection:
    """DuckDB with the tables ``flights`` and ``airports``."""
    connection = duckdb.connect()
    connection.sql("SET TimeZone = 'UTC'")
    connection.sql(
        "CREATE TABLE flights AS SELECT row_number() OVER () AS n, delay, distance, origin, "
        "destination, strptime(date, '%Y/%m/%d %H:%M') AS departure "
        f"FROM read_json('{flights_json}', columns={{date: 'VARCHAR', delay: 'BIGINT', "
        "distance: 'BIGINT', origin: 'VARCHAR', destination: 'VARCHAR'})"
    )
    connection.sql(
        f"CREATE TABLE airports AS SELECT * FROM read_csv('{data_dir / 'flights-airport.csv'}')"
    )
    return connection


@pytest.fixture(scope="module")
def flights_dir(db: duckdb.DuckDBPyConnection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flights dealt out to four Parquet files, so that all of them span all the time."""
    directory = tmp_path_factory.mktemp("flights")
    for part in range(4):
        table = db.sql(f"SELECT * FROM flights WHERE n % 4 = {part} ORDER BY departure")
        pa.parquet.write_table(table.to_arrow_table(), directory / f"{part}.parquet")
    return directory


def asked(db: duckdb.DuckDBPyConnection, question: str) -> list[Row]:
    relation = db.sql(question)
    names = relation.columns
    return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]


def without_zones(rows: Sequence[Row]) -> list[Row]:
    """DuckDB's times have no zone; all are UTC."""
    return [
        {k: v.replace(tzinfo=None) if hasattr(v, "tzinfo") else v for k, v in row.items()}
        for row in rows
    ]


def rounded(rows: Sequence[Row]) -> list[Row]:
    return [
        {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    ]


def timed(env: ps.Environment, directory: Path) -> ps.Stream:
    return env.read_parquet(str(directory)).with_event_time("departure", out_of_orderness="1 min")


def test_the_json_array_is_read_whole(
    env: ps.Environment, flights_json: Path, db: duckdb.DuckDBPyConnection
) -> None:
    stream = env.read_json(str(flights_json)).with_columns(
        date=col("date").strptime(format="%Y/%m/%d %H:%M", unit="us")
    )
    found = rows_of(env, stream)
    assert len(found) == 20_000
    expected = asked(
        db, "SELECT departure AS date, delay, distance, origin, destination FROM flights"
    )
    assert_same_rows(found, expected)


def test_the_csv_file_is_read_whole(
    env: ps.Environment, data_dir: Path, db: duckdb.DuckDBPyConnection
) -> None:
    found = rows_of(env, env.read_csv(str(data_dir / "flights-airport.csv")))
    assert_same_rows(found, asked(db, "SELECT * FROM airports"))
    routes = env.read_csv(str(data_dir / "flights-airport.csv")).key_by("origin")
    rows = rows_of(env, routes.aggregate(total=ps.sum("count"), routes=ps.count()))
    last = {row["origin"]: row for row in rows}
    expected = asked(
        db,
        "SELECT origin, sum(count)::BIGINT AS total, count(*) AS routes FROM airports GROUP BY ALL",
    )
    assert_same_rows(last.values(), expected)


def test_nested_json_of_earthquakes(env: ps.Environment, data_dir: Path, tmp_path: Path) -> None:
    features = json.loads((data_dir / "earthquakes.json").read_text())["features"]
    (tmp_path / "features.json").write_text(json.dumps(features))
    stream = (
        env.read_json(str(tmp_path / "features.json"))
        .select(
            ts=col("properties")["time"],
            mag=col("properties")["mag"].cast("float64"),
            depth=col("geometry")["coordinates"][2].cast("float64"),
        )
        .with_event_time("ts", out_of_orderness="8d")
        .window(ps.tumbling("1d"))
        .aggregate(n=ps.count(), strongest=ps.max("mag"), deepest=ps.max("depth"))
        .select("n", "strongest", "deepest", day=col("window_start").cast("int64") // 86_400_000)
    )
    days: dict[int, list[Row]] = {}
    for feature in features:
        days.setdefault(feature["properties"]["time"] // 86_400_000, []).append(feature)
    expected = [
        {
            "n": len(found),
            "strongest": max(
                float(f["properties"]["mag"]) for f in found if f["properties"]["mag"] is not None
            ),
            "deepest": max(float(f["geometry"]["coordinates"][2]) for f in found),
            "day": day,
        }
        for day, found in days.items()
    ]
    assert_same_rows(rows_of(env, stream), expected)


@pytest.mark.parametrize("source", ["json", "parquet"])
def test_hourly_delays_per_origin(
    env: ps.Environment,
    flights_json: Path,
    flights_dir: Path,
    db: duckdb.DuckDBPyConnection,
    source: str,
) -> None:
    if source == "json":
        stream = (
            env.read_json(str(flights_json))
            .with_columns(departure=col("date").strptime(format="%Y/%m/%d %H:%M", unit="ms"))
            .with_event_time("departure", out_of_orderness="1 min")
        )
    else:
        stream = timed(env, flights_dir)
    windows = stream.key_by("origin").window(ps.tumbling("1h"))
    found = rows_of(
        env,
        windows.aggregate(
            flights=ps.count(),
            mean_delay=ps.mean("delay"),
            worst=ps.max("delay"),
            destinations=ps.count_distinct("destination"),
        ),
    )
    expected = asked(
        db,
        "SELECT origin, time_bucket(INTERVAL 1 HOUR, departure) AS window_start, "
        "window_start + INTERVAL 1 HOUR AS window_end, count(*) AS flights, "
        "avg(delay) AS mean_delay, max(delay) AS worst, "
        "count(DISTINCT destination) AS destinations FROM flights GROUP BY 1, 2",
    )
    assert_same_rows(rounded(without_zones(found)), rounded(expected))


def test_sliding_days_per_route(
    env: ps.Environment, flights_dir: Path, db: duckdb.DuckDBPyConnection
) -> None:
    windows = timed(env, flights_dir).key_by("origin", "destination")
    found = rows_of(
        env,
        windows.window(ps.sliding("3d", "1d")).aggregate(
            flights=ps.count(), miles=ps.sum("distance")
        ),
    )
    expected = asked(
        db,
        "SELECT origin, destination, "
        "date_trunc('day', departure) - to_days(back::INTEGER) AS window_start, "
        "window_start + INTERVAL 3 DAY AS window_end, count(*) AS flights, "
        "sum(distance)::BIGINT AS miles "
        "FROM flights, range(3) AS r(back) GROUP BY 1, 2, 3",
    )
    assert_same_rows(without_zones(found), expected)


def test_sessions_of_an_airport(
    env: ps.Environment, flights_dir: Path, db: duckdb.DuckDBPyConnection
) -> None:
    windows = timed(env, flights_dir).key_by("destination").window(ps.session("4h"))
    found = rows_of(env, windows.aggregate(flights=ps.count(), latest=ps.max("departure")))
    expected = asked(
        db,
        "WITH gaps AS (SELECT destination, departure, departure - lag(departure) OVER w "
        "> INTERVAL 4 HOUR AS is_new FROM flights WINDOW w AS (PARTITION BY destination "
        "ORDER BY departure)), numbered AS (SELECT destination, departure, "
        "count(*) FILTER (is_new) OVER (PARTITION BY destination ORDER BY departure) AS session "
        "FROM gaps) SELECT destination, min(departure) AS window_start, "
        "max(departure) + INTERVAL 4 HOUR AS window_end, count(*) AS flights, "
        "max(departure) AS latest FROM numbered GROUP BY destination, session",
    )
    assert_same_rows(without_zones(found), expected)


def test_the_busiest_origin_of_each_day(
    env: ps.Environment, flights_dir: Path, db: duckdb.DuckDBPyConnection
) -> None:
    per_origin = (
        timed(env, flights_dir)
        .key_by("origin")
        .window(ps.tumbling("1d"))
        .aggregate(flights=ps.count())
    )
    found = rows_of(
        env,
        per_origin.window(ps.tumbling("1d")).aggregate(
            most=ps.max("flights"), origins=ps.count(), flights=ps.sum("flights")
        ),
    )
    expected = asked(
        db,
        "WITH days AS (SELECT origin, date_trunc('day', departure) AS day, count(*) AS flights "
        "FROM flights GROUP BY ALL) SELECT day AS window_start, day + INTERVAL 1 DAY AS window_end, "
        "max(flights) AS most, count(*) AS origins, sum(flights)::BIGINT AS flights "
        "FROM days GROUP BY day",
    )
    assert_same_rows(without_zones(found), expected)


class Median(ps.AggregateFunction):
    """Needs all values: nothing that could be pre-aggregated to a number."""

    @override
    def create_accumulator(self) -> list[int]:
        return []

    @override
    def add(self, accumulator: list[int], value: Any) -> list[int]:
        return [*accumulator, value]

    @override
    def merge(self, accumulator: list[int], other: list[int]) -> list[int]:
        return accumulator + other

    @override
    def result(self, accumulator: list[int]) -> float:
        values = sorted(accumulator)
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        return (low + high) / 2


class Extremes(ps.WindowFunction):
    """The longest and the shortest flight."""

    @override
    def process(
        self, key: Any, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        by_length = sorted(rows, key=lambda row: (row.distance, row.n))
        out.emit(week=window.start_ms, origin=key, shortest=by_length[0].n, longest=by_length[-1].n)


def test_functions_of_the_users_own_over_weeks(
    env: ps.Environment, flights_dir: Path, db: duckdb.DuckDBPyConnection
) -> None:
    keyed = timed(env, flights_dir).key_by("origin")
    weeks = keyed.window(ps.tumbling("7d", offset="4d"))  # from Monday to Sunday
    medians = weeks.aggregate(median=ps.aggregate(Median(), "delay")).collect()
    schema = {"week": "int64", "origin": "string", "shortest": "int64", "longest": "int64"}
    extremes = weeks.process(Extremes(), schema=schema).collect()
    run(env)
    expected = asked(
        db,
        "SELECT origin, date_trunc('week', departure) AS window_start, "
        "window_start + INTERVAL 7 DAY AS window_end, median(delay) AS median "
        "FROM flights GROUP BY 1, 2",
    )
    assert_same_rows(without_zones(medians.to_pylist()), expected)
    expected = asked(
        db,
        "SELECT epoch_ms(date_trunc('week', departure)) AS week, origin, "
        "arg_min(n, (distance, n)) AS shortest, arg_max(n, (distance, n)) AS longest "
        "FROM flights GROUP BY 1, 2",
    )
    assert_same_rows(extremes.to_pylist(), expected)


def test_delays_to_parquet_by_origin_and_back(
    env: ps.Environment, flights_dir: Path, db: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    late = env.read_parquet(str(flights_dir)).filter(
        (col("delay") > 30) & col("origin").isin(["ATL", "ORD", "LAX"])
    )
    late.with_columns(hours=col("delay") / 60).write_parquet(str(tmp_path), partition_by=["origin"])
    run(env)
    found = duckdb.sql(
        f"SELECT origin, count(*) AS flights, sum(hours) AS hours, max(departure) AS latest FROM "
        f"read_parquet('{tmp_path}/**/*.parquet', hive_partitioning=true) GROUP BY ALL"
    ).fetchall()
    wanted = db.sql(
        "SELECT origin, count(*), sum(delay / 60), max(departure) FROM flights "
        "WHERE delay > 30 AND origin IN ('ATL', 'ORD', 'LAX') GROUP BY ALL"
    ).fetchall()
    assert len(found) == 3
    for row, other in zip(sorted(found), sorted(wanted), strict=True):
        assert (row[0], row[1], row[3]) == (other[0], other[1], other[3])
        assert math.isclose(row[2], other[2])


class _Traffic(ps.BroadcastProcessFunction):
    counts = ps.BroadcastState("counts", pa.string(), pa.int64())

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.counts.put(row.origin + row.destination, row.count)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(count=self.counts.get(row.origin + row.destination))


@pytest.mark.parametrize("mode", ["streaming", "batch"])
def test_flights_are_enriched_by_a_table_that_is_read_first(
    env: ps.Environment, db: duckdb.DuckDBPyConnection, data_dir: Path, mode: str
) -> None:
    env.set_runtime_mode(mode)
    flights = env.read_json(str(data_dir / "flights-20k.json"))
    routes = env.read_csv(str(data_dir / "flights-airport.csv"))
    side = routes.broadcast(load_first=True) if mode == "streaming" else routes.broadcast()
    found = rows_of(env, flights.connect(side).process(_Traffic(), schema={"count": int}))
    assert_same_rows(
        found,
        db.sql("SELECT count FROM flights LEFT JOIN airports USING (origin, destination)")
        .to_arrow_table()
        .to_pylist(),
    )
    assert sum(row["count"] is None for row in found) == 1_046
