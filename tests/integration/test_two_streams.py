"""Aim: two streams meet in one operator as SQL, or plain Python, says, across processes.

Method: bounded streams with parallelism 2 and more than one split each; joins are compared with DuckDB,
functions of two streams with a loop over the same rows.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.support.jobs import assert_same_rows, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

_RNG = random.Random(8)
PERSONS = pa.table(
    {
        "id": [_RNG.choice([*range(300), None]) for _ in range(600)],
        "ts": sorted(_RNG.randrange(100_000) for _ in range(600)),
        "name": [f"person-{i}" for i in range(600)],
    },
    schema=pa.schema([("id", pa.int64()), ("ts", pa.int64()), ("name", pa.string())]),
)
AUCTIONS = pa.table(
    {
        "id": [_RNG.choice([*range(300), None]) for _ in range(3_000)],
        "ts": sorted(_RNG.randrange(100_000) for _ in range(3_000)),
        "price": [_RNG.random() for _ in range(3_000)],
    },
    schema=pa.schema([("id", pa.int64()), ("ts", pa.int64()), ("price", pa.float64())]),
)


def two_streams(env: ps.Environment) -> tuple[ps.Stream, ps.Stream]:
    persons, auctions = (
        env.from_arrow(table.slice(0, table.num_rows // 2))
        .union(env.from_arrow(table.slice(table.num_rows // 2)))
        .with_event_time("ts")
        for table in (PERSONS, AUCTIONS)
    )
    return persons, auctions


def sql(text: str) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("persons", PERSONS)
        connection.register("auctions", AUCTIONS)
        found: list[dict[str, Any]] = connection.sql(text).to_arrow_table().to_pylist()
    return found


def test_interval_join(env: ps.Environment) -> None:
    persons, auctions = two_streams(env)
    joined = persons.join(auctions, on="id", within=("-2s", "5s")).uid("join")
    expected = sql(
        "select p.id as id, p.ts as ts, p.name as name, a.ts as ts_right, a.price as price "
        "from persons p join auctions a on p.id = a.id and a.ts between p.ts - 2000 and p.ts + 5000"
    )
    assert len(expected) > 100
    assert_same_rows(rows_of(env, joined), expected)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_window_join(env: ps.Environment, how: str) -> None:
    persons, auctions = two_streams(env)
    joined = persons.join(auctions, on="id", window=ps.tumbling("10s"), how=how).uid("join")
    expected = sql(
        "with p as (select *, (ts - ts % 10000) as w from persons), "
        "a as (select *, (ts - ts % 10000) as w from auctions) "
        "select coalesce(p.id, a.id) as id, "
        "make_timestamptz(coalesce(p.w, a.w) * 1000) as window_start, p.name as name, "
        f"a.price as price from p {how} join a on p.id = a.id and p.w = a.w"
    )
    found = rows_of(env, joined.select("id", "window_start", "name", "price"))
    assert_same_rows(found, expected)


def test_the_result_of_a_join_goes_on_in_windows(env: ps.Environment) -> None:
    persons, auctions = two_streams(env)
    counts = (
        persons.join(auctions, on="id", window=ps.sliding("10s", "5s"))
        .uid("join")
        .window(ps.tumbling("5s"))
        .aggregate(n=ps.count())
        .uid("count")
    )
    expected = sql(
        "with p as (select *, unnest([ts - ts % 5000, ts - ts % 5000 - 5000]) as w from persons), "
        "a as (select *, unnest([ts - ts % 5000, ts - ts % 5000 - 5000]) as w from auctions) "
        "select count(*) as n from p join a on p.id = a.id and p.w = a.w group by p.w"
    )
    assert_same_rows(rows_of(env, counts.select("n")), expected)


class Counts(ps.KeyedCoProcessFunction):
    """Counts the rows of both streams together, per key."""

    count = ps.ValueState("count", pa.int64())

    def _one_more(self, key: Any, out: ps.Collector) -> None:
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        out.emit(id=key, count=count)

    @override
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self._one_more(row.id, out)

    @override
    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self._one_more(row.number, out)


def test_two_keyed_streams_share_the_state_of_a_key(env: ps.Environment) -> None:
    persons, auctions = two_streams(env)
    other = auctions.rename(id="number").key_by("number")
    counted = persons.key_by("id").connect(other)
    found = rows_of(env, counted.process(Counts(), schema={"id": "int64", "count": "int64"}))
    rows = Counter([*PERSONS["id"].to_pylist(), *AUCTIONS["id"].to_pylist()])
    expected = [{"id": k, "count": n + 1} for k, total in rows.items() for n in range(total)]
    assert_same_rows(found, expected)


class Seen(ps.BroadcastProcessFunction):
    """Lets every row pass, and says for each broadcast row which subtask got it."""

    @override
    def open(self, ctx: Any) -> None:
        self.subtask = ctx.subtask_index

    @override
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(kind="row", subtask=None, ts=row.ts)

    @override
    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(kind="rule", subtask=self.subtask, ts=row.ts)


def test_every_subtask_gets_a_broadcast_stream(env: ps.Environment) -> None:
    persons, auctions = two_streams(env)
    rules = persons.filter(col("ts") < 5_000)
    seen = auctions.connect(rules.broadcast()).process(
        Seen(), schema={"kind": "string", "subtask": "int64", "ts": "int64"}
    )
    expected = [{"kind": "row", "subtask": None, "ts": at} for at in AUCTIONS["ts"].to_pylist()]
    expected += [
        {"kind": "rule", "subtask": subtask, "ts": at}
        for subtask in range(env.config.parallelism_default)
        for at in PERSONS["ts"].to_pylist()
        if at < 5_000
    ]
    assert_same_rows(rows_of(env, seen), expected)
