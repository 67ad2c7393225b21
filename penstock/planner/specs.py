"""From a logical operation to the operator that runs: its specification and its output schema.

What an operator gives out follows from what it is given: filters keep what comes in, projections compute
only what is needed, windows carry event time where their input does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import pyarrow as pa

from penstock.expressions import Expr, col
from penstock.functions.user_code import pickle_function
from penstock.graph.logical import (
    EVENT_TIME_FIELD,
    ApplyWindowFunction,
    AssignEventTime,
    BatchFunction,
    Filter,
    Join,
    Node,
    Process,
    Project,
    ReadSource,
    RowFunction,
    RunningAggregate,
    SparkStage,
    Union,
    WindowAggregate,
    WriteSink,
    is_spark,
)
from penstock.graph.restore_check import OPERATOR_LIST
from penstock.graph.window_schemas import (
    WINDOW_INDEX,
    running_aggregate_schema,
    window_aggregate_schema,
    window_function_schema,
)
from penstock.pb import graph_pb2
from penstock.planner.needs import Need, pruned
from penstock.processing.process_functions import has_on_timer
from penstock.rows.schema import EVENT_TIME, user_schema
from penstock.state.declarations import (
    BroadcastState,
    KeyedState,
    OperatorListState,
    declared_states,
)


def with_event_time(fields: Iterable[pa.Field], carried: bool) -> pa.Schema:
    """A schema of these columns, and the event time where it is carried."""
    return pa.schema([*fields, EVENT_TIME_FIELD] if carried else list(fields))


def operator_proto(node: Node, uid: str, *, deterministic: bool) -> graph_pb2.Operator:
    """The operator without its specification and schemas."""
    properties = node.properties
    return graph_pb2.Operator(
        uid=uid,
        uid_is_generated=not properties.uid,
        name=node.name,
        on_error=properties.on_error,
        deterministic=deterministic,
    )


def specify(proto: graph_pb2.Operator, node: Node, given: pa.Schema, need: Need) -> pa.Schema:
    """Fills in an operator's specification.

    Args:
        proto: the operator; its ``spec`` is set.
        node: the operation.
        given: what comes in by the first input, event time included where it is carried.
        need: what is needed of the main output.

    Returns:
        The schema of the main output.

    Raises:
        JobRejected: the user's function cannot be pickled.
    """
    operation = node.operation
    match operation:
        case ReadSource():
            return _source(proto, operation, node, need)
        case Project(columns=columns):
            return _project(proto, columns, node, need)
        case Filter(predicate=predicate):
            proto.filter.predicate.CopyFrom(predicate.to_proto())
            return _kept(node, given, need)
        case RowFunction(kind=kind, function=function):
            proto.row_function.kind = kind
            proto.row_function.function.CopyFrom(pickle_function(function, operator=node.name))
            return _row_function_schema(kind, node, given, need)
        case BatchFunction(function=function):
            proto.batch_function.function.CopyFrom(pickle_function(function, operator=node.name))
            return with_event_time(node.schema, need.event_time)
        case AssignEventTime():
            proto.event_time.column = operation.column
            proto.event_time.out_of_orderness_ms = operation.out_of_orderness_ms
            proto.event_time.idle_timeout_ms = operation.idle_timeout_ms
            return with_event_time(user_schema(given), carried=True)
        case SparkStage(function=function):
            proto.spark.function.CopyFrom(pickle_function(function, operator=node.name))
            proto.spark.timeout_ms, proto.spark.cores = operation.timeout_ms, operation.cores
            return node.schema
        case WriteSink():
            _sink(proto, operation, node)
            return pa.schema([])
        case Union():
            getattr(proto, "pass").SetInParent()  # a keyword in Python
            return given
        case Process():
            _process(proto, operation, node)
            return with_event_time(node.schema, need.event_time)
        case Join():
            _join(proto, operation)
            return _joined(operation, node, need)
        case WindowAggregate() | RunningAggregate() | ApplyWindowFunction():
            return _grouped(proto, operation, node, given, need)
        case _:
            assert_never(operation)


def select_spec(proto: graph_pb2.Operator, schema: pa.Schema) -> None:
    """Makes the operator one that keeps these columns only."""
    proto.project.columns.extend(
        graph_pb2.NamedExpression(name=name, expression=col(name).to_proto())
        for name in schema.names
    )


def _source(proto: graph_pb2.Operator, operation: ReadSource, node: Node, need: Need) -> pa.Schema:
    proto.source.CopyFrom(operation.spec)
    if operation.function is not None:
        function = pickle_function(operation.function, operator=node.name)
        _function_of(proto.source).CopyFrom(function)
    # Spark gives out what was declared, whatever is read of it.
    columns = list(node.schema) if is_spark(operation) else pruned(node.schema, need)
    if operation.spec.WhichOneof("kind") == "files":
        proto.source.files.columns[:] = [field.name for field in columns]
    return with_event_time(columns, need.event_time and node.has_event_time)


def _function_of(source: graph_pb2.SourceSpec) -> graph_pb2.Function:
    match source.WhichOneof("kind"):
        case "generator":
            return source.generator.function
        case "spark":
            return source.spark.function
        case _:
            return source.custom


def _project(
    proto: graph_pb2.Operator, columns: Iterable[tuple[str, Expr]], node: Node, need: Need
) -> pa.Schema:
    schema = with_event_time(pruned(node.schema, need), need.event_time)
    expressions = {**dict(columns), EVENT_TIME: col(EVENT_TIME)}
    proto.project.columns.extend(
        graph_pb2.NamedExpression(name=name, expression=expressions[name].to_proto())
        for name in schema.names
    )
    return schema


def _row_function_schema(
    kind: graph_pb2.RowFunctionKind.ValueType, node: Node, given: pa.Schema, need: Need
) -> pa.Schema:
    if kind in (graph_pb2.ROW_FUNCTION_KIND_FILTER, graph_pb2.ROW_FUNCTION_KIND_KEY):
        return _kept(node, given, need)
    return with_event_time(node.schema, need.event_time)


def _kept(node: Node, given: pa.Schema, need: Need) -> pa.Schema:
    """The output of an operator that passes columns on: those that are needed.

    The others are there for the operator itself, or for another one that reads the same output.
    """
    assert not need.event_time or EVENT_TIME in given.names, "needs are propagated to the inputs"
    return with_event_time(pruned(node.schema, need), need.event_time)


def _sink(proto: graph_pb2.Operator, operation: WriteSink, node: Node) -> None:
    proto.sink.CopyFrom(operation.spec)
    if operation.function is not None:
        proto.sink.custom.CopyFrom(pickle_function(operation.function, operator=node.name))


def _process(proto: graph_pb2.Operator, operation: Process, node: Node) -> None:
    proto.process.kind = operation.kind
    proto.process.function.CopyFrom(pickle_function(operation.function, operator=node.name))
    proto.process.keys.extend(operation.keys)
    proto.process.second_keys.extend(operation.second_keys)
    proto.process.answers_timers = has_on_timer(operation.function)
    if operation.compiled is not None:
        proto.process.compiled.CopyFrom(operation.compiled)
    for state in declared_states(operation.function).values():
        if not isinstance(state, KeyedState | OperatorListState | BroadcastState):
            continue
        declared = proto.process.states.add(
            name=state.name, kind=OPERATOR_LIST, codec=state.codec.name
        )
        if state.codec.value_type is not None:
            schema = pa.schema([pa.field("value", state.codec.value_type)])
            declared.type = schema.serialize().to_pybytes()
        if isinstance(state, KeyedState):
            declared.kind, declared.ttl_ms = state.kind, state.ttl_ms
        key_codec = None if isinstance(state, OperatorListState) else state.key_codec
        declared.key_codec = "" if key_codec is None else key_codec.name
        declared.aggregate = getattr(state, "built_in", "")
        declared.is_union = getattr(state, "redistribute", "") == "union"


def _join(proto: graph_pb2.Operator, operation: Join) -> None:
    proto.join.keys.extend(operation.keys)
    proto.join.how = operation.how
    if operation.interval is not None:
        proto.join.is_interval = True
        proto.join.lower_ms, proto.join.upper_ms = operation.interval
    if operation.window is not None:
        proto.join.window.CopyFrom(operation.window)


def _joined(operation: Join, node: Node, need: Need) -> pa.Schema:
    """The columns of a join: keys and window always, of both sides what is needed."""
    of_sides = {name for _, name in (*operation.left, *operation.right)}
    kept = [f for f in node.schema if f.name not in of_sides or f.name in need.columns]
    return with_event_time(kept, need.event_time)


def _is_unnumbered(window: graph_pb2.WindowSpec, need: Need) -> bool:
    """Whether it is a count window whose index nobody reads."""
    return window.kind == graph_pb2.WINDOW_KIND_COUNT and WINDOW_INDEX not in need.columns


def _grouped(
    proto: graph_pb2.Operator,
    operation: WindowAggregate | RunningAggregate | ApplyWindowFunction,
    node: Node,
    given: pa.Schema,
    need: Need,
) -> pa.Schema:
    keys = operation.keys
    if isinstance(operation, ApplyWindowFunction):
        proto.window_function.window.CopyFrom(operation.window)
        proto.window_function.keys.extend(keys)
        proto.window_function.kind = operation.kind
        if operation.kind == graph_pb2.WINDOW_FUNCTION_KIND_REDUCE:
            proto.window_function.window.without_index = _is_unnumbered(operation.window, need)
        function = pickle_function(operation.function, operator=node.name)
        proto.window_function.function.CopyFrom(function)
        return window_function_schema(given, keys, operation.window, operation.kind, node.schema)
    protos = [a.to_proto(name, operator=node.name) for name, a in operation.aggregates]
    aggregates = dict(operation.aggregates)
    if isinstance(operation, RunningAggregate):
        proto.running_aggregate.keys.extend(keys)
        proto.running_aggregate.aggregates.extend(protos)
        return running_aggregate_schema(given, keys, aggregates)
    proto.window_aggregate.window.CopyFrom(operation.window)
    proto.window_aggregate.window.without_index = _is_unnumbered(operation.window, need)
    proto.window_aggregate.keys.extend(keys)
    proto.window_aggregate.aggregates.extend(protos)
    return window_aggregate_schema(given, keys, operation.window, aggregates)
