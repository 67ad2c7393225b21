"""Keyed and windowed streams: where rows are grouped and evaluated together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregates import Aggregate, check_aggregates
from penstock.errors import JobRejected
from penstock.expressions import Expr, col
from penstock.graph.column_checks import check_output_names, column_name, require_columns
from penstock.graph.logical import (
    EVENT_TIME_FIELD,
    ApplyWindowFunction,
    Node,
    NodeInput,
    Operation,
    Project,
    RunningAggregate,
    WindowAggregate,
    input_has_event_time,
    input_schema,
    is_key_function,
)
from penstock.graph.window_schemas import (
    running_aggregate_schema,
    window_aggregate_schema,
    window_function_schema,
)
from penstock.graph.window_spec import is_event_time
from penstock.pb import graph_pb2
from penstock.rows.column_types import first_of_type, is_extension
from penstock.rows.schema import EVENT_TIME, user_schema
from penstock.streams.foreign_names import missing_call
from penstock.streams.job_builder import JobBuilder
from penstock.streams.stream import Schema, Stream, stream_of
from penstock.streams.updates import check_no_updates
from penstock.streams.windows import Window

if TYPE_CHECKING:
    from penstock.functions.functions import WindowFunction
    from penstock.processing.process_functions import (
        KeyedBatchFunction,
        KeyedProcessFunction,
        ProcessFunction,
    )
    from penstock.streams.windows import Duration


class KeyedStream(Stream):
    """A stream whose rows of one key come to one subtask; made by ``key_by``."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns."""
        return self._source.routing.keys

    @override
    def _target(self, call: str) -> tuple[JobBuilder, Node]:
        node = self._source.node
        if call == "deterministic" and is_key_function(node.operation):
            return self._builder, node
        return super()._target(call)

    def aggregate(self, **aggregates: Aggregate) -> Stream:
        """Running aggregates per key over all rows so far; emits new values once per key and batch."""
        check_no_updates("aggregate", self._source)
        source, resolved = _with_aggregate_columns(self._builder, self._source, aggregates)
        schema = running_aggregate_schema(_planned(source), self.keys, resolved)
        operation = RunningAggregate(self.keys, tuple(resolved.items()))
        return _add(self._builder, operation, source, "aggregate", schema)

    @override
    def process(
        self,
        function: KeyedProcessFunction | KeyedBatchFunction | ProcessFunction,
        schema: Schema = None,
    ) -> Stream:
        """Hands every row to a function with state and timers per key; the output has no keys.

        Args:
            function: an object of a class derived from ``ps.KeyedProcessFunction``, or
                ``ps.KeyedBatchFunction`` for whole batches; a ``ps.ProcessFunction`` gets the rows of a
                key in one subtask too, and has no state per key.
            schema: the columns of what it emits; None = from annotations.
        """
        from penstock.streams.connected_streams import add_process

        fitting = (
            graph_pb2.PROCESS_KIND_KEYED,
            graph_pb2.PROCESS_KIND_KEYED_BATCH,
            graph_pb2.PROCESS_KIND_PLAIN,
        )
        return add_process(self._builder, (self._source,), function, fitting, schema)


class WindowedStream:
    """Rows grouped into windows, and by key where the stream is keyed; made by ``window``."""

    def __init__(
        self, builder: JobBuilder, source: NodeInput, window: graph_pb2.WindowSpec
    ) -> None:
        self._builder = builder
        self._source = source
        self._window = window

    if not TYPE_CHECKING:  # type checkers know the names that there are

        def __getattr__(self, name: str) -> Any:
            raise missing_call(self, name)

    def aggregate(self, **aggregates: Aggregate) -> Stream:
        """Aggregates of each window: the keys, ``window_start``, ``window_end``, the aggregates."""
        source, resolved = _with_aggregate_columns(self._builder, self._source, aggregates)
        keys = source.routing.keys
        schema = window_aggregate_schema(_planned(source), keys, self._window, resolved)
        operation = WindowAggregate(self._window, keys, tuple(resolved.items()))
        return _add(self._builder, operation, source, "window_aggregate", schema)

    def reduce(self, fn: Callable[[Any, Any], Any]) -> Stream:
        """Folds the rows of each window two by two.

        Args:
            fn: takes two rows, returns one with the same columns; must be associative.
        """
        if not callable(fn):
            raise JobRejected(f"reduce: {fn!r} is no function")
        return self._apply(graph_pb2.WINDOW_FUNCTION_KIND_REDUCE, fn, "reduce", None)

    def process(self, function: WindowFunction, schema: Schema = None) -> Stream:
        """Hands all rows of each window to a function, which emits rows.

        Args:
            function: an object of a class derived from ``ps.WindowFunction``.
            schema: the columns of what it emits; None = from annotations.
        """
        from penstock.streams.function_schemas import window_output_schema

        declared = window_output_schema(function, schema)
        return self._apply(graph_pb2.WINDOW_FUNCTION_KIND_PROCESS, function, "process", declared)

    def _apply(
        self,
        kind: graph_pb2.WindowFunctionKind.ValueType,
        function: object,
        label: str,
        declared: pa.Schema | None,
    ) -> Stream:
        keys = self._source.routing.keys
        if self._window.kind == graph_pb2.WINDOW_KIND_COUNT:
            unfit = first_of_type(input_schema(self._source), is_extension)
            if unfit is not None:
                raise JobRejected(
                    f"{label}: a count window cannot keep rows with column {unfit.name!r} of type "
                    f"{unfit.type}: .cast(...) it to the type it is stored as, or .drop(...) it"
                )
        schema = window_function_schema(_planned(self._source), keys, self._window, kind, declared)
        operation = ApplyWindowFunction(self._window, keys, kind, function)
        return _add(self._builder, operation, self._source, label, schema)


def windowed(
    builder: JobBuilder,
    source: NodeInput,
    window: Window,
    time: str,
    allowed_lateness: Duration,
    late_to: str,
) -> WindowedStream:
    """The stream cut into windows; see ``Stream.window``."""
    if not isinstance(window, Window):
        raise JobRejected(
            f"window: {window!r} is no window; write ps.tumbling('10s'), ps.sliding('1 min', '10s'), "
            "ps.session('30s') or ps.count_window(100)"
        )
    check_no_updates("window", source)
    spec = window.to_proto(time, allowed_lateness, late_to)
    if is_event_time(spec) and not input_has_event_time(source):
        raise JobRejected(
            "window: the stream has no event time: call .with_event_time('ts') on it (for a union: on "
            "each of its streams) before the window, or use time='processing'"
        )
    return WindowedStream(builder, source, spec)


def _planned(source: NodeInput) -> pa.Schema:
    """The input's columns with event time where it can carry it."""
    schema = input_schema(source)
    return schema.append(EVENT_TIME_FIELD) if input_has_event_time(source) else schema


def _with_aggregate_columns(
    builder: JobBuilder, source: NodeInput, aggregates: dict[str, Aggregate]
) -> tuple[NodeInput, dict[str, Aggregate]]:
    """Computes the expressions inside aggregates as columns in front of them."""
    check_aggregates(aggregates)
    schema = input_schema(source)
    computed: list[tuple[str, Expr]] = []
    resolved: dict[str, Aggregate] = {}
    for name, aggregate in aggregates.items():
        where = f"aggregate {name}={aggregate}"
        expression = aggregate.expression
        if expression is None:
            require_columns(where, filter(None, [aggregate.input_column]), schema)
            resolved[name] = aggregate
            continue
        require_columns(where, sorted(expression.columns()), schema)
        column = column_name(expression)
        if column is None:
            column = _free_name(f"__of_{name}", schema.names)
            computed.append((column, expression))
        resolved[name] = aggregate.with_column(column)
    if not computed:
        return source, resolved
    fields = [pa.field(name, expression.type(schema)) for name, expression in computed]
    kept = [(name, col(name)) for name in schema.names]
    node = builder.add(
        Project((*kept, *computed)),
        (source.in_front,),
        label="with_columns",
        schema=pa.schema([*schema, *fields]),
        has_event_time=input_has_event_time(source),
        is_inserted=True,
        hidden_columns=frozenset(name for name, _ in computed),
    )
    return replace(source, node=node, tag=""), resolved


def _add(
    builder: JobBuilder,
    operation: Operation,
    source: NodeInput,
    label: str,
    schema: pa.Schema,
) -> Stream:
    columns = user_schema(schema)
    check_output_names(label, columns.names)
    has_event_time = EVENT_TIME in schema.names
    node = builder.add(
        operation, (source,), label=label, schema=columns, has_event_time=has_event_time
    )
    return stream_of(builder, node)


def _free_name(wanted: str, taken: list[str]) -> str:
    name = wanted
    while name in taken:
        name += "_"
    return name
