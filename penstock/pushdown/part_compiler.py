"""Compiles a relational part of a job into steps over Spark's DataFrames.

A part ends at an output, and begins where its rows come from: behind sources, Spark stages, and operators that are for
Penstock (``Properties.engine``). What does not compile is refused here, when the graph is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.logical import (
    Node,
    NodeInput,
    ReadSource,
    SparkStage,
    WriteSink,
    input_schema,
    reachable,
)
from penstock.pb import graph_pb2
from penstock.planner.needs import find_needs, pruned
from penstock.pushdown.frames import SparkFrame, Steps, as_they_are
from penstock.pushdown.operators import operator_frame
from penstock.pushdown.part_runner import CompiledPart
from penstock.pushdown.sql_text import NotCompiledError
from penstock.pushdown.steps import Select

PENSTOCK = "penstock"
SPARK = "spark"
_NO_TIME_AT_BEGIN = (
    "event time does not reach Spark: call .with_event_time(...) behind the source, within the part"
)


@dataclass(frozen=True, slots=True)
class PartInput:
    """Rows that a part begins with.

    Attributes:
        columns: those of them that it needs.
    """

    source: NodeInput
    columns: pa.Schema


def is_begin(node: Node) -> bool:
    """Whether a part begins behind a node."""
    is_outside = isinstance(node.operation, (ReadSource, SparkStage))
    return is_outside or node.properties.engine == PENSTOCK


def compile_part(target: NodeInput) -> tuple[CompiledPart, tuple[PartInput, ...]]:
    """The part of a job in front of an output, and what it reads.

    Raises:
        JobRejected: something in it does not compile; the message names the operator, and what to do.
    """
    nodes = _operators(target)
    needs = find_needs([*reachable([target.node]), _reader(target)])
    begins = {
        (given.node.index, given.tag): given
        for node in nodes
        for given in node.inputs
        if is_begin(given.node)
    }
    steps, frames, inputs = Steps(len(begins)), {}, []
    for number, (place, given) in enumerate(begins.items()):
        columns = pa.schema(pruned(input_schema(given), needs[place]))
        inputs.append(PartInput(given, columns))
        frames[place] = SparkFrame(number, columns, _NO_TIME_AT_BEGIN)
    for node in nodes:
        given_frames = [frames[given.node.index, given.tag] for given in node.inputs]
        try:
            frame = operator_frame(node, given_frames, needs[node.index, ""], steps)
        except NotCompiledError as error:
            raise _refused(node, str(error)) from error
        frames[node.index, ""] = frame
    result = frames[target.node.index, ""]
    steps.add(Select(result.number, as_they_are(input_schema(target).names)))
    names = tuple(node.name for node in nodes if not node.is_inserted)
    return CompiledPart(names, len(begins), tuple(steps.done)), tuple(inputs)


def _operators(target: NodeInput) -> list[Node]:
    """The operators of a part, inputs first."""
    found: dict[int, Node] = {}
    waiting = [target]
    while waiting:
        given = waiting.pop()
        if is_begin(given.node):
            continue
        if given.tag:
            raise _refused(given.node, f"its side output {given.tag!r} is read")
        if given.node.index not in found:
            found[given.node.index] = given.node
            waiting.extend(given.node.inputs)
    return [found[index] for index in sorted(found)]


def _reader(target: NodeInput) -> Node:
    """Somebody who needs every column of an output."""
    index, spec = target.node.index + 1, graph_pb2.SinkSpec()
    return Node(index, WriteSink(spec), (target,), "", pa.schema([]), has_event_time=False)


def _refused(node: Node, what: str) -> JobRejected:
    return JobRejected(
        f"engine('spark'): operator {node.name!r} does not compile for Spark: {what}. Have Penstock do it: call "
        ".engine('penstock') behind it, so that Spark's part begins there, or .engine('spark') in front of it; "
        "or write it for Spark: .spark(fn, schema=...). docs/spark.md has the list of what compiles"
    )
