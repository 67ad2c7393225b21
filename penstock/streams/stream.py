"""Streams: what the user builds a job with.

A ``Stream`` is a reference to the output of an operation and never changes; each call returns another.
Everything that can be known to be wrong is refused at the call, in the user's words. Nothing runs
until ``env.execute``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.errors import JobRejected
from penstock.expressions import Expr, col
from penstock.functions.functions import check_is_plain
from penstock.graph.column_checks import (
    column_name,
    describe,
    difference,
    require_columns,
)
from penstock.graph.logical import (
    ANY_ROUTING,
    AssignEventTime,
    BatchFunction,
    Filter,
    Node,
    NodeInput,
    Operation,
    Project,
    Routing,
    RowFunction,
    Union,
    input_has_event_time,
    input_schema,
)
from penstock.pb import graph_pb2
from penstock.streams.error_policies import policy_of
from penstock.streams.foreign_names import missing_call
from penstock.streams.job_builder import JobBuilder
from penstock.streams.kept_keys import lost_keys, output_of
from penstock.streams.operator_properties import OperatorProperties
from penstock.streams.stream_columns import StreamColumns
from penstock.streams.stream_engines import StreamEngines
from penstock.streams.stream_outputs import StreamOutputs
from penstock.streams.stream_pairs import StreamPairs
from penstock.units import argument_ms

if TYPE_CHECKING:
    from penstock.processing.process_functions import ProcessFunction
    from penstock.streams.keyed_stream import KeyedStream, WindowedStream
    from penstock.streams.windows import Duration, Window

KEY_COLUMN = "key"
"""What ``key_by(fn)`` adds."""

Schema = Any
"""A pa.Schema, a dataclass, a TypedDict, or a mapping of names to types."""


class Stream(OperatorProperties, StreamColumns, StreamPairs, StreamOutputs, StreamEngines):
    """Rows of one schema, made by ``env.read_...`` and by the methods below.

    A keyed stream stays keyed behind what leaves its key columns, and the places of its rows, alone.
    """

    def __init__(self, builder: JobBuilder, source: NodeInput) -> None:
        self._builder = builder
        self._source = source

    @property
    @override
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return input_schema(self._source)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(self.schema)})"

    if not TYPE_CHECKING:  # type checkers know the names that there are

        def __getattr__(self, name: str) -> Any:
            lost = None if name.startswith("_") else lost_keys(self._source)
            raise missing_call(self, name, lost)

    def filter(self, predicate: Expr | Callable[[Any], bool]) -> Self:
        """Keeps the rows for which the expression, or the function of a row, is true."""
        if isinstance(predicate, Expr):
            require_columns("filter", sorted(predicate.columns()), self.schema)
            kind = predicate.type(self.schema)
            if not pt.is_boolean(kind):
                raise JobRejected(
                    f"filter: the expression {predicate} is {kind}, not true or false; compare it "
                    "with something: col('x') > 0"
                )
            return cast("Self", self._then(Filter(predicate), "filter", self.schema))
        function = self._row_function("filter", graph_pb2.ROW_FUNCTION_KIND_FILTER, predicate)
        return cast("Self", self._then(function, "filter", self.schema))

    # ------------------------------------------------------------ Python functions

    def map(self, fn: Callable[[Any], Any], schema: Schema = None) -> Stream:
        """One row in, one row out.

        Args:
            fn: takes a row with attributes, returns a dict, dataclass instance, tuple or row.
            schema: the output's columns; None = from the annotations, or from a sample.
        """
        return self._call("map", graph_pb2.ROW_FUNCTION_KIND_MAP, fn, schema)

    def flat_map(self, fn: Callable[[Any], Any], schema: Schema = None) -> Stream:
        """One row in, any number of rows out; ``fn`` returns or yields them, or returns None for no row."""
        return self._call("flat_map", graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP, fn, schema)

    def map_batches(
        self, fn: Callable[[pa.RecordBatch], pa.RecordBatch], schema: Schema = None
    ) -> Stream:
        """One RecordBatch in, one out: for pandas, Polars, models.

        Where event time is needed later, row i of the output has that of row i of the input, so there
        must be as many; else call ``with_event_time`` behind it.
        """
        from penstock.streams.function_schemas import batch_output_schema

        _check_callable("map_batches", fn)
        output = batch_output_schema(fn, schema, self._source)
        return self._then(BatchFunction(fn), "map_batches", output)

    def _call(
        self,
        label: Literal["map", "flat_map"],
        kind: graph_pb2.RowFunctionKind.ValueType,
        fn: Callable[[Any], Any],
        schema: Schema,
    ) -> Stream:
        from penstock.streams.function_schemas import row_output_schema

        function = self._row_function(label, kind, fn)
        output = row_output_schema(label, fn, schema, self._source)
        return self._then(function, label, output)

    def _row_function(
        self, label: str, kind: graph_pb2.RowFunctionKind.ValueType, fn: Callable[[Any], Any]
    ) -> RowFunction:
        from penstock.functions.row_types import columns_used

        _check_callable(label, fn)
        used = columns_used(fn, self.schema)
        return RowFunction(kind, fn, None if used is None else frozenset(used))

    # ------------------------------------------------------------ keys, windows, routing

    def key_by(self, *cols_or_fn: str | Expr | Callable[[Any], Any]) -> KeyedStream:
        """Brings all rows of a key to the same subtask.

        Args:
            cols_or_fn: the key columns, or one function of a row, which adds the column ``key``.
        """
        from penstock.storage.key_types import check_key_types
        from penstock.streams.keyed_stream import KeyedStream

        if len(cols_or_fn) == 1 and _is_function(cols_or_fn[0]):
            return self._key_by_function(cols_or_fn[0])
        if not cols_or_fn:
            raise JobRejected("key_by: name the key columns: key_by('auction')")
        keys = tuple(self._key_name(column) for column in cols_or_fn)
        require_columns("key_by", keys, self.schema)
        if len(set(keys)) < len(keys):
            raise JobRejected(f"key_by: a column is named twice: {', '.join(keys)}")
        check_key_types(self.schema, keys)
        if keys == self._source.routing.keys:
            return KeyedStream(self._builder, self._source)
        routing = Routing(graph_pb2.PARTITIONING_HASH, keys)
        return KeyedStream(self._builder, self._reference(routing))

    def _key_name(self, column: object) -> str:
        if isinstance(column, str):
            return column
        name = column_name(column) if isinstance(column, Expr) else None
        if name is None:
            if isinstance(column, list | tuple) and column:
                several = ", ".join(repr(each) for each in column)
                raise JobRejected(f"key_by: {column!r} is no column: write key_by({several})")
            raise JobRejected(
                f"key_by: {column!r} is no column: make it one with .with_columns(k=...).key_by('k')"
            )
        return name

    def _key_by_function(self, fn: Any) -> KeyedStream:
        from penstock.streams.function_schemas import key_type

        kind = graph_pb2.ROW_FUNCTION_KIND_KEY
        function = self._row_function("key_by", kind, fn)
        if KEY_COLUMN in self.schema.names:
            raise JobRejected(
                f"key_by(fn) adds the column {KEY_COLUMN!r}, and there is one already; rename it first"
            )
        field = pa.field(KEY_COLUMN, key_type(fn, self._source))
        keyed = self._then(function, "key_by", self.schema.append(field), is_inserted=True)
        return keyed.key_by(KEY_COLUMN)

    def window(
        self,
        window: Window,
        *,
        time: str = "event",
        allowed_lateness: Duration = 0,
        late_to: str = "",
    ) -> WindowedStream:
        """Groups rows into windows: per key, or of all rows together on a stream that never had keys.

        Args:
            window: ``ps.tumbling(...)``, ``ps.sliding``, ``ps.session`` or ``ps.count_window``.
            time: "event" or "processing".
            allowed_lateness: how long after its end a window still takes rows and fires again.
            late_to: the side output that takes rows that are later still; without it they are
                dropped and counted.
        """
        from penstock.streams.keyed_stream import windowed

        lost = lost_keys(self._source)
        if lost is not None:
            raise JobRejected(
                f"window: {lost.story}: call .key_by(...) again before the window, or .window_all(...) for one "
                "window over all rows"
            )
        return windowed(self._builder, self._source, window, time, allowed_lateness, late_to)

    def window_all(
        self,
        window: Window,
        *,
        time: str = "event",
        allowed_lateness: Duration = 0,
        late_to: str = "",
    ) -> WindowedStream:
        """Groups rows into windows of all rows together, whatever their keys; one subtask sees them all.

        Args: as of ``window``.
        """
        from penstock.streams.keyed_stream import windowed

        source = self._reference(ANY_ROUTING)
        return windowed(self._builder, source, window, time, allowed_lateness, late_to)

    def as_rows(self) -> Self:
        """Takes each update for a row of its own, so that aggregates and windows may count updates.

        Of running aggregates, and of what is made of their output: see docs/api.md.
        """
        return type(self)(self._builder, replace(self._source, is_rows=True))

    def union(self, *streams: Stream) -> Stream:
        """All rows of this stream and the others; they must have the same columns.

        In streaming mode those whose rows come out of a blocking exchange, or out of Spark, are read whole before the
        others are: history, then live.
        """
        if not streams:
            raise JobRejected("union: give at least one other stream")
        unified = pa.schema([pa.field(field.name, field.type) for field in self.schema])
        inputs = []
        for position, other in enumerate((self, *streams), start=1):
            if other._builder is not self._builder:
                raise JobRejected("union: the streams belong to different environments")
            different = difference(self.schema, other.schema)
            if different:
                raise JobRejected(
                    f"union: stream {position} has other columns than the first: {different}"
                )
            inputs.append(other._conforming(unified))
        node = self._builder.add(
            Union(),
            tuple(inputs),
            label="union",
            schema=unified,
            has_event_time=all(input_has_event_time(source) for source in inputs),
        )
        return stream_of(self._builder, node)

    def process(self, function: ProcessFunction, schema: Schema = None) -> Stream:
        """Hands every row to a function, which emits rows.

        Args:
            function: an object of a class derived from ``ps.ProcessFunction``; with state per key, see
                ``key_by``.
            schema: the columns of what it emits; None = from annotations.
        """
        from penstock.streams.connected_streams import add_process

        fitting = (graph_pb2.PROCESS_KIND_PLAIN,)
        return add_process(self._builder, (self._source,), function, fitting, schema)

    def _conforming(self, schema: pa.Schema) -> NodeInput:
        """This stream's rows with their columns in the order, and as nullable, as in ``schema``."""
        if self.schema.equals(schema):
            return self._source
        columns = tuple((name, col(name)) for name in schema.names)
        node = (
            Stream(self._builder, self._source.in_front)
            ._then(Project(columns), "select", schema, is_inserted=True)
            ._source.node
        )
        return replace(self._source, node=node, tag="")

    def broadcast(self, load_first: bool | None = None) -> Stream:
        """Sends every row to all subtasks of the next operator.

        Args:
            load_first: for ``connect``, where this stream has an end: the function sees no row of the other
                stream before it has seen all rows of this one; None = in batch mode, where True is the
                rule, and not in streaming mode. Until then the other stream waits at its sources, and no
                checkpoint is taken; after a restart from one nothing of this stream is read again, so
                keep what it brings in state.
        """
        if load_first is not None and not isinstance(load_first, bool):
            raise JobRejected(f"broadcast: load_first={load_first!r} is neither True nor False")
        return self._routed(graph_pb2.PARTITIONING_BROADCAST, load_first)

    def rebalance(self) -> Stream:
        """Deals the rows out evenly to the subtasks of the next operator."""
        return self._routed(graph_pb2.PARTITIONING_REBALANCE)

    def rescale(self) -> Stream:
        """Like ``rebalance``, but each subtask deals to its own share of the next ones only."""
        return self._routed(graph_pb2.PARTITIONING_RESCALE)

    def forward(self) -> Stream:
        """Subtask i feeds subtask i of the next operator, which must have the same parallelism."""
        return self._routed(graph_pb2.PARTITIONING_FORWARD)

    def _routed(
        self,
        partitioning: graph_pb2.Partitioning.ValueType,
        load_first: bool | None = None,
    ) -> Stream:
        given = self._source.routing
        lost = given.keys or given.lost_keys
        routing = Routing(partitioning, lost_keys=lost, load_first=load_first)
        return Stream(self._builder, self._reference(routing))

    # ------------------------------------------------------------ time and side outputs

    def with_event_time(
        self,
        column: str,
        out_of_orderness: Duration = 0,
        idle_timeout: Duration | None = None,
    ) -> Self:
        """Says when rows happened.

        Args:
            column: integers are milliseconds since the epoch; or a timestamp or date. A null is a bad record.
            out_of_orderness: how much older than its predecessors a row may be without being late.
            idle_timeout: a split that is silent for longer holds nothing back; None = it does.
        """
        require_columns("with_event_time", [column], self.schema)
        kind = self.schema.field(column).type
        if not (pt.is_integer(kind) or pt.is_timestamp(kind) or pt.is_date(kind)):
            raise JobRejected(
                f"with_event_time: column {column!r} is {kind}; event time is an integer (milliseconds "
                f"since the epoch), a timestamp or a date.{_event_time_remedy(column, kind)}"
            )
        idle_timeout_ms = (
            0
            if idle_timeout is None
            else argument_ms("with_event_time: idle_timeout", idle_timeout)
        )
        if idle_timeout is not None and idle_timeout_ms == 0:
            raise JobRejected(
                "with_event_time: idle_timeout is 0; every split would be silent for longer, between two reads: give a "
                "time in which rows come, or leave it out where a silent split shall hold event time back"
            )
        late_ms = argument_ms("with_event_time: out_of_orderness", out_of_orderness)
        operation = AssignEventTime(column, late_ms, idle_timeout_ms)
        timed = self._then(
            operation, "with_event_time", self.schema, has_event_time=True, is_inserted=True
        )
        return cast("Self", timed)

    def side_output(self, tag: str) -> Stream:
        """The side output of the last operator: late rows, or bad records.

        Bad records have the operator's input columns and ``error``; those of a source ``where``,
        ``text`` and ``error``.
        """
        node = self._last_operator("side_output")
        schema = node.side_schema(tag)
        side = stream_of(self._builder, node, tag)
        hidden = node.inputs[0].node.hidden_columns if node.inputs else frozenset()
        if hidden.isdisjoint(schema.names):
            return side
        kept = tuple((name, col(name)) for name in schema.names if name not in hidden)
        output = pa.schema([schema.field(name) for name, _ in kept])
        return side._then(Project(kept), "select", output, is_inserted=True)

    def on_error(self, action: str) -> Self:
        """What happens to records the last operator cannot handle.

        Windows, aggregates and joins have none: late rows go to ``late_to``, what fails there fails the
        job. What a process function did to its state before it failed for a row stays done.

        Args:
            action: "fail" (the job fails), "skip" (they are dropped and counted), or the name of a
                side output that takes them.
        """
        node = self._last_operator("on_error")
        node.properties.on_error = policy_of(action, node)
        return self

    # ------------------------------------------------------------ building

    @override
    def _then(
        self,
        operation: Operation,
        label: str,
        schema: pa.Schema,
        *,
        has_event_time: bool | None = None,
        is_inserted: bool = False,
    ) -> Stream:
        node = self._builder.add(
            operation,
            (self._source,),
            label=label,
            schema=schema,
            has_event_time=(
                input_has_event_time(self._source) if has_event_time is None else has_event_time
            ),
            is_inserted=is_inserted,
        )
        return stream_of(self._builder, node)

    def _reference(self, routing: Routing) -> NodeInput:
        return replace(self._source, routing=routing)

    @override
    def _last_operator(self, call: str) -> Node:
        if self._source.routing.is_asked:
            # The exchange behind an operator is the one that the routing asks for.
            later = "" if call == "exchange" else " or after the next operator"
            raise JobRejected(
                f"{call}() applies to an operator, and routing (key_by, rebalance, ...) is none: call "
                f"it before the routing{later}"
            )
        if self._source.tag:
            raise JobRejected(
                f"{call}() applies to an operator, and a side output is none: call it on the "
                f"operator's main output or after the next operator"
            )
        return self._source.node

    @override
    def _target(self, call: str) -> tuple[JobBuilder, Node]:
        return self._builder, self._last_operator(call)


def stream_of(builder: JobBuilder, node: Node, tag: str = "") -> Stream:
    """An output of a node, which is keyed where the rows lie by keys that nothing has changed."""
    from penstock.streams.keyed_stream import KeyedStream

    source = output_of(node, tag)
    return (KeyedStream if source.routing.keys else Stream)(builder, source)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (str, Expr))


def _check_callable(call: str, fn: object) -> None:
    if not _is_function(fn):
        raise JobRejected(f"{call}: {fn!r} is no function")
    check_is_plain(call, fn)


def _event_time_remedy(column: str, kind: pa.DataType) -> str:
    """How a column of this type may become an event time, where that makes sense."""
    if pt.is_floating(kind) or pt.is_decimal(kind):
        target = "int64"
    elif pt.is_string(kind) or pt.is_large_string(kind):
        target = "timestamp[ms]"
    else:
        return " This type says no time of the clock: give another column"
    return (
        f" Convert it first, for example .with_columns({column}=col({column!r}).cast({target!r}))"
    )
