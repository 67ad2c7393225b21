"""Aim: windows of every kind over finished data come to what plain Python says, whatever the order of the
files, the parallelism, and whether rows are pre-aggregated before the exchange.

Method: out-of-order rows in several files whose names run against their times; nothing may be late.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.bids import DISORDER_MS, cut, make_bids, to_table, write_table
from tests.support.expected_windows import (
    Aggregates,
    counted,
    groups,
    sessions,
    sliced,
    whole,
)
from tests.support.jobs import DEADLINE_S, assert_same_rows, rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

BIDS = make_bids(1_500)
Row = dict[str, Any]


def values(rows: list[Row], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def numbers(rows: list[Row], column: str) -> list[float]:
    return [value for value in values(rows, column) if not math.isnan(value)]


def smallest(rows: list[Row]) -> float | None:
    return min(numbers(rows, "score"), default=math.nan if values(rows, "score") else None)


def mean(rows: list[Row], column: str) -> float | None:
    found = values(rows, column)
    return sum(found) / len(found) if found else None


def distinct(rows: list[Row], column: str) -> int:
    return len({"NaN" if v != v else v for v in values(rows, column)})


class Longest(ps.AggregateFunction):
    """The longest text, in the user's own words."""

    @override
    def create_accumulator(self) -> list[str]:
        return []

    @override
    def add(self, accumulator: list[str], value: str | None) -> list[str]:
        return accumulator if value is None else [max([*accumulator, value], key=sort_key)]

    @override
    def merge(self, accumulator: list[str], other: list[str]) -> list[str]:
        both = [*accumulator, *other]
        return [max(both, key=sort_key)] if both else []

    @override
    def result(self, accumulator: list[str]) -> str | None:
        return accumulator[0] if accumulator else None


def sort_key(text: str) -> tuple[int, str]:
    return len(text), text


NUMBERS: dict[str, ps.Aggregate] = {
    "rows": ps.count(),
    "prices": ps.count("price"),
    "total": ps.sum("price"),
    "low": ps.min("price"),
    "best": ps.max("price"),
    "average": ps.mean("price"),
    "points": ps.sum(col("price").coalesce(0) * 2),
    "lowest": ps.min("score"),
    "latest": ps.max("at"),
}
NUMBERS_ORACLE: Aggregates = {
    "rows": len,
    "prices": lambda rows: len(values(rows, "price")),
    "total": lambda rows: sum(values(rows, "price")) if values(rows, "price") else None,
    "low": lambda rows: min(values(rows, "price"), default=None),
    "best": lambda rows: max(values(rows, "price"), default=None),
    "average": lambda rows: mean(rows, "price"),
    "points": lambda rows: sum(2 * (row["price"] or 0) for row in rows),
    "lowest": smallest,
    "latest": lambda rows: max(row["at"] for row in rows),
}
OTHERS: dict[str, ps.Aggregate] = {
    "rows": ps.count(),
    "bidders": ps.count_distinct("bidder"),
    "scores": ps.count_distinct("score"),
    "largest_name": ps.max("bidder"),
    "longest": ps.aggregate(Longest(), "bidder", type=pa.string()),
}
OTHERS_ORACLE: Aggregates = {
    "rows": len,
    "bidders": lambda rows: distinct(rows, "bidder"),
    "scores": lambda rows: distinct(rows, "score"),
    "largest_name": lambda rows: max(values(rows, "bidder"), key=str.encode, default=None),
    "longest": lambda rows: max(values(rows, "bidder"), key=sort_key, default=None),
}
SETS = [(NUMBERS, NUMBERS_ORACLE), (OTHERS, OTHERS_ORACLE)]

WINDOWS: dict[str, tuple[ps.Window, dict[str, int]]] = {
    "tumbling": (ps.tumbling("10s"), {"size_ms": 10_000}),
    "tumbling with offset": (
        ps.tumbling("7s", offset="-2s"),
        {"size_ms": 7_000, "offset_ms": -2_000},
    ),
    "sliding": (ps.sliding("20s", "5s"), {"size_ms": 20_000, "slide_ms": 5_000}),
    "sliding, uneven": (
        ps.sliding("9s", "4s", offset="1s"),
        {"size_ms": 9_000, "slide_ms": 4_000, "offset_ms": 1_000},
    ),
    "session": (ps.session("700ms"), {"gap_ms": 700}),
}


def expected_windows(
    name: str, rows: Sequence[Row], keys: Sequence[str], aggregates: Aggregates
) -> list[Row]:
    sizes = WINDOWS[name][1]
    oracle: Callable[..., list[Row]] = sessions if "gap_ms" in sizes else sliced
    return oracle(rows, keys, aggregates, time=lambda row: row["ts"], **sizes)


def write_against_time(directory: Path, files: int = 6) -> Path:
    """The bids in files whose names run against their times."""
    for index, part in enumerate(cut(BIDS, files)):
        write_table(to_table(part), directory / f"{files - index}.parquet", row_group_size=128)
    return directory


@pytest.fixture(scope="module")
def bids_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_against_time(tmp_path_factory.mktemp("bids"))


def read(env: ps.Environment, directory: Path, column: str = "ts") -> ps.Stream:
    return env.read_parquet(str(directory)).with_event_time(column, out_of_orderness=DISORDER_MS)


def grouped(stream: ps.Stream, keys: Sequence[str]) -> ps.Stream:
    return stream.key_by(*keys) if keys else stream


@pytest.mark.parametrize("keys", [(), ("auction",), ("bidder",)], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_event_time_windows(
    env: ps.Environment, bids_dir: Path, window: str, keys: tuple[str, ...]
) -> None:
    windowed = grouped(read(env, bids_dir), keys).window(WINDOWS[window][0])
    collected = []
    for wanted, oracle in SETS:
        stream = windowed.aggregate(**wanted)
        assert stream.schema.names == [*keys, "window_start", "window_end", *wanted]
        assert stream.schema.field("window_start").type == pa.timestamp("ms", tz="UTC")
        collected.append((stream.collect(), oracle))
    run(env)
    for found, oracle in collected:
        assert_same_rows(found, expected_windows(window, BIDS, keys, oracle))


@pytest.mark.parametrize("pre_aggregation", ["true", "false"])
@pytest.mark.parametrize("window", ["sliding", "session"])
def test_keys_with_null_nan_and_several_columns(
    new_env: NewEnvironment, bids_dir: Path, window: str, pre_aggregation: str
) -> None:
    env = new_env(config={"execution.pre-aggregation": pre_aggregation})
    own = {name: NUMBERS[name] for name in ("rows", "total")}
    oracle = {name: NUMBERS_ORACLE[name] for name in own}
    keys = [("score",), ("bidder", "open"), ("score", "bidder", "at")]
    stream = read(env, bids_dir)
    collected = [
        stream.key_by(*names).window(WINDOWS[window][0]).aggregate(**own).collect()
        for names in keys
    ]
    run(env)
    for names, found in zip(keys, collected, strict=True):
        assert_same_rows(found, expected_windows(window, BIDS, names, oracle))


def test_windows_per_key_function(env: ps.Environment, bids_dir: Path) -> None:
    stream = (
        read(env, bids_dir)
        .key_by(lambda row: row.auction % 3)
        .window(ps.tumbling("30s"))
        .aggregate(n=ps.count())
    )
    rows = [{**row, "key": row["auction"] % 3} for row in BIDS]
    expected = sliced(rows, ["key"], {"n": len}, time=lambda row: row["ts"], size_ms=30_000)
    assert_same_rows(rows_of(env, stream), expected)


# ---------------------------------------------------------------- event time


DAY_MS = 86_400_000
TIMES: dict[str, tuple[pa.DataType, Callable[[int], Any], int]] = {
    "seconds": (pa.timestamp("s"), lambda ms: ms // 1_000, 1_000),
    "nanoseconds in New York": (
        pa.timestamp("ns", "America/New_York"),
        lambda ms: ms * 1_000_000 + 999_999,
        1,
    ),
    "days": (pa.date32(), lambda ms: ms // DAY_MS, DAY_MS),
    "days in milliseconds": (pa.date64(), lambda ms: ms // DAY_MS * DAY_MS, DAY_MS),
    "unsigned": (pa.uint64(), lambda ms: ms, 1),
    "before 1970": (pa.timestamp("us", "UTC"), lambda ms: (ms - 1_700_000_100_000) * 1_000 + 7, 1),
}


@pytest.mark.parametrize("name", TIMES)
def test_columns_that_are_event_time(env: ps.Environment, tmp_path: Path, name: str) -> None:
    kind, stored, unit_ms = TIMES[name]
    shift = 1_700_000_100_000 if name == "before 1970" else 0
    step = 10_000_000 if unit_ms == DAY_MS else 1
    rows = [
        {"n": r["n"], "ms": 1_700_000_000_000 + (r["ts"] - 1_700_000_000_000) * step}
        for r in BIDS[:600]
    ]
    for index, part in enumerate(cut(rows, 4)):
        times = pa.array(
            [stored(row["ms"]) for row in part], pa.int64() if pa.types.is_date64(kind) else None
        )
        if pa.types.is_date32(kind):
            times = times.cast(pa.int32())
        column = times.cast(pa.uint64()) if kind == pa.uint64() else times.view(kind)
        table = pa.table({"n": [row["n"] for row in part], "t": column})
        write_table(table, tmp_path / f"{9 - index}.parquet")
    size_ms = 10_000 * step
    stream = (
        env.read_parquet(str(tmp_path))
        .with_event_time("t", out_of_orderness=DISORDER_MS * step)
        .window(ps.tumbling(dt.timedelta(milliseconds=size_ms)))
        .aggregate(n=ps.count(), first=ps.min("n"))
    )
    expected = sliced(
        rows,
        [],
        {"n": len, "first": lambda found: min(row["n"] for row in found)},
        time=lambda row: row["ms"] // unit_ms * unit_ms - shift,
        size_ms=size_ms,
    )
    assert_same_rows(rows_of(env, stream), expected)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".arrow"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_file_order_never_makes_rows_late(
    new_env: NewEnvironment, tmp_path: Path, suffix: str, parallelism: int
) -> None:
    env = new_env(parallelism, config={"execution.batch-rows": 50})
    for index, part in enumerate(cut(BIDS, 7)):
        table = to_table(part).select(["n", "auction", "ts"])
        write_table(table, tmp_path / f"{9 - index}{suffix}")
    reader = {".csv": env.read_csv, ".jsonl": env.read_json, ".arrow": env.read_arrow}[suffix]
    windows = (
        reader(str(tmp_path))
        .with_event_time("ts", out_of_orderness=DISORDER_MS)
        .key_by("auction")
        .window(ps.tumbling("5s"))
    )
    collected = windows.aggregate(n=ps.count()).collect()
    result = run(env)
    expected = sliced(BIDS, ["auction"], {"n": len}, time=lambda row: row["ts"], size_ms=5_000)
    assert_same_rows(collected, expected)
    assert result.metrics["totals"]["late_records"] == 0


def test_event_time_behind_stateless_operators(env: ps.Environment, bids_dir: Path) -> None:
    stream = (
        env.read_parquet(str(bids_dir))
        .filter(col("open"))
        .map(
            lambda row: {"auction": row.auction, "when": row.ts},
            schema={"auction": int, "when": int},
        )
        .with_event_time("when", out_of_orderness=DISORDER_MS)
        .key_by("auction")
        .window(ps.tumbling("10s"))
        .aggregate(n=ps.count())
    )
    rows = [row for row in BIDS if row["open"]]
    expected = sliced(rows, ["auction"], {"n": len}, time=lambda row: row["ts"], size_ms=10_000)
    assert_same_rows(rows_of(env, stream), expected)


def test_event_time_behind_an_exchange_is_per_channel(env: ps.Environment, bids_dir: Path) -> None:
    stream = (
        env.read_parquet(str(bids_dir))
        .parallelism(1)
        .rebalance()
        .filter(col("n") >= 0)
        .with_event_time("ts", out_of_orderness="1h")
        .key_by("auction")
        .window(ps.tumbling("10s"))
        .aggregate(n=ps.count())
    )
    expected = sliced(BIDS, ["auction"], {"n": len}, time=lambda row: row["ts"], size_ms=10_000)
    assert_same_rows(rows_of(env, stream), expected)


def test_a_union_of_streams_with_event_time(env: ps.Environment, bids_dir: Path) -> None:
    early = read(env, bids_dir).filter(col("n") < 750).select("auction", "ts")
    late = env.from_rows(
        [{"auction": r["auction"], "ts": r["ts"]} for r in BIDS[750:]]
    ).with_event_time("ts", out_of_orderness=DISORDER_MS)
    windows = early.union(late).key_by("auction").window(ps.sliding("10s", "5s"))
    expected = sliced(
        BIDS, ["auction"], {"n": len}, time=lambda r: r["ts"], size_ms=10_000, slide_ms=5_000
    )
    assert_same_rows(rows_of(env, windows.aggregate(n=ps.count())), expected)


# ---------------------------------------------------------------- windows behind windows


def test_a_window_on_the_result_of_a_window(env: ps.Environment, bids_dir: Path) -> None:
    stream = (
        read(env, bids_dir)
        .key_by("auction")
        .window(ps.tumbling("5s"))
        .aggregate(n=ps.count())
        .window(ps.tumbling("5s"))
        .aggregate(total=ps.sum("n"), auctions=ps.count(), busiest=ps.max("n"))
    )
    inner = sliced(BIDS, ["auction"], {"n": len}, time=lambda row: row["ts"], size_ms=5_000)
    expected = sliced(
        [{**row, "end_ms": int(row["window_end"].timestamp() * 1_000)} for row in inner],
        [],
        {
            "total": lambda rows: sum(row["n"] for row in rows),
            "auctions": len,
            "busiest": lambda rows: max(row["n"] for row in rows),
        },
        time=lambda row: row["end_ms"] - 1,
        size_ms=5_000,
    )
    assert_same_rows(rows_of(env, stream), expected)


def test_different_values_of_one_key_are_counted_by_many(
    env: ps.Environment, bids_dir: Path
) -> None:
    parts = read(env, bids_dir).with_columns(part=col("price") % 16).key_by("auction", "part")
    different = {"n": ps.count_distinct("price")}
    tumbling = parts.window(ps.tumbling("10s")).aggregate(**different).key_by("auction")
    sliding = parts.window(ps.sliding("20s", "5s")).aggregate(**different).key_by("auction")
    counted = [
        tumbling.window(ps.tumbling("10s")).aggregate(n=ps.sum("n")).collect(),
        sliding.window(ps.tumbling("5s")).aggregate(n=ps.sum("n")).drop("window_start").collect(),
    ]
    run(env)
    oracle: Aggregates = {"n": lambda rows: distinct(rows, "price")}
    wanted = [
        sliced(BIDS, ["auction"], oracle, time=lambda r: r["ts"], size_ms=10_000),
        sliced(BIDS, ["auction"], oracle, time=lambda r: r["ts"], size_ms=20_000, slide_ms=5_000),
    ]
    for row in wanted[1]:
        del row["window_start"]
    for found, rows in zip(counted, wanted, strict=True):
        assert_same_rows(found, rows)


def test_a_keyed_window_on_sessions(env: ps.Environment, bids_dir: Path) -> None:
    stream = (
        read(env, bids_dir)
        .key_by("auction")
        .window(ps.session("500ms"))
        .aggregate(n=ps.count())
        .with_columns(is_long=col("n") > 2)
        .key_by("is_long")
        .window(ps.sliding("1 min", "30s"))
        .aggregate(sessions=ps.count(), rows=ps.sum("n"))
    )
    inner = sessions(BIDS, ["auction"], {"n": len}, time=lambda row: row["ts"], gap_ms=500)
    expected = sliced(
        [{**row, "is_long": row["n"] > 2} for row in inner],
        ["is_long"],
        {"sessions": len, "rows": lambda rows: sum(row["n"] for row in rows)},
        time=lambda row: round(row["window_end"].timestamp() * 1_000) - 1,
        size_ms=60_000,
        slide_ms=30_000,
    )
    assert_same_rows(rows_of(env, stream), expected)


def test_two_windows_over_one_stream(env: ps.Environment, bids_dir: Path) -> None:
    keyed = read(env, bids_dir).key_by("auction")
    short = keyed.window(ps.tumbling("5s")).aggregate(n=ps.count()).collect()
    long = keyed.window(ps.tumbling("1 min")).aggregate(total=ps.sum("price")).collect()
    run(env)
    assert_same_rows(
        short, sliced(BIDS, ["auction"], {"n": len}, time=lambda r: r["ts"], size_ms=5_000)
    )
    total = {"total": NUMBERS_ORACLE["total"]}
    assert_same_rows(long, sliced(BIDS, ["auction"], total, time=lambda r: r["ts"], size_ms=60_000))


# ---------------------------------------------------------------- order of arrival


ORDERED: dict[str, ps.Aggregate] = {
    "first": ps.first("price"),
    "last": ps.last("price"),
    "all": ps.collect_list("n"),
    "names": ps.collect_list("bidder"),
    "last_name": ps.last("bidder"),
}
ORDERED_ORACLE: Aggregates = {
    "first": lambda rows: next(iter(values(rows, "price")), None),
    "last": lambda rows: next(reversed(values(rows, "price")), None),
    "all": lambda rows: values(rows, "n"),
    "names": lambda rows: values(rows, "bidder"),
    "last_name": lambda rows: next(reversed(values(rows, "bidder")), None),
}


@pytest.mark.parametrize("window", ["tumbling", "sliding", "session"])
def test_aggregates_that_see_the_order_of_arrival(env: ps.Environment, window: str) -> None:
    stream = (
        env.from_rows(BIDS)
        .with_event_time("ts", out_of_orderness=DISORDER_MS)
        .key_by("auction")
        .window(WINDOWS[window][0])
        .aggregate(**ORDERED)
    )
    expected = expected_windows(window, BIDS, ["auction"], ORDERED_ORACLE)
    found = rows_of(env, stream)
    if window == "sliding":  # built of slices: order holds within each of them
        for row in [*found, *expected]:
            row["all"], row["names"] = sorted(row["all"]), sorted(row["names"])
            row["first"] = row["last"] = row["last_name"] = None
    assert_same_rows(found, expected)


# ---------------------------------------------------------------- count windows


@pytest.mark.parametrize("keys", [(), ("auction",), ("bidder", "open")], ids=str)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_count_windows(env: ps.Environment, keys: tuple[str, ...], size: int) -> None:
    aggregates = {**ORDERED, "total": ps.sum("price"), "rows": ps.count()}
    oracle = {**ORDERED_ORACLE, "total": NUMBERS_ORACLE["total"], "rows": len}
    stream = (
        grouped(env.from_rows(BIDS), keys).window(ps.count_window(size)).aggregate(**aggregates)
    )
    assert stream.schema.names[: len(keys) + 1] == [*keys, "window_index"]
    assert_same_rows(rows_of(env, stream), counted(BIDS, keys, oracle, size=size))


def test_a_window_on_count_windows_has_the_time_of_their_last_rows(env: ps.Environment) -> None:
    rows = [{"ts": 1_000 * i, "v": i} for i in range(40)]
    stream = (
        env.from_rows(rows)
        .with_event_time("ts")
        .window(ps.count_window(4))
        .aggregate(total=ps.sum("v"))
        .window(ps.tumbling("10s"))
        .aggregate(totals=ps.collect_list("total"))
        .select("totals", start=col("window_start").cast("int64"))
    )
    # Count windows end with rows 3, 7 | 11, 15, 19 | 23, 27 | 31, 35, 39.
    assert_same_rows(
        rows_of(env, stream),
        [
            {"totals": [6, 22], "start": 0},
            {"totals": [38, 54, 70], "start": 10_000},
            {"totals": [86, 102], "start": 20_000},
            {"totals": [118, 134, 150], "start": 30_000},
        ],
    )


# ---------------------------------------------------------------- reduce and process


def cheaper(left: ps.Row, right: ps.Row) -> ps.Row:
    return left if (left.price, left.n) <= (right.price, right.n) else right


@pytest.mark.parametrize("keys", [(), ("auction",)], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_reduce(env: ps.Environment, bids_dir: Path, window: str, keys: tuple[str, ...]) -> None:
    stream = (
        grouped(read(env, bids_dir).filter(col("price").is_valid()), keys)
        .window(WINDOWS[window][0])
        .reduce(cheaper)
    )
    rows = [row for row in BIDS if row["price"] is not None]
    best = expected_windows(
        window, rows, keys, {"best": lambda found: min(found, key=lambda r: (r["price"], r["n"]))}
    )
    expected = [
        {
            **{k: v for k, v in row.items() if k != "best"},
            **{k: v for k, v in row["best"].items() if k not in keys},
        }
        for row in best
    ]
    assert stream.schema.names == list(expected[0])
    assert_same_rows(rows_of(env, stream), expected)


class Summary(ps.WindowFunction):
    """Two rows per window, so that nothing of it could be an aggregate."""

    @override
    def open(self, ctx: ps.FunctionContext) -> None:
        self._operator = ctx.operator_name

    @override
    def process(
        self, key: Any, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        for what in ("first", "last"):
            row = rows[0 if what == "first" else -1]
            out.emit(
                key=str(key),
                what=what,
                n=row.n,
                rows=len(rows),
                start=window.start,
                end_ms=window.end_ms,
            )
        assert self._operator == "summary"


SUMMARY = {
    "key": "string",
    "what": "string",
    "n": "int64",
    "rows": "int64",
    "start": "timestamp[ms, tz=UTC]",
    "end_ms": "int64",
}


@pytest.mark.parametrize("keys", [(), ("auction",), ("bidder", "open")], ids=str)
@pytest.mark.parametrize("window", ["tumbling", "sliding", "session"])
def test_process_sees_all_rows_of_a_window(
    env: ps.Environment, window: str, keys: tuple[str, ...]
) -> None:
    stream = (
        grouped(env.from_rows(BIDS).with_event_time("ts", out_of_orderness=DISORDER_MS), keys)
        .window(WINDOWS[window][0])
        .process(Summary(), schema=SUMMARY)
        .name("summary")
    )
    windows = expected_windows(window, BIDS, keys, {"found": lambda rows: rows})
    expected = []
    for row in windows:
        key = tuple(row[name] for name in keys)
        shown = str(None if not keys else key[0] if len(keys) == 1 else key)
        expected += [
            {
                "key": shown,
                "what": what,
                "n": row["found"][place]["n"],
                "rows": len(row["found"]),
                "start": row["window_start"],
                "end_ms": round(row["window_end"].timestamp() * 1_000),
            }
            for what, place in (("first", 0), ("last", -1))
        ]
    assert_same_rows(rows_of(env, stream), expected)


class CountOfWindow(ps.WindowFunction):
    @override
    def process(
        self, key: Any, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        out.emit(auction=key, index=window.index, numbers=[row.n for row in rows])


def test_process_and_reduce_on_count_windows(env: ps.Environment) -> None:
    keyed = env.from_rows([{"n": r["n"], "auction": r["auction"]} for r in BIDS]).key_by("auction")
    schema = {"auction": "int64", "index": "int64", "numbers": pa.list_(pa.int64())}
    lists = keyed.window(ps.count_window(10)).process(CountOfWindow(), schema=schema).collect()
    sums = keyed.window(ps.count_window(10)).reduce(
        lambda left, right: {"auction": left.auction, "n": left.n + right.n}
    )
    sums_collected = sums.collect()
    run(env)
    parts = counted(BIDS, ["auction"], {"numbers": lambda rows: values(rows, "n")}, size=10)
    assert_same_rows(
        lists,
        [
            {"auction": r["auction"], "index": r["window_index"], "numbers": r["numbers"]}
            for r in parts
        ],
    )
    assert_same_rows(
        sums_collected,
        [
            {"auction": r["auction"], "window_index": r["window_index"], "n": sum(r["numbers"])}
            for r in parts
        ],
    )


# ---------------------------------------------------------------- processing time


def check_processing_time(rows: list[Row], size_ms: int, keys: Sequence[str]) -> None:
    """Where the windows lie is up to the clock; what they add up to is not."""
    for row in rows:
        start, end = row["window_start"].timestamp() * 1_000, row["window_end"].timestamp() * 1_000
        assert round(start) % size_ms == 0
        assert round(end - start) == size_ms
    sums: dict[Any, int] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        sums[key] = sums.get(key, 0) + row["n"]
    expected = {tuple(key.values()): len(found) for key, found in groups(BIDS, keys)}
    assert sums == expected


@pytest.mark.parametrize("keys", [(), ("auction",), ("bidder",)], ids=str)
@pytest.mark.parametrize("size", ["20ms", "1h"])
def test_processing_time_tumbling_windows(
    env: ps.Environment, bids_dir: Path, keys: tuple[str, ...], size: str
) -> None:
    stream = grouped(env.read_parquet(str(bids_dir)), keys)
    windows = stream.window(ps.tumbling(size), time="processing")
    rows = rows_of(env, windows.aggregate(n=ps.count(), total=ps.sum("price")))
    check_processing_time(rows, {"20ms": 20, "1h": 3_600_000}[size], keys)


def test_processing_time_sliding_windows_see_each_row_as_often_as_they_overlap(
    env: ps.Environment, bids_dir: Path
) -> None:
    windows = env.read_parquet(str(bids_dir)).window(ps.sliding("1h", "20 min"), time="processing")
    rows = rows_of(env, windows.aggregate(n=ps.count()))
    assert sum(row["n"] for row in rows) == 3 * len(BIDS)


def test_processing_time_sessions(env: ps.Environment, bids_dir: Path) -> None:
    keyed = env.read_parquet(str(bids_dir)).key_by("auction")
    windows = keyed.window(ps.session("1h"), time="processing")
    rows = rows_of(env, windows.aggregate(n=ps.count(), best=ps.max("price")))
    expected = whole(BIDS, ["auction"], {"n": len, "best": NUMBERS_ORACLE["best"]})
    bare = [{k: v for k, v in row.items() if not k.startswith("window")} for row in rows]
    assert_same_rows(bare, expected)
    assert all(row["window_end"] - row["window_start"] >= dt.timedelta(hours=1) for row in rows)


def test_processing_time_windows_fire_by_the_clock(env: ps.Environment) -> None:
    from tests.support.row_server import LineServer, RowReceiver

    with LineServer() as server, RowReceiver() as receiver:
        (
            env.read_socket("127.0.0.1", server.port)
            .key_by("line")
            .window(ps.tumbling("50ms"), time="processing")
            .aggregate(n=ps.count())
            .select("line", "n")
            .sink(receiver.sink())
        )
        handle = env.submit("clock")
        server.send("a", "a", "b")
        found: dict[str, int] = {}
        while sum(found.values()) < 3:  # the end of the window may lie between two of them
            for row in receiver.take(1):
                found[row["line"]] = found.get(row["line"], 0) + row["n"]
        assert found == {"a": 2, "b": 1}
        assert handle.status() == "RUNNING"
        server.end()
        handle.wait(DEADLINE_S)
