"""Which columns are needed where: decided backwards, from the sinks to the sources.

Invariant: whatever an operator or an exchange looks at is in the need of the output it reads from;
a need is never empty, since a batch without columns has no rows. Where the user has said what becomes of bad records,
what tells them is computed, whoever reads it: which rows there are does not depend on the columns that are read of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

import pyarrow as pa

from penstock.aggregates.aggregates import Aggregate
from penstock.graph.column_checks import column_name
from penstock.graph.logical import (
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
    input_has_event_time,
    input_schema,
)
from penstock.graph.operator_checks import ERROR_COLUMN
from penstock.graph.window_spec import is_event_time
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes

KEY_COLUMN = "key"
_PARSED = ("csv", "json")
"""Formats of files whose values may be malformed, one by one."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the readers of an output need.

    Attributes:
        columns: of the user's columns.
        event_time: whether the event time is needed too.
    """

    columns: frozenset[str] = frozenset()
    event_time: bool = False

    def __or__(self, other: Need) -> Need:
        return Need(self.columns | other.columns, self.event_time or other.event_time)


Needs = dict[tuple[int, str], Need]
"""Node index and side tag ("" = main output) -> what is needed of that output."""


def find_needs(nodes: Sequence[Node]) -> Needs:
    """The needs of all outputs that are read.

    Args:
        nodes: a job's nodes, inputs first.
    """
    needs: Needs = {}
    for node in reversed(nodes):
        main = needs.get((node.index, ""), Need()) | Need(_told_bad_by(node))
        needs[node.index, ""] = _not_empty(main, node.schema)
        for position, source in enumerate(node.inputs):
            known = needs.get((source.node.index, source.tag), Need())
            needs[source.node.index, source.tag] = known | need_of(node, position, needs)
    return needs


def need_of(node: Node, position: int, needs: Needs) -> Need:
    """What one operator needs of one of its inputs.

    Args:
        position: which of its inputs.
        needs: of the operator's own outputs.
    """
    source = node.inputs[position]
    sides = {tag: need for (index, tag), need in needs.items() if index == node.index and tag}
    need = _operation_need(node, position, needs[node.index, ""])
    if position == 0 or isinstance(node.operation, Union):
        need |= _side_need(node, sides)
    # The inputs of a union have the same columns, so a key that one is routed by is kept in all.
    is_union = isinstance(node.operation, Union)
    need |= Need(_union_keys(node) if is_union else frozenset(source.routing.keys))
    return _not_empty(need, input_schema(source))


def _union_keys(node: Node) -> frozenset[str]:
    """What the inputs of a union, and of unions among them, are routed by."""
    if not isinstance(node.operation, Union):
        return frozenset()
    routed = (frozenset(source.routing.keys) | _union_keys(source.node) for source in node.inputs)
    return frozenset().union(*routed)


def _operation_need(node: Node, position: int, output: Need) -> Need:
    """What an operation reads of one of its inputs, given what is needed of its main output."""
    source = node.inputs[position]
    everything = frozenset(input_schema(source).names)
    event_time = output.event_time
    match node.operation:
        case ReadSource():
            return Need()
        case Project(columns=columns):
            read = (e.columns() for name, e in columns if name in output.columns)
            return Need(frozenset(chain.from_iterable(read)), event_time)
        case Filter(predicate=predicate):
            return Need(output.columns | predicate.columns(), event_time)
        case RowFunction():
            return Need(_row_function_reads(node.operation, output, everything), event_time)
        case BatchFunction():
            return Need(everything, event_time)
        case AssignEventTime(column=column):
            return Need(output.columns | {column}, event_time=False)
        case WindowAggregate(window=window, keys=keys, aggregates=aggregates):
            used = _aggregated(keys, aggregates, everything)
            return Need(used, event_time or is_event_time(window))
        case RunningAggregate(keys=keys, aggregates=aggregates):
            return Need(_aggregated(keys, aggregates, everything), event_time)
        case ApplyWindowFunction(window=window):
            return Need(everything, event_time or is_event_time(window))
        case Process(columns=columns):
            read_here = columns[position]
            return Need(
                everything if read_here is None else read_here, input_has_event_time(source)
            )
        case Join(keys=keys, left=left, right=right):
            of_side = (left, right)[position]
            wanted = (column for column, name in of_side if name in output.columns)
            return Need(frozenset((*keys, *wanted)), event_time=True)
        case WriteSink() | SparkStage():
            return Need(everything)
        case Union():
            return output
        case _:
            assert_never(node.operation)


def _told_bad_by(node: Node) -> frozenset[str]:
    """The columns whose values tell bad records that are not to fail the job."""
    if node.properties.on_error.action == graph_pb2.ERROR_ACTION_FAIL:
        return frozenset()
    match node.operation:
        case Project(columns=columns):
            return frozenset(name for name, made in columns if column_name(made) is None)
        case ReadSource(spec=spec):
            return _checked_by(spec) & frozenset(node.schema.names)
        case _:
            return frozenset()


def _checked_by(source: graph_pb2.SourceSpec) -> frozenset[str]:
    """The columns of which a value makes a bad record: it does not parse, or is null and never may be."""
    if not source.HasField("files"):
        return frozenset(source.generator.never_null)
    is_parsed = source.files.format in _PARSED
    fields = schema_from_bytes(source.files.schema)
    return frozenset(field.name for field in fields if is_parsed or not field.nullable)


def _row_function_reads(
    operation: RowFunction, output: Need, everything: frozenset[str]
) -> frozenset[str]:
    used = everything if operation.columns is None else operation.columns & everything
    if operation.kind == graph_pb2.ROW_FUNCTION_KIND_FILTER:
        return used | output.columns
    if operation.kind == graph_pb2.ROW_FUNCTION_KIND_KEY:
        return used | output.columns - {KEY_COLUMN}
    return used


def _aggregated(
    keys: Iterable[str], aggregates: Iterable[tuple[str, Aggregate]], everything: frozenset[str]
) -> frozenset[str]:
    used = set(keys)
    for _, aggregate in aggregates:
        if aggregate.needs_row:
            return everything
        if aggregate.input_column is not None:
            used.add(aggregate.input_column)
    return frozenset(used)


def pruned(schema: pa.Schema, need: Need) -> list[pa.Field]:
    """The user's columns of a schema that are needed, in the schema's order."""
    return [field for field in schema if field.name in need.columns]


def _side_need(node: Node, sides: dict[str, Need]) -> Need:
    """What side outputs need of the input: their rows are the input's rows."""
    need = Need()
    for tag, side in sides.items():
        if tag != node.error_tag:
            need |= side
        elif node.inputs:
            need |= Need(side.columns - {ERROR_COLUMN})
    return need


def _not_empty(need: Need, schema: pa.Schema) -> Need:
    if need.columns or need.event_time or not schema.names:
        return need
    return Need(frozenset({min(schema, key=_width).name}))


def _width(field: pa.Field) -> int:
    """Bits per value; variable-width columns come last."""
    try:
        return int(field.type.bit_width)
    except ValueError:
        return 1 << 30
