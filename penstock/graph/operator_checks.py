"""Checks of single operators of a job graph: their specification against their schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.expressions.nodes import nodes_of
from penstock.graph.join_schemas import check_same_keys
from penstock.graph.window_schemas import window_fields
from penstock.graph.window_spec import is_event_time
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.rows.spark_types import check_for_spark, check_from_spark

ERROR_COLUMN = "error"
"""Column that a side output of bad records adds to the operator's input."""

SOURCE_ERROR_SCHEMA = pa.schema(
    [("where", pa.string()), ("text", pa.string()), (ERROR_COLUMN, pa.string())]
)
"""Bad records of a source."""

_BROADCAST_KINDS = frozenset(
    {graph_pb2.PROCESS_KIND_BROADCAST, graph_pb2.PROCESS_KIND_KEYED_BROADCAST}
)
NARROWING = "narrow"
"""Name of the projection that the planner puts in front of an exchange."""

_TWO_INPUT_KINDS = _BROADCAST_KINDS | {
    graph_pb2.PROCESS_KIND_CO,
    graph_pb2.PROCESS_KIND_KEYED_CO,
}
_KEYED_KINDS = frozenset(
    {
        graph_pb2.PROCESS_KIND_KEYED,
        graph_pb2.PROCESS_KIND_KEYED_BATCH,
        graph_pb2.PROCESS_KIND_KEYED_BROADCAST,
        graph_pb2.PROCESS_KIND_KEYED_CO,
    }
)

_ARTIFACT_ID = re.compile(r"[0-9a-f]{64}")


def operator_where(vertex: graph_pb2.Vertex, index: int) -> str:
    """How errors name an operator."""
    return f"operator {vertex.operators[index].name!r} (vertex {vertex.id})"


def decode_schema(data: bytes, where: str) -> pa.Schema:
    """A schema of the graph.

    Raises:
        JobRejected: the bytes are none.
    """
    try:
        return schema_from_bytes(data)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise JobRejected(f"{where}: its schema cannot be read: {error}") from error


def late_tag(operator: graph_pb2.Operator) -> str:
    """The side output of an operator's late rows, "" where it has none."""
    window = window_of(operator)
    return "" if window is None else window.late_tag


def window_of(operator: graph_pb2.Operator) -> graph_pb2.WindowSpec | None:
    """The window an operator evaluates, None where it has none."""
    kind = operator.WhichOneof("spec")
    if kind == "window_aggregate":
        return operator.window_aggregate.window
    if kind == "join" and not operator.join.is_interval:
        return operator.join.window
    return operator.window_function.window if kind == "window_function" else None


def keeps_every_key(operator: graph_pb2.Operator) -> bool:
    """Whether it holds something of every key there has ever been: count windows that are numbered for ever."""
    window = window_of(operator)
    return (
        window is not None
        and window.kind == graph_pb2.WINDOW_KIND_COUNT
        and not (window.without_index or window.ttl_ms)
        and bool(grouping_keys(operator))
    )


def side_schema(operator: graph_pb2.Operator, given: pa.Schema, tag: str) -> pa.Schema:
    """The schema of one of an operator's side outputs.

    Args:
        given: what comes in (by the first input where there are two), event time included where it is carried.
    """
    if tag == operator.on_error.tag:
        if operator.WhichOneof("spec") == "source":
            return SOURCE_ERROR_SCHEMA
        return user_schema(given).append(pa.field(ERROR_COLUMN, pa.string()))
    return given if tag == late_tag(operator) else user_schema(given)


def grouping_keys(operator: graph_pb2.Operator) -> tuple[str, ...] | None:
    """The keys of an operator that works per key, () where it sees all rows, None for others."""
    kind = operator.WhichOneof("spec")
    if kind == "window_aggregate":
        return tuple(operator.window_aggregate.keys)
    if kind == "window_function":
        return tuple(operator.window_function.keys)
    if kind == "process":
        return tuple(operator.process.keys) if operator.process.kind in _KEYED_KINDS else None
    if kind == "join":
        return tuple(operator.join.keys)
    return tuple(operator.running_aggregate.keys) if kind == "running_aggregate" else None


def has_two_inputs(operator: graph_pb2.Operator) -> bool:
    """Whether it tells a first input from a second one."""
    kind = operator.WhichOneof("spec")
    return kind == "join" or (kind == "process" and operator.process.kind in _TWO_INPUT_KINDS)


def is_spark_operator(operator: graph_pb2.Operator) -> bool:
    """Whether Spark does it."""
    kind = operator.WhichOneof("spec")
    return kind == "spark" or (kind == "source" and operator.source.WhichOneof("kind") == "spark")


def runs_on_spark(graph: graph_pb2.JobGraph) -> bool:
    """Whether a job has anything that Spark does."""
    return any(is_spark_operator(one) for vertex in graph.vertices for one in vertex.operators)


def input_schemas(operator: graph_pb2.Operator) -> list[bytes]:
    """The schema of each input of the first operator of a vertex."""
    if operator.WhichOneof("spec") == "spark":
        return list(operator.spark.input_schemas)
    second = [operator.second_input_schema] if has_two_inputs(operator) else []
    return [operator.input_schema, *second]


def files_read(operator: graph_pb2.Operator) -> frozenset[int]:
    """The numbers of the inputs that no edge feeds, since Spark reads them itself."""
    return frozenset(files.input for files in operator.spark.files)


def second_keys(operator: graph_pb2.Operator) -> tuple[str, ...] | None:
    """The keys that rows of the second input are routed by; () = they go to all subtasks, None = any way."""
    if operator.WhichOneof("spec") == "join":
        return tuple(operator.join.keys)
    if operator.process.kind == graph_pb2.PROCESS_KIND_KEYED_CO:
        return tuple(operator.process.second_keys)
    return () if operator.process.kind in _BROADCAST_KINDS else None


def is_partial(operator: graph_pb2.Operator) -> bool:
    """True for the phase of an aggregation that stands before the exchange."""
    partial = graph_pb2.AGGREGATION_PHASE_PARTIAL
    kind = operator.WhichOneof("spec")
    if kind == "window_aggregate":
        return operator.window_aggregate.phase == partial
    return kind == "running_aggregate" and operator.running_aggregate.phase == partial


def is_narrowing(operator: graph_pb2.Operator) -> bool:
    """True for what the planner puts in front of an exchange to leave out columns."""
    return operator.uid_is_generated and operator.name == NARROWING


def shown_name(operator: graph_pb2.Operator) -> str:
    """What an operator is called in the plan of its job."""
    return "pre_aggregate" if is_partial(operator) else operator.name


def check_collect_ids(graph: graph_pb2.JobGraph) -> None:
    """Checks that no two collect sinks have one id.

    Raises:
        JobRejected: two have.
    """
    seen: set[str] = set()
    for vertex in graph.vertices:
        for index, operator in enumerate(vertex.operators):
            if operator.sink.WhichOneof("kind") != "collect":
                continue
            if operator.sink.collect.collect_id in seen:
                raise JobRejected(
                    f"{operator_where(vertex, index)}: its collect id is that of another sink"
                )
            seen.add(operator.sink.collect.collect_id)


def check_operator(operator: graph_pb2.Operator, where: str, artifacts: set[str]) -> None:
    """Checks an operator's specification against its schemas.

    Raises:
        JobRejected: they do not go together.
    """
    kind = operator.WhichOneof("spec")
    if kind is None:
        raise JobRejected(f"{where}: it has no specification")
    _check_error_policy(operator, where)
    given = decode_schema(operator.input_schema, where)
    output = decode_schema(operator.output_schema, where)
    _check_schema(given, where)
    _check_schema(output, where)
    if kind == "source":
        _check_source(operator.source, where, artifacts)
    elif kind == "project":
        names = [column.name for column in operator.project.columns]
        if names != output.names:
            raise JobRejected(f"{where}: it computes {names}, but its output has {output.names}")
        for column in operator.project.columns:
            _check_columns(_expression_columns(column.expression), given, where)
    elif kind == "filter":
        _check_columns(_expression_columns(operator.filter.predicate), given, where)
    elif kind == "event_time":
        _check_columns([operator.event_time.column], given, where)
        if EVENT_TIME not in output.names:
            raise JobRejected(f"{where}: its output carries no event time")
    elif kind == "sink":
        if operator.sink.WhichOneof("kind") is None:
            raise JobRejected(f"{where}: it does not say where the rows go")
        _check_columns(operator.sink.files.partition_by, given, where)
    elif kind == "process":
        _check_process(operator, given, where)
    elif kind == "join":
        _check_join(operator, given, output, where)
    elif kind == "spark":
        _check_spark(operator, output, where)
    else:
        _check_grouping(operator, given, where)


def _check_error_policy(operator: graph_pb2.Operator, where: str) -> None:
    policy = operator.on_error
    to_side_output = policy.action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT
    if to_side_output != bool(policy.tag):
        raise JobRejected(f"{where}: a side output for bad records needs a name")


def _check_schema(schema: pa.Schema, where: str) -> None:
    names = schema.names
    for name in names:
        if not name or names.count(name) > 1:
            raise JobRejected(f"{where}: column {name!r} is there twice or has no name")
    if EVENT_TIME in names:
        index = names.index(EVENT_TIME)
        if index != len(names) - 1 or schema.field(index).type != pa.int64():
            raise JobRejected(f"{where}: the column name {EVENT_TIME!r} is reserved for event time")


def _check_source(source: graph_pb2.SourceSpec, where: str, artifacts: set[str]) -> None:
    if source.WhichOneof("kind") is None:
        raise JobRejected(f"{where}: it does not say what to read")
    if source.WhichOneof("kind") == "spark" and source.spark.input_schemas:
        raise JobRejected(f"{where}: a source on Spark has no inputs")
    if source.WhichOneof("kind") == "arrow":
        artifact = source.arrow.artifact
        if not _ARTIFACT_ID.fullmatch(artifact) or artifact not in artifacts:
            raise JobRejected(f"{where}: its table {artifact!r} is not among the job's artifacts")


def _check_spark(operator: graph_pb2.Operator, output: pa.Schema, where: str) -> None:
    schemas = [decode_schema(schema, where) for schema in operator.spark.input_schemas]
    for schema in schemas:
        check_for_spark(where, schema)
    if not files_read(operator) <= set(range(len(schemas))):
        raise JobRejected(f"{where}: it has files for an input that it has not")
    check_from_spark(where, output)
    if not schemas or EVENT_TIME in {
        name for schema in (*schemas, output) for name in schema.names
    }:
        raise JobRejected(
            f"{where}: a Spark stage has inputs, and neither reads nor makes event time"
        )


def _check_grouping(operator: graph_pb2.Operator, given: pa.Schema, where: str) -> None:
    _check_columns(grouping_keys(operator) or (), given, where)
    window = window_of(operator)
    if window is not None and is_event_time(window) and EVENT_TIME not in given.names:
        raise JobRejected(
            f"{where}: an event-time window needs event time: call .with_event_time(...) before it"
        )
    for aggregate in (
        *operator.window_aggregate.aggregates,
        *operator.running_aggregate.aggregates,
    ):
        if aggregate.column:
            _check_columns([aggregate.column], given, where)


def _check_process(operator: graph_pb2.Operator, given: pa.Schema, where: str) -> None:
    spec = operator.process
    is_keyed = spec.kind in _KEYED_KINDS
    if is_keyed != bool(spec.keys):
        raise JobRejected(
            f"{where}: a function with state per key needs keys (.key_by(...) before it), and only such "
            "a function has them"
        )
    _check_columns(spec.keys, given, where)
    if not has_two_inputs(operator):
        return
    second = decode_schema(operator.second_input_schema, where)
    _check_schema(second, where)
    if spec.kind == graph_pb2.PROCESS_KIND_KEYED_CO:
        _check_columns(spec.second_keys, second, where)
        check_same_keys(where, given, spec.keys, second, spec.second_keys)


def _check_join(
    operator: graph_pb2.Operator, left: pa.Schema, output: pa.Schema, where: str
) -> None:
    spec = operator.join
    right = decode_schema(operator.second_input_schema, where)
    _check_schema(right, where)
    if not spec.keys:
        raise JobRejected(f"{where}: a join needs the columns that must be equal on both sides")
    for schema in (left, right):
        _check_columns(spec.keys, schema, where)
        if EVENT_TIME not in schema.names:
            raise JobRejected(
                f"{where}: a join needs event time on both sides: call .with_event_time(...) before it"
            )
    check_same_keys(where, left, spec.keys, right, spec.keys)
    if spec.is_interval:
        if spec.how != graph_pb2.JOIN_KIND_INNER or spec.lower_ms > spec.upper_ms:
            raise JobRejected(f"{where}: an interval join is inner, and its bounds are in order")
    elif spec.window.kind == graph_pb2.WINDOW_KIND_COUNT or not is_event_time(spec.window):
        raise JobRejected(f"{where}: a join has windows of event time only")
    expected = [left.field(key).type for key in spec.keys]
    expected += [] if spec.is_interval else [f.type for f in window_fields(spec.window)]
    for schema in (left, right):
        expected += [f.type for f in user_schema(schema) if f.name not in spec.keys]
    if user_schema(output).types != expected:
        raise JobRejected(
            f"{where}: its output ({', '.join(output.names)}) does not have the columns of both sides"
        )


def _check_columns(names: Iterable[str], schema: pa.Schema, where: str) -> None:
    for name in names:
        if name not in schema.names:
            raise JobRejected(
                f"{where}: there is no column {name!r}{nearest_hint(name, schema.names)}; the "
                f"columns are {', '.join(schema.names) or 'none'}"
            )


def _expression_columns(expression: graph_pb2.Expression) -> Iterator[str]:
    return (node.column for node in nodes_of(expression) if node.HasField("column"))
