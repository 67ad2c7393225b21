"""The schemas that windows and aggregations give out, for the planner and for the operators.

A window's result: the key columns, ``window_start`` and ``window_end`` (or ``window_index``), the
aggregates or the remaining columns, and at the end the event time where the input carries it.

A *partial batch*, which the partial phase of an aggregation sends to the final one: the key columns, per
``count_distinct`` its values, ``__slice`` and ``__rows`` for windows, one ``__acc_<i>`` per slot (null where it has no
value), and for running aggregates the event time of the last row. A partial row stands for the rows of one key, and where
values are counted for those with the same ones: that numbers of a key lie in several rows changes nothing, they are added
up. Its schema is marked, so that rows and partial rows may share a channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from penstock.aggregates.accumulator_kind import AccumulatorKind
from penstock.aggregates.aggregate_layout import (
    AggregateLayout,
    GroupColumnSpec,
)
from penstock.aggregates.aggregates import (
    Aggregate,
    check_aggregates,
    input_type,
    output_field,
    plain_type,
)
from penstock.errors import ExpressionError
from penstock.graph.window_spec import is_event_time, is_sliced
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME

WINDOW_START = "window_start"
WINDOW_END = "window_end"
WINDOW_INDEX = "window_index"
WINDOW_TIME_TYPE = pa.timestamp("ms", tz="UTC")

SLICE = "__slice"
"""Column of a partial batch: start of the slice the rows lie in, int64 milliseconds."""

ROWS = "__rows"
"""Column of a partial batch of a window: how many rows it stands for."""

_ACCUMULATOR = "__acc_"
_VALUE = "__value_"
_PARTIAL_MARK = b"penstock.partial"


def window_fields(window: graph_pb2.WindowSpec) -> list[pa.Field]:
    """The columns that say which window a result belongs to."""
    if window.kind == graph_pb2.WINDOW_KIND_COUNT:
        return [pa.field(WINDOW_INDEX, pa.int64())]
    return [pa.field(WINDOW_START, WINDOW_TIME_TYPE), pa.field(WINDOW_END, WINDOW_TIME_TYPE)]


def window_aggregate_schema(
    input_schema: pa.Schema,
    keys: Sequence[str],
    window: graph_pb2.WindowSpec,
    aggregates: Mapping[str, Aggregate],
) -> pa.Schema:
    """Output schema of ``.window(...).aggregate(...)``.

    Raises:
        ExpressionError: a key or an input column does not exist, a type does not fit, or two output
            columns have one name.
    """
    check_aggregates(aggregates)
    _check_event_time(input_schema, window)
    fields = [*_key_fields(input_schema, keys), *window_fields(window)]
    fields += [output_field(a, name, input_schema) for name, a in aggregates.items()]
    return _schema(fields, input_schema, "aggregate")


def running_aggregate_schema(
    input_schema: pa.Schema, keys: Sequence[str], aggregates: Mapping[str, Aggregate]
) -> pa.Schema:
    """Output schema of ``.key_by(...).aggregate(...)``: keys, aggregates, event time if carried."""
    check_aggregates(aggregates)
    fields = _key_fields(input_schema, keys)
    fields += [output_field(a, name, input_schema) for name, a in aggregates.items()]
    return _schema(fields, input_schema, "aggregate")


def window_function_schema(
    input_schema: pa.Schema,
    keys: Sequence[str],
    window: graph_pb2.WindowSpec,
    kind: graph_pb2.WindowFunctionKind.ValueType,
    declared: pa.Schema | None = None,
) -> pa.Schema:
    """Output schema of ``.window(...).reduce(fn)`` and ``.window(...).process(fn)``.

    Args:
        declared: schema of the rows that a process function emits.
    """
    _check_event_time(input_schema, window)
    key_fields = _key_fields(input_schema, keys)
    if kind == graph_pb2.WINDOW_FUNCTION_KIND_PROCESS:
        if declared is None:
            raise ExpressionError("window process: the schema of the emitted rows is not known")
        return _schema(list(declared), input_schema, "process")
    rest = [f for f in input_schema if f.name not in keys and f.name != EVENT_TIME]
    return _schema([*key_fields, *window_fields(window), *rest], input_schema, "reduce")


def can_pre_aggregate(
    aggregates: Mapping[str, Aggregate],
    input_schema: pa.Schema,
    keys: Sequence[str],
    window: graph_pb2.WindowSpec | None = None,
) -> bool:
    """Whether a partial phase may stand in front of the exchange.

    Args:
        window: None for running aggregates.
    """
    if window is not None and (
        not is_sliced(window) or not is_event_time(window) or window.late_tag
    ):
        return False
    if not keys or any(key.startswith("__") for key in keys):
        return False
    return all(
        aggregate.may_be_partial(input_type(aggregate, name, input_schema))
        for name, aggregate in aggregates.items()
    )


def partial_schema(
    layout: AggregateLayout, input_schema: pa.Schema, keys: Sequence[str], *, is_window: bool
) -> pa.Schema:
    """Schema of the partial batches that stand for rows of ``input_schema``."""
    fields = [
        pa.field(f.name, plain_type(f.type), f.nullable) for f in _key_fields(input_schema, keys)
    ]
    fields += [
        pa.field(value_column(spec), plain_type(input_schema.field(spec.column).type))
        for spec in layout.group_columns
    ]
    if is_window:
        fields += [pa.field(SLICE, pa.int64(), False), pa.field(ROWS, pa.int64(), False)]
    fields += [
        pa.field(f"{_ACCUMULATOR}{i}", slot.kind.arrow_type, slot.kind is not AccumulatorKind.COUNT)
        for i, slot in enumerate(layout.slots)
    ]
    if not is_window and EVENT_TIME in input_schema.names:
        fields.append(input_schema.field(EVENT_TIME))
    return pa.schema(fields, metadata={_PARTIAL_MARK: b"1"})


def is_partial(schema: pa.Schema) -> bool:
    """True for the schema of a partial batch."""
    return schema.metadata is not None and _PARTIAL_MARK in schema.metadata


def value_column(spec: GroupColumnSpec) -> str:
    """The column of a partial batch that has the values which an aggregate counts."""
    return f"{_VALUE}{spec.name}"


def first_accumulator(schema: pa.Schema) -> int:
    """Position of slot 0 in a partial schema."""
    return int(schema.get_field_index(f"{_ACCUMULATOR}0"))


def _key_fields(schema: pa.Schema, keys: Sequence[str]) -> list[pa.Field]:
    for key in keys:
        if schema.get_field_index(key) < 0:
            raise ExpressionError(
                f"there is no key column {key!r}{nearest_hint(key, schema.names)}; "
                f"columns are {', '.join(schema.names)}"
            )
    return [schema.field(key) for key in keys]


def _check_event_time(schema: pa.Schema, window: graph_pb2.WindowSpec) -> None:
    if is_event_time(window) and schema.get_field_index(EVENT_TIME) < 0:
        raise ExpressionError(
            "an event-time window needs event time: call .with_event_time('ts') on the stream "
            "before it, or use .window(..., time='processing')"
        )


def _schema(fields: list[pa.Field], input_schema: pa.Schema, operator: str) -> pa.Schema:
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            is_of_input = field.name in input_schema.names
            hint = f"; the input's can be renamed: .rename({field.name}='...') before it"
            raise ExpressionError(
                f"{operator}: two output columns are named {field.name!r}; the keys and the "
                "columns of the window come first: give the other one another name"
                + (hint if is_of_input else "")
            )
        if field.name == EVENT_TIME:
            raise ExpressionError(f"{operator}: the column name {EVENT_TIME!r} is reserved")
        seen.add(field.name)
    if EVENT_TIME in input_schema.names:
        fields = [*fields, input_schema.field(EVENT_TIME)]
    return pa.schema(fields)
