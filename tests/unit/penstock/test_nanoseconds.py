"""Aim: no function on rows cuts a nanosecond in silence: rows that are passed on keep it, rows that are read fail.

Method: functions of each kind through the harness; the columns that went in are the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt
from penstock import col

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("t", pa.timestamp("ns", "UTC")),
        ("d", pa.duration("ns")),
        ("l", pa.list_(pa.time64("ns"))),
    ]
)
ROWS = pa.record_batch(
    [
        pa.array([0, 1, 2, 3]),
        pa.array([-1000, -1, None, 1_001], SCHEMA.field("t").type),
        pa.array([1000, None, 3000, 7], SCHEMA.field("d").type),
        pa.array([[1000], [1], None, [5]], pa.list_(pa.int64())).cast(SCHEMA.field("l").type),
    ],
    schema=SCHEMA,
)


class PassedOn(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)


class Replaced(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row, n=row.n)


WHOLE: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "map": lambda s: s.map(lambda row: row, schema=SCHEMA),
    "flat_map": lambda s: s.flat_map(lambda row: [row, row], schema=SCHEMA),
    "filter": lambda s: s.filter(lambda row: row.n != 2),
    "process": lambda s: s.process(PassedOn(), schema=SCHEMA),
}
READ: dict[str, Callable[[ps.Stream], ps.Stream]] = {
    "map": lambda s: s.map(lambda row: {**row}, schema=SCHEMA),
    "filter": lambda s: s.filter(lambda row: {**row} != {}),
    "process": lambda s: s.process(Replaced(), schema=SCHEMA),
}


def nanoseconds(stream: ps.Stream) -> ps.Stream:
    return stream.select(
        "n",
        t=col("t").cast("int64"),
        d=col("d").cast("int64"),
        l=col("l").cast(pa.list_(pa.int64())),
    )


def given(*numbers: int) -> list[dict[str, Any]]:
    with pt.harness(nanoseconds, schema=SCHEMA) as h:
        h.push_many(ROWS.take(pa.array(numbers)))
        return list(h.output)


@pytest.mark.parametrize("call", WHOLE)
def test_a_row_that_is_passed_on_keeps_them(call: str) -> None:
    expected = {"flat_map": given(0, 0, 1, 1, 2, 2, 3, 3), "filter": given(0, 1, 3)}
    with pt.harness(lambda s: nanoseconds(WHOLE[call](s)), schema=SCHEMA) as h:
        h.push_many(ROWS)
        assert h.output == expected.get(call, given(0, 1, 2, 3))


@pytest.mark.parametrize("call", READ)
def test_a_row_that_is_read_fails_where_it_has_some(call: str) -> None:
    def build(stream: ps.Stream) -> ps.Stream:
        return nanoseconds(READ[call](stream).on_error("bad"))

    with pt.harness(build, schema=SCHEMA) as h:
        h.push_many(ROWS)
        h.push_many(ROWS)  # now columns are decoded before they are asked for
        assert h.output == given(0, 2, 0, 2)
    with pt.harness(READ[call], schema=SCHEMA) as h:
        with pytest.raises(
            ps.JobFailed, match=r"column 't': .*cut it first, as .cast\('timestamp\[us"
        ) as failed:
            h.push_many(ROWS)
        assert "'1969-12-31 23:59:59.999999999Z'" in failed.value.row


def test_rows_of_several_batches_fail_as_well() -> None:
    """They are put together value by value."""

    class Later(ps.ProcessFunction):
        kept: list[Any]

        def open(self, ctx: Any) -> None:
            self.kept = []

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            self.kept.append(row)
            if len(self.kept) == 8:
                for each in self.kept:
                    out.emit(each)

    with pt.harness(lambda s: s.process(Later(), schema=SCHEMA), schema=SCHEMA) as h:
        h.push_many(ROWS)
        with pytest.raises(ps.JobFailed, match=r"column 't': .*cut it first"):
            h.push_many(ROWS)


def test_a_key_is_not_cut() -> None:
    class Key(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            out.emit(at=ctx.key)

    keyed = pt.harness(
        lambda s: s.key_by("t").process(Key(), schema={"at": "timestamp[us, tz=UTC]"}),
        schema=SCHEMA,
    )
    with keyed as h, pytest.raises(ps.JobFailed, match="more digits than Python's own"):
        h.push_many(ROWS)


KEYED = pa.record_batch(
    {"t": pa.array([1_000, 1_001, 2_000, 1_001, 1_000], pa.timestamp("ns")), "n": range(5)}
)
NAMED = {"n": "int64", "key": "string"}


class Asked(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(n=row.n, key=str(ctx.key))


class AskedLater(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(5)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(n=timestamp, key=str(ctx.key))


class AskedOfEach(ps.WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(n=len(rows), key=str(key))


@pytest.mark.parametrize("keys", [("t",), ("n", "t")])
def test_a_key_that_python_does_not_have_is_that_of_its_rows_alone(keys: tuple[str, ...]) -> None:
    with pt.harness(
        lambda s: s.key_by(*keys).process(Asked(), schema=NAMED).on_error("skip"),
        schema=KEYED.schema,
    ) as h:
        h.push_many(KEYED)
        assert [row["n"] for row in h.output] == [0, 2, 4]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.key_by("t").process(Asked(), schema=NAMED),
        lambda s: s.key_by("n", "t").process(AskedLater(), schema=NAMED),
        lambda s: s.key_by("t").window(ps.tumbling("1s")).process(AskedOfEach(), schema=NAMED),
        lambda s: s.key_by("t").window(ps.count_window(1)).process(AskedOfEach(), schema=NAMED),
    ],
)
def test_who_asks_for_such_a_key_hears_which_column_it_is(build: Any) -> None:
    with pt.harness(build, schema=KEYED.schema) as h:

        def run() -> None:
            h.push_many(KEYED, range(5))
            h.watermark(10_000)

        with pytest.raises(ps.JobFailed, match=r"column 't': a timestamp.*1001.*cut it first"):
            run()
