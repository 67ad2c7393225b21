"""Aim: aggregates of every column type, all-null groups, overflow, and the user's own aggregates.

Method: one group per case through the operator, compared with a value written by hand.
"""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.aggregates.aggregates as agg
from penstock.errors import BadRecord, TaskFailure
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, count_window, session, sliding, tumbling
from penstock.testing import harness
from taskmanager.operators.running_aggregate import running_aggregate_operator
from taskmanager.operators.window_aggregate import window_aggregate_operator
from tests.support.operator_harness import OperatorHarness
from tests.support.window_specs import running_aggregate_spec, window_aggregate_spec

UTC = dt.UTC
DAY = dt.date(2024, 2, 29)
IN_TWO_SLICES = sliding(10, 5)
NOON = dt.datetime(2024, 2, 29, 12, tzinfo=UTC)


def _schema(kind: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            pa.field("k", pa.string()),
            pa.field("v", kind),
            pa.field(EVENT_TIME, pa.int64(), nullable=False),
        ]
    )


def _run(
    kind: pa.DataType,
    values: list[Any],
    aggregates: dict[str, agg.Aggregate],
    window: Window = IN_TWO_SLICES,
) -> dict[str, Any]:
    """The aggregates of the values, which lie in two slices, as of the window that has them all."""
    schema = _schema(kind)
    spec = window_aggregate_spec(window.to_proto(), ("k",), aggregates, schema=schema)
    harness = OperatorHarness(window_aggregate_operator(spec))
    for i, value in enumerate(values):
        batch = pa.record_batch(
            [pa.array(["a"]), pa.array([value], kind), pa.array([2 + 5 * (i % 2)])], schema=schema
        )
        harness.push(batch)
    harness.end()
    rows = harness.take_rows()
    (row,) = [r for r in rows if "window_index" in r or _start_ms(r) in (0, 2)]
    return {name: row[name] for name in aggregates}


def _start_ms(row: dict[str, Any]) -> int:
    return round(row["window_start"].timestamp() * 1000)


@pytest.mark.parametrize(
    ("kind", "values", "smallest", "largest"),
    [
        (pa.int8(), [3, None, -7], -7, 3),
        (pa.uint8(), [255, 0], 0, 255),
        (pa.uint64(), [2**64 - 1, 5, 2**63], 5, 2**64 - 1),
        (pa.int64(), [2**63 - 1, -(2**63)], -(2**63), 2**63 - 1),
        (pa.float32(), [1.5, None, math.nan, -2.5], -2.5, 1.5),
        (pa.float16(), [1.5, -2.5], -2.5, 1.5),
        (pa.bool_(), [True, False], False, True),
        (pa.date32(), [DAY, DAY - dt.timedelta(1)], DAY - dt.timedelta(1), DAY),
        (pa.date64(), [DAY, DAY - dt.timedelta(1)], DAY - dt.timedelta(1), DAY),
        (pa.time32("s"), [dt.time(3), dt.time(1)], dt.time(1), dt.time(3)),
        (pa.time64("us"), [dt.time(3, 0, 0, 7), dt.time(1)], dt.time(1), dt.time(3, 0, 0, 7)),
        (
            pa.timestamp("us", "Europe/Zurich"),
            [NOON, NOON + dt.timedelta(1)],
            NOON,
            NOON + dt.timedelta(1),
        ),
        (pa.duration("ms"), [dt.timedelta(3), dt.timedelta(1)], dt.timedelta(1), dt.timedelta(3)),
        (
            pa.decimal128(9, 2),
            [Decimal("1.20"), Decimal("-3.45")],
            Decimal("-3.45"),
            Decimal("1.20"),
        ),
        (
            pa.decimal32(5, 2),
            [Decimal("1.20"), None, Decimal("-3.45"), Decimal("7.00")],
            Decimal("-3.45"),
            Decimal("7.00"),
        ),
        (
            pa.decimal64(12, 2),
            [Decimal("1.20"), Decimal("-3.45"), Decimal("7.00")],
            Decimal("-3.45"),
            Decimal("7.00"),
        ),
        (pa.string(), ["b", "", None], "", "b"),
        (pa.large_string(), ["b", "a"], "a", "b"),
        (pa.binary(), [b"\xff", b"\x00"], b"\x00", b"\xff"),
        (pa.dictionary(pa.int8(), pa.string()), ["b", "a"], "a", "b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [sliding(10, 5), session(9)], ids=["sliding", "session"])
def test_min_and_max(
    kind: pa.DataType, values: list[Any], smallest: Any, largest: Any, window: Window
) -> None:
    aggregates = {
        "lo": agg.min("v"),
        "hi": agg.max("v"),
        "first": agg.first("v"),
        "n": agg.count("v"),
        "distinct": agg.count_distinct("v"),
        "all": agg.collect_list("v"),
    }
    schema = _schema(kind)
    spec = window_aggregate_spec(window.to_proto(), ("k",), aggregates, schema=schema)
    harness = OperatorHarness(window_aggregate_operator(spec))
    for i, value in enumerate(values):
        batch = pa.record_batch(
            [pa.array(["a"]), pa.array([value], kind), pa.array([5 * (i % 2)])], schema=schema
        )
        harness.push(batch)
    harness.end()
    rows = [row for row in harness.take_rows() if row["window_start"].timestamp() == 0]
    (row,) = rows
    present = [value for value in values if value is not None]
    assert (row["lo"], row["hi"]) == (smallest, largest)
    assert repr(row["first"]) == repr(present[0]) or row["first"] == present[0]
    assert row["n"] == row["distinct"] == len(row["all"]) == len(present)


@pytest.mark.parametrize(
    ("kind", "values", "total", "mean"),
    [
        (pa.int8(), [100, 100, None], 200, 100.0),
        (pa.uint64(), [2**62, 1], 2**62 + 1, (2**62 + 1) / 2),
        (pa.float32(), [0.5, None, 1.5], 2.0, 1.0),
        (pa.bool_(), [True, True, False, None], 2, 2 / 3),
        (pa.decimal128(9, 2), [Decimal("1.20"), None, Decimal("-3.40")], Decimal("-2.20"), -1.1),
        (pa.int64(), [None, None], None, None),
        (pa.float64(), [None], None, None),
        (pa.decimal128(9, 2), [None], None, None),
    ],
    ids=str,
)
def test_sum_and_mean(kind: pa.DataType, values: list[Any], total: Any, mean: Any) -> None:
    aggregates = {"total": agg.sum("v"), "mean": agg.mean("v"), "n": agg.count()}
    assert _run(kind, values, aggregates) == {
        "total": total,
        "mean": pytest.approx(mean),
        "n": len(values),
    }


def test_sum_of_durations() -> None:
    values = [dt.timedelta(1), None, dt.timedelta(2)]
    assert _run(pa.duration("ms"), values, {"v": agg.sum("v")}) == {"v": dt.timedelta(3)}


def test_a_group_of_nulls() -> None:
    aggregates = {
        "min": agg.min("v"),
        "first": agg.first("v"),
        "last": agg.last("v"),
        "list": agg.collect_list("v"),
        "distinct": agg.count_distinct("v"),
        "n": agg.count("v"),
    }
    empty: dict[str, Any] = {
        "min": None,
        "first": None,
        "last": None,
        "list": [],
        "distinct": 0,
        "n": 0,
    }
    assert _run(pa.int64(), [None, None], aggregates) == empty
    assert _run(pa.string(), [None, None], aggregates) == empty


def test_nested_values_can_be_first_last_and_collected() -> None:
    kind = pa.struct([("a", pa.list_(pa.int64()))])
    values = [{"a": [1]}, {"a": []}]
    assert _run(
        kind, values, {"f": agg.first("v"), "l": agg.last("v"), "c": agg.collect_list("v")}
    ) == {"f": values[0], "l": values[1], "c": values}


@pytest.mark.parametrize("window", [tumbling(10), sliding(20, 10), session(10), count_window(3)])
def test_overflow_is_a_bad_record(window: Window) -> None:
    with pytest.raises(BadRecord, match=r"total.*leaves the range of int64"):
        _run(pa.int64(), [2**62, 2**62, 2**62], {"total": agg.sum("v")}, window)


@pytest.mark.parametrize(
    "kind", [pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal256(60, 2)], ids=str
)
def test_min_and_max_of_decimals_in_one_batch(kind: pa.DataType) -> None:
    """Of decimals of 32 and 64 bits it was the first one, whatever the others were."""
    values = [Decimal("1.20"), None, Decimal("-3.45"), Decimal("7.00"), Decimal("0.50")]
    found = _run(kind, values, {"lo": agg.min("v"), "hi": agg.max("v")})
    assert found == {"lo": Decimal("-3.45"), "hi": Decimal("7.00")}


def test_a_decimal_sum_is_exact_in_any_order() -> None:
    """Where that of integers says to cast: the sum of the rows so far may leave their range, and come back."""
    values = [2**62, 2**62, 2**62, -(2**63)]
    with pytest.raises(BadRecord, match=r"or that of the rows so far; cast the column to decimal"):
        _run(pa.int64(), values, {"total": agg.sum("v")})
    exact = {"total": Decimal(sum(values))}
    for order in (values, values[::-1]):
        assert _run(pa.decimal128(38, 0), [*map(Decimal, order)], {"total": agg.sum("v")}) == exact


def test_a_sum_that_overflows_says_so_of_a_key_that_python_has_not() -> None:
    days = pa.array([10**8, 10**8], pa.int32()).cast(pa.date32())
    rows = pa.table({"day": days, "n": [2**62, 2**62]})
    running = harness(
        lambda stream: stream.key_by("day").aggregate(total=ps.sum("n")),
        schema=rows.schema,
        event_time=False,
    )
    with running, pytest.raises(ps.JobFailed, match=r"leaves the range of int64.*100000000"):
        running.push_many(rows)


def test_a_uint64_that_is_no_int64_cannot_be_summed() -> None:
    with pytest.raises(BadRecord, match=r"cast the column to decimal\(38, 0\)"):
        _run(pa.uint64(), [2**63], {"total": agg.sum("v")})


def test_a_decimal_sum_that_grows_too_long_is_a_bad_record() -> None:
    value = Decimal("9" * 38)
    with pytest.raises(BadRecord, match="more digits"):
        _run(pa.decimal128(38, 0), [value, value], {"total": agg.sum("v")})


class Longest(agg.AggregateFunction):
    @override
    def create_accumulator(self) -> list[str]:
        return []

    @override
    def add(self, accumulator: list[str], value: Any) -> list[str]:
        accumulator.append(value)
        return accumulator

    @override
    def merge(self, accumulator: list[str], other: list[str]) -> list[str]:
        if not accumulator:
            return other
        accumulator.extend(other)
        return accumulator

    @override
    def result(self, accumulator: list[str]) -> str:
        return max(accumulator, key=len)


class RowCount:
    """Not derived from anything; sees whole rows."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, accumulator: int, value: Any) -> int:
        return accumulator + len(value.v)

    def merge(self, accumulator: int, other: int) -> int:
        return accumulator + other

    def result(self, accumulator: int) -> int:
        return accumulator


@pytest.mark.parametrize("window", [sliding(10, 5), session(9), count_window(4), sliding(20, 5)])
def test_custom_aggregates(window: Window) -> None:
    aggregates = {
        "longest": agg.aggregate(Longest(), "v"),
        "letters": agg.aggregate(RowCount(), type=pa.int32()),
    }
    found = _run(pa.string(), ["a", "ccc", "bb", "dd"], aggregates, window)
    assert found == {"longest": "ccc", "letters": 8}


def test_a_custom_aggregate_that_raises_names_operator_row_and_line() -> None:
    class Broken(Longest):
        @override
        def add(self, accumulator: list[str], value: Any) -> list[str]:
            raise ValueError("not this one")

    with pytest.raises(TaskFailure, match="not this one") as failure:
        _run(pa.string(), ["abc"], {"l": agg.aggregate(Broken(), "v", pa.string())})
    assert failure.value.operator == "window"
    assert "abc" in failure.value.row
    assert "raise ValueError" in failure.value.user_traceback


def test_a_custom_aggregate_that_forgets_to_return() -> None:
    class Forgetful(Longest):
        @override
        def add(self, accumulator: list[str], value: Any) -> list[str]:
            accumulator.append(value)
            return None  # type: ignore[return-value]

    with pytest.raises(TaskFailure, match="add returned None"):
        _run(pa.string(), ["abc"], {"l": agg.aggregate(Forgetful(), "v", pa.string())})


def test_a_custom_result_of_another_type() -> None:
    with pytest.raises(TaskFailure, match="does not fit"):
        _run(pa.string(), ["abc"], {"l": agg.aggregate(Longest(), "v", pa.int64())})


def test_running_aggregates_of_objects_keep_growing() -> None:
    schema = _schema(pa.string())
    spec = running_aggregate_spec(
        ("k",),
        {"all": agg.collect_list("v"), "last": agg.last("v"), "m": agg.max("v")},
        schema=schema,
    )
    harness = OperatorHarness(running_aggregate_operator(spec))
    for k, v in (("a", "x"), ("b", "y"), ("a", "z")):
        harness.push(pa.record_batch([pa.array([k]), pa.array([v]), pa.array([1])], schema=schema))
    assert harness.take_rows() == [
        {"k": "a", "all": ["x"], "last": "x", "m": "x"},
        {"k": "b", "all": ["y"], "last": "y", "m": "y"},
        {"k": "a", "all": ["x", "z"], "last": "z", "m": "z"},
    ]
