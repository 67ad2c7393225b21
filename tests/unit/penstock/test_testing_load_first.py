"""Aim: a harness reads a broadcast side first where the stream says so, as a cluster does."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt
from penstock.errors import CheckpointAborted

FLIGHT = pa.schema([("origin", pa.string()), ("n", pa.int64())])
AIRPORT = pa.schema([("code", pa.string()), ("name", pa.string())])
NAMED = pa.schema([("n", pa.int64()), ("name", pa.string())])


class Name(ps.BroadcastProcessFunction):
    names = ps.BroadcastState("names", pa.string(), pa.string())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(n=row.n, name=self.names.get(row.origin))

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.names.put(row.code, row.name)


class NameKeyed(Name, ps.KeyedBroadcastProcessFunction):
    pass


def plain(flights: ps.Stream, airports: ps.Stream) -> ps.Stream:
    side = airports.filter(ps.col("name").is_valid()).broadcast(load_first=True)
    return flights.connect(side).process(Name(), schema=NAMED).uid("name")


def keyed(flights: ps.Stream, airports: ps.Stream) -> ps.Stream:
    side = airports.broadcast(load_first=True)
    return flights.key_by("origin").connect(side).process(NameKeyed(), schema=NAMED).uid("name")


def by_default(flights: ps.Stream, airports: ps.Stream) -> ps.Stream:
    return flights.connect(airports.broadcast()).process(Name(), schema=NAMED).uid("name")


@pytest.mark.parametrize("build", [plain, keyed])
def test_rows_wait_until_the_side_is_read_whole(build: Any) -> None:
    with pt.harness(build, schema=FLIGHT, second_schema=AIRPORT) as h:
        h.push({"origin": "JFK", "n": 1})
        h.push({"code": "JFK", "name": "New York"}, input=1)
        h.push({"origin": "LAX", "n": 2})
        h.watermark(500)
        assert h.take() == []
        assert h.watermark_ms < 0
        with pytest.raises(CheckpointAborted, match="load_first"):
            h.snapshot()
        h.push({"code": "LAX", "name": "Los Angeles"}, input=1)
        h.end(input=1)
        assert h.take() == [{"n": 1, "name": "New York"}, {"n": 2, "name": "Los Angeles"}]
        assert h.watermark_ms == 500
        h.push({"origin": "LAX", "n": 3})
        assert h.take() == [{"n": 3, "name": "Los Angeles"}]
        held = h.snapshot()
    with pt.harness(build, schema=FLIGHT, second_schema=AIRPORT, restore=held) as h:
        h.push({"origin": "JFK", "n": 4})
        assert h.take() == [{"n": 4, "name": "New York"}]
        with pytest.raises(ps.JobRejected, match="has ended"):
            h.push({"code": "SFO", "name": "San Francisco"}, input=1)
        h.snapshot()


def test_in_batch_mode_it_is_the_default() -> None:
    batch = {"execution.runtime-mode": "batch"}
    with pt.harness(by_default, schema=FLIGHT, second_schema=AIRPORT, config=batch) as h:
        h.push({"origin": "JFK", "n": 1})
        h.push({"code": "JFK", "name": "New York"}, input=1)
        assert h.take() == []
        h.end()
        assert h.take() == [{"n": 1, "name": "New York"}]
    with pt.harness(by_default, schema=FLIGHT, second_schema=AIRPORT) as h:
        h.push({"origin": "JFK", "n": 1})
        assert h.take() == [{"n": 1, "name": None}]


def test_an_empty_side_holds_nothing_up() -> None:
    with pt.harness(plain, schema=FLIGHT, second_schema=AIRPORT) as h:
        h.push({"origin": "JFK", "n": 1})
        h.end(input=1)
        assert h.take() == [{"n": 1, "name": None}]


def test_a_stream_that_waits_for_itself_is_kept() -> None:
    def both(rows: ps.Stream) -> ps.Stream:
        airports = rows.select(code=ps.col("origin"), name=ps.col("origin"))
        side = airports.broadcast(load_first=True)
        return rows.connect(side).process(Name(), schema=NAMED).uid("name")

    with pt.harness(both, schema=FLIGHT) as h:
        h.push_many([{"origin": "JFK", "n": 1}, {"origin": "LAX", "n": 2}])
        assert h.take() == []
        h.end()
        assert [row["name"] for row in h.take()] == ["JFK", "LAX"]
