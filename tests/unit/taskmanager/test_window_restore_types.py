"""Aim: every aggregate of every type of values survives a restore, in every kind of table; so does every
type of key; accumulators of the user's own are encoded as their class says, or refused with a way out.

Method: rows before and behind a rescale through two restores, compared with one uninterrupted operator.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock.aggregates.aggregates as agg
from penstock.errors import ExpressionError, TaskFailure
from penstock.functions.functions import Collector, WindowFunction, WindowInfo
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import Window, count_window, session, sliding, tumbling
from taskmanager.operators.operator import Operator
from taskmanager.operators.running_aggregate import running_aggregate_operator
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.operators.window_function import window_function_operator
from tests.support.operator_harness import OperatorHarness
from tests.support.restoring_driver import Event, RestoringDriver, uninterrupted
from tests.support.window_specs import (
    running_aggregate_spec,
    window_aggregate_spec,
    window_function_spec,
)

DAY = dt.date(2024, 2, 29)
NOON = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [3, None, -7, 3],
    pa.uint8(): [255, 0, None, 1],
    pa.uint64(): [2**56, 5, None, 2**55],
    pa.int64(): [2**55, -(2**55), None, 7],
    pa.float32(): [1.5, None, math.nan, -0.0],
    pa.float64(): [math.inf, None, math.nan, -2.5],
    pa.float16(): [1.5, -2.5, None, 0.0],
    pa.bool_(): [True, False, None, True],
    pa.date32(): [DAY, None, DAY - dt.timedelta(1), DAY],
    pa.date64(): [DAY, None, DAY - dt.timedelta(1), DAY],
    pa.time32("s"): [dt.time(3), None, dt.time(1), dt.time(3)],
    pa.time64("us"): [dt.time(3, 0, 0, 7), None, dt.time(1), dt.time(2)],
    pa.timestamp("us", "Europe/Zurich"): [NOON, None, NOON + HOUR, NOON - HOUR],
    pa.timestamp("ns"): [NOON.replace(tzinfo=None), None, NOON.replace(tzinfo=None), None],
    pa.duration("ms"): [HOUR, None, 2 * HOUR, HOUR],
    pa.decimal128(9, 2): [Decimal("1.20"), None, Decimal("-3.45"), Decimal("7.00")],
    pa.decimal32(5, 2): [Decimal("1.20"), None, Decimal("-3.45"), Decimal("7.00")],
    pa.decimal256(50, 2): [Decimal("1.20"), None, Decimal("-3.45"), Decimal("7.00")],
    pa.string(): ["b", "", None, "ü" * 100],
    pa.large_string(): ["b", "", None, "a"],
    pa.binary(): [b"\xff", b"", None, b"\x00"],
    pa.binary(2): [b"\xff\x00", b"aa", None, b"\x00\x00"],
    pa.dictionary(pa.int8(), pa.string()): ["b", "", None, "a"],
    pa.list_(pa.int32()): [[1, None], [], None, [2]],
    pa.struct([("a", pa.int32()), ("b", pa.string())]): [{"a": 1, "b": None}, None, {}, {"a": 2}],
}
FUNCTIONS = (
    "count",
    "sum",
    "min",
    "max",
    "mean",
    "first",
    "last",
    "count_distinct",
    "collect_list",
)
EVENTS = {
    1: [Event("rescale", 2)],
    2: [Event("abort"), Event("take")],
    3: [Event("slow")],
    5: [Event("rescale", 1), Event("crash", 3)],
}


STRING = pa.string()


def _schema(kind: pa.DataType, key: pa.DataType = STRING) -> pa.Schema:
    return pa.schema([("k", key), ("v", kind), pa.field(EVENT_TIME, pa.int64(), nullable=False)])


def _spec(
    window: Window | None, aggregates: dict[str, agg.Aggregate], schema: pa.Schema
) -> graph_pb2.Operator:
    if window is None:
        return running_aggregate_spec(("k",), aggregates, schema=schema)
    is_count = window == count_window(3)
    proto = window.to_proto() if is_count else window.to_proto("event", 4)
    return window_aggregate_spec(proto, ("k",), aggregates, schema=schema)


def _operator(spec: graph_pb2.Operator) -> Operator:
    if spec.WhichOneof("spec") == "running_aggregate":
        return running_aggregate_operator(spec)
    return window_aggregate_operator(spec)


def _stream(values: list[Any], keys: list[Any], schema: pa.Schema) -> list[Any]:
    batches: list[Any] = []
    for i in range(len(values)):
        rotated = values[i:] + values[:i]
        columns = [
            pa.array([keys[j % len(keys)] for j in range(i, i + 2 * len(values))], schema.types[0]),
            pa.array(rotated + rotated, schema.types[1]),
            pa.array([2 + 4 * i + j % 3 for j in range(2 * len(values))], pa.int64()),
        ]
        batches += [pa.record_batch(columns, schema=schema), 4 * i]
    return batches


@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize(
    "window", [tumbling(8), sliding(10, 5), session(3), count_window(3), None], ids=str
)
def test_aggregates_of_every_type(kind: pa.DataType, window: Window | None) -> None:
    schema = _schema(kind)
    aggregates = {}
    for name in FUNCTIONS:
        aggregate = getattr(agg, name)("v")
        try:
            aggregate.output_type(kind)
        except ExpressionError:
            continue  # has no meaning for the type
        aggregates[name] = aggregate
    spec = _spec(window, aggregates, schema)
    stream = _stream(VALUES[kind], ["a", "b", None, "c"], schema)
    expected = uninterrupted(lambda: _operator(spec), stream)
    assert any(expected)
    assert RestoringDriver(lambda: _operator(spec), ("k",)).run(stream, EVENTS) == expected


@pytest.mark.parametrize("kind", [kind for kind in VALUES if not pa.types.is_nested(kind)], ids=str)
@pytest.mark.parametrize("window", [sliding(10, 5), session(3), count_window(3), None], ids=str)
def test_keys_of_every_type(kind: pa.DataType, window: Window | None) -> None:
    schema = _schema(pa.int64(), kind)
    aggregates = {"n": agg.count(), "total": agg.sum("v"), "last": agg.last("v")}
    spec = _spec(window, aggregates, schema)
    stream = _stream([1, None, 3, 4], VALUES[kind], schema)
    expected = uninterrupted(lambda: _operator(spec), stream)
    assert any(expected)
    assert RestoringDriver(lambda: _operator(spec), ("k",)).run(stream, EVENTS) == expected


class CountValues(agg.AggregateFunction):
    """The most frequent value, in a ``Counter``: a subclass of dict, which msgpack refuses."""

    @override
    def create_accumulator(self) -> Any:
        return Counter()

    @override
    def add(self, accumulator: Any, value: Any) -> Any:
        accumulator[value] += 1
        return accumulator

    @override
    def merge(self, accumulator: Any, other: Any) -> Any:
        return accumulator + other

    @override
    def result(self, accumulator: Any) -> Any:
        return max(accumulator.items(), key=lambda item: (item[1], item[0]))[0]


class PickledCounts(CountValues):
    accumulator_codec = "pickle"


class UnknownCodec(CountValues):
    accumulator_codec = "xml"


class NoneFirst(agg.AggregateFunction):
    """None is an accumulator of its own right."""

    @override
    def create_accumulator(self) -> Any:
        return None

    @override
    def add(self, accumulator: Any, value: Any) -> Any:
        return None if accumulator is None and value == 1 else (accumulator or 0) + value

    @override
    def merge(self, accumulator: Any, other: Any) -> Any:
        return (accumulator or 0) + (other or 0)

    @override
    def result(self, accumulator: Any) -> Any:
        return -1 if accumulator is None else accumulator


@pytest.mark.parametrize("window", [sliding(10, 5), session(3), count_window(3), None], ids=str)
@pytest.mark.parametrize("function", [PickledCounts(), NoneFirst()], ids=["pickle", "none"])
def test_accumulators_of_the_users_own(window: Window | None, function: Any) -> None:
    schema = _schema(pa.int64())
    spec = _spec(window, {"most": agg.aggregate(function, "v", pa.int64())}, schema)
    stream = _stream([1, 2, 2, 1], ["a", "b", None, "c"], schema)
    expected = uninterrupted(lambda: _operator(spec), stream)
    assert RestoringDriver(lambda: _operator(spec), ("k",)).run(stream, EVENTS) == expected


@pytest.mark.parametrize("window", [sliding(10, 5), session(3), None], ids=str)
def test_what_msgpack_cannot_take_is_refused_with_a_way_out(window: Window | None) -> None:
    schema = _schema(pa.int64())
    spec = _spec(window, {"most": agg.aggregate(CountValues(), "v", pa.int64())}, schema)
    harness = OperatorHarness(_operator(spec))
    harness.push(_stream([1, 2, 2, 1], ["a"], schema)[0])
    with pytest.raises(TaskFailure, match=r"Counter.*accumulator_codec = 'pickle'"):
        harness.snapshot()


def test_an_unknown_codec_is_refused_at_the_first_row() -> None:
    schema = _schema(pa.int64())
    spec = _spec(session(3), {"most": agg.aggregate(UnknownCodec(), "v", pa.int64())}, schema)
    with pytest.raises(TaskFailure, match="'xml'; it must be one of 'msgpack', 'pickle'"):
        OperatorHarness(_operator(spec)).push(_stream([1], ["a"], schema)[0])


@pytest.mark.parametrize("window", [sliding(10, 5), session(3), count_window(3), None], ids=str)
def test_state_of_other_aggregates_is_refused(window: Window | None) -> None:
    schema = _schema(pa.int64())
    stream = _stream([1, 2, 2, 1], ["a"], schema)
    harness = OperatorHarness(_operator(_spec(window, {"x": agg.sum("v")}, schema)))
    harness.push(stream[0])
    taken = harness.snapshot()
    other = _spec(window, {"x": agg.min("v")}, schema)
    with pytest.raises(TaskFailure, match=r"was stored as .* the job declares it as"):
        OperatorHarness(_operator(other), restored=[taken]).push(stream[0])


class ListWords(WindowFunction):
    @override
    def process(self, key: Any, window: WindowInfo, rows: Any, out: Collector) -> None:
        out.emit(key=repr(key), words=[row.v for row in rows])


@pytest.mark.parametrize("window", [sliding(10, 5), session(3), count_window(3)], ids=str)
def test_rows_with_dictionaries(window: Window) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    schema = _schema(kind, kind)
    declared = pa.schema([("key", pa.string()), ("words", pa.list_(pa.string()))])
    proto = window.to_proto() if window == count_window(3) else window.to_proto("event", 4)
    spec = window_function_spec(proto, ("k",), ListWords(), declared=declared, schema=schema)
    stream = _stream(["x", "y", None, "z"], ["a", "b", None, "c"], schema)
    expected = uninterrupted(lambda: window_function_operator(spec), stream)
    driver = RestoringDriver(lambda: window_function_operator(spec), ("k",))
    assert driver.run(stream, EVENTS) == expected
