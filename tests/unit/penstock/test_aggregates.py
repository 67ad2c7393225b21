"""Aim: aggregates know their types, refuse what has no meaning in the user's words, and travel; schemas of
windows and running aggregates are what the operators give out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock.aggregates.aggregates as agg
from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.aggregates.aggregate_layout import AccumulatorSlot, aggregate_layout
from penstock.errors import ExpressionError, JobRejected
from penstock.expressions import col
from penstock.graph.window_schemas import (
    WINDOW_TIME_TYPE,
    is_partial,
    partial_schema,
    running_aggregate_schema,
    window_aggregate_schema,
    window_function_schema,
)
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.streams.windows import count_window, tumbling

SCHEMA = pa.schema(
    [
        pa.field("user", pa.string()),
        pa.field("price", pa.int32()),
        pa.field("rate", pa.float32()),
        pa.field("at", pa.timestamp("ms")),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("id", pa.int64(), nullable=False),
        pa.field(EVENT_TIME, pa.int64(), nullable=False),
    ]
)
TUMBLING = tumbling("10s").to_proto()


class Spread(agg.AggregateFunction):
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
        return float(max(accumulator) - min(accumulator))


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (agg.count(), pa.int64()),
        (agg.count("tags"), pa.int64()),
        (agg.sum("price"), pa.int64()),
        (agg.sum("rate"), pa.float64()),
        (agg.mean("price"), pa.float64()),
        (agg.min("price"), pa.int32()),
        (agg.max("at"), pa.timestamp("ms")),
        (agg.min("user"), pa.string()),
        (agg.first("tags"), pa.list_(pa.string())),
        (agg.last("rate"), pa.float32()),
        (agg.count_distinct("user"), pa.int64()),
        (agg.collect_list("price"), pa.list_(pa.int32())),
        (agg.aggregate(Spread(), "price"), pa.float64()),
        (agg.aggregate(Spread(), "price", pa.float32()), pa.float32()),
        (agg.aggregate(Spread(), type="int16"), pa.int16()),
    ],
    ids=str,
)
def test_output_types(aggregate: agg.Aggregate, expected: pa.DataType) -> None:
    assert agg.output_field(aggregate, "a", SCHEMA) == pa.field("a", expected)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (agg.sum("user"), "cannot take the sum of a column of type string"),
        (agg.mean("at"), "cannot take the mean"),
        (agg.min("tags"), "cannot take the min"),
        (agg.count_distinct("tags"), "cannot take the count_distinct"),
        (agg.sum("pric"), "did you mean 'price'"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(aggregate: agg.Aggregate, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        agg.output_field(aggregate, "a", SCHEMA)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(ExpressionError, match="column name or an expression"):
        agg.sum(3)  # type: ignore[arg-type]
    with pytest.raises(ExpressionError, match="needs a column"):
        agg.sum(None)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match=r"write ps.aggregate\(Spread\(\)\)"):
        agg.aggregate(Spread)
    with pytest.raises(JobRejected, match="no method create_accumulator, add, merge, result"):
        agg.aggregate(object())
    with pytest.raises(ExpressionError, match="at least one"):
        agg.check_aggregates({})
    with pytest.raises(ExpressionError, match="is no aggregate"):
        agg.check_aggregates({"n": "price"})


def test_a_custom_result_without_a_type_is_refused() -> None:
    class Untyped(Spread):
        @override
        def result(self, accumulator):  # type: ignore[no-untyped-def]
            return 1

    with pytest.raises(ExpressionError, match=r"annotate Untyped\.result"):
        agg.output_field(agg.aggregate(Untyped(), "price"), "a", SCHEMA)


def test_an_expression_becomes_a_column_before_it_travels() -> None:
    aggregate = agg.sum(col("price") * 2)
    assert aggregate.expression is not None
    with pytest.raises(ExpressionError, match="no column yet"):
        aggregate.to_proto("total")
    proto = aggregate.with_column("doubled").to_proto("total")
    assert (proto.name, proto.function, proto.column) == ("total", "sum", "doubled")
    assert agg.Aggregate.from_proto(proto) == agg.sum("doubled")


def test_custom_aggregates_travel() -> None:
    proto = agg.aggregate(Spread(), "price").to_proto("spread")
    assert proto.custom.display_name.endswith("Spread")
    import cloudpickle

    back = agg.Aggregate.from_proto(
        proto, load_function=lambda f: cloudpickle.loads(f.pickled), output_type=pa.float64()
    )
    assert back.custom.result([1, 5]) == 4.0
    assert back.output_type(pa.int32()) == pa.float64()


def test_equal_slots_are_shared() -> None:
    aggregates = {
        "n": agg.count(),
        "total": agg.sum("id"),
        "mean": agg.mean("id"),
        "mean_price": agg.mean("price"),
        "n_price": agg.count("price"),
    }
    assert aggregate_layout(aggregates, SCHEMA).slots == (
        AccumulatorSlot(AccumulatorKind.COUNT, None),
        AccumulatorSlot(AccumulatorKind.SUM_INT64, "id"),
        AccumulatorSlot(AccumulatorKind.SUM_FLOAT64, "id"),
        AccumulatorSlot(AccumulatorKind.SUM_FLOAT64, "price"),
        AccumulatorSlot(AccumulatorKind.COUNT, "price"),
    )


def test_schemas() -> None:
    aggregates = {"n": agg.count(), "best": agg.max("price")}
    bounds = [("window_start", WINDOW_TIME_TYPE), ("window_end", WINDOW_TIME_TYPE)]
    values = [("n", pa.int64()), ("best", pa.int32())]
    event_time = SCHEMA.field(EVENT_TIME)
    assert window_aggregate_schema(SCHEMA, ["user"], TUMBLING, aggregates) == pa.schema(
        [("user", pa.string()), *bounds, *values, event_time]
    )
    counted = window_aggregate_schema(SCHEMA.remove(6), [], count_window(3).to_proto(), aggregates)
    assert counted == pa.schema([("window_index", pa.int64()), *values])
    assert running_aggregate_schema(SCHEMA, ["user"], aggregates) == pa.schema(
        [("user", pa.string()), *values, event_time]
    )
    reduced = window_function_schema(
        SCHEMA, ["id"], TUMBLING, graph_pb2.WINDOW_FUNCTION_KIND_REDUCE
    )
    assert reduced.names == [
        "id", "window_start", "window_end", "user", "price", "rate", "at", "tags", EVENT_TIME,
    ]  # fmt: skip
    processed = window_function_schema(
        SCHEMA,
        ["id"],
        TUMBLING,
        graph_pb2.WINDOW_FUNCTION_KIND_PROCESS,
        pa.schema([("a", pa.int64())]),
    )
    assert processed.names == ["a", EVENT_TIME]
    layout = aggregate_layout(aggregates, SCHEMA)
    partial = partial_schema(layout, SCHEMA, ["user"], is_window=True)
    assert partial.names == ["user", "__slice", "__rows", "__acc_0", "__acc_1"]
    assert is_partial(partial)
    assert not is_partial(SCHEMA)
    running = partial_schema(layout, SCHEMA, ["user"], is_window=False)
    assert running.names == ["user", "__acc_0", "__acc_1", EVENT_TIME]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: window_aggregate_schema(SCHEMA, ["usr"], TUMBLING, {"n": agg.count()}),
            "no key column 'usr'.*'user'",
        ),
        (
            lambda: window_aggregate_schema(SCHEMA, ["user"], TUMBLING, {"user": agg.count()}),
            "two output columns are named 'user'",
        ),
        (
            lambda: window_aggregate_schema(
                SCHEMA, ["user"], TUMBLING, {"window_end": agg.count()}
            ),
            "two output columns are named 'window_end'",
        ),
        (
            lambda: window_aggregate_schema(SCHEMA, [], TUMBLING, {EVENT_TIME: agg.count()}),
            "reserved",
        ),
        (
            lambda: window_aggregate_schema(SCHEMA.remove(6), [], TUMBLING, {"n": agg.count()}),
            "needs event time",
        ),
    ],
)
def test_schemas_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        make()
