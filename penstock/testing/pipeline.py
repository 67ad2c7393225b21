"""From what a test is about, a function or a chain of operators, to the job graph that is run.

The streams that a test pushes rows into are sources only in name; what comes out of the tested chain goes
through an operator of ours, where it is taken. Everything in between is planned as any job is, so that
what a cluster would refuse is refused here, with the same words.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import pyarrow as pa
from typing_extensions import override

import penstock.aggregates.aggregates as aggregates
from penstock.config import Configuration
from penstock.connectors.inference import plain_type
from penstock.connectors.memory import rows_to_table
from penstock.connectors.sink import Sink
from penstock.connectors.source import Source
from penstock.errors import JobRejected
from penstock.functions.functions import (
    FilterFunction,
    FlatMapFunction,
    MapFunction,
    WindowFunction,
)
from penstock.graph.column_checks import check_schema
from penstock.graph.exchanges import PIPELINED
from penstock.graph.job_graph import validate
from penstock.graph.logical import (
    BatchFunction,
    Node,
    NodeInput,
    Process,
    ReadSource,
    Union,
    WriteSink,
    input_has_event_time,
    input_schema,
    reachable,
)
from penstock.pb import graph_pb2
from penstock.planner.planner import Planner
from penstock.processing.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ProcessFunction,
    StatefulFunction,
)
from penstock.streams.environment import Environment
from penstock.streams.function_schemas import declared_schema
from penstock.streams.job_builder import JobBuilder
from penstock.streams.stream import Stream
from penstock.streams.stream_outputs import StreamSink
from penstock.streams.windows import Window

INPUT_UIDS = ("penstock.testing/input", "penstock.testing/input-2")
OUTPUT_UID = "penstock.testing/output"
FUNCTION_UID = "function"

_TWO_INPUTS = (BroadcastProcessFunction, CoProcessFunction)
_KEYED = (
    KeyedProcessFunction,
    KeyedBatchFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the tested function is used.

    Attributes:
        keys: key columns of the inputs, () = none.
        output_schema: of what it emits; None = from its annotations.
        window: that it is applied to; None = none.
    """

    keys: Sequence[tuple[str, ...]]
    output_schema: Any
    window: Window | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What is run.

    Attributes:
        inputs: the user's columns of the streams that rows are pushed into.
        has_output: False where the chain ends in a sink.
        has_source: it reads from a source of its own.
        has_event_time: rows are pushed with event time.
    """

    graph: graph_pb2.JobGraph
    inputs: tuple[pa.Schema, ...]
    has_output: bool
    has_source: bool
    has_event_time: bool


class _Pushed:
    """Stands for the source of the rows that a test pushes."""


class _PassOn(ProcessFunction):
    """Stands for the operator that output is taken from."""

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)


def input_count(tested: object, given: int | None) -> int:
    """How many streams what is tested reads from.

    Raises:
        JobRejected: it reads from another number of them than was said.
    """
    if isinstance(tested, Source):
        found = 0
    elif isinstance(tested, _TWO_INPUTS):
        found = 2
    elif inspect.isfunction(tested):
        found = _streams_of(tested) if given is None else given
        if found not in (1, 2):
            raise JobRejected(f"harness: a chain reads from 1 or 2 streams, not from {found}")
        _check_takes(tested, found)
    else:
        found = 1
    if given not in (None, found):
        raise JobRejected(
            f"harness: inputs={given}, but {type(tested).__name__} reads from {found}"
        )
    return found


def _streams_of(chain: FunctionType) -> int:
    """How many parameters a function has that it must be given, at least one."""
    parameters = inspect.signature(chain).parameters.values()
    needed = sum(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )
    return max(1, needed)


def _check_takes(chain: FunctionType, streams: int) -> None:
    signature = inspect.signature(chain)
    try:
        signature.bind(*range(streams))
    except TypeError as error:
        raise JobRejected(
            f"harness: the chain {chain.__name__}{signature} does not take {streams} "
            f"stream{'s' * (streams > 1)}: {error}"
        ) from error


def row_schema(schema: Any, argument: str) -> tuple[pa.Schema, pa.RecordBatch | None]:
    """The columns of the rows to be pushed, and some rows where the test gave rows.

    Raises:
        JobRejected: it is no schema.
    """
    if isinstance(schema, Sequence) and not isinstance(schema, (str, bytes, pa.Schema)):
        table = rows_to_table(schema)
        return table.schema, table.combine_chunks().to_batches()[0]
    if schema is None:
        raise JobRejected(
            f"harness: {argument}= is missing: the columns of the rows to be pushed, as a pa.schema([...]), "
            "{'user': str, 'n': int}, a dataclass, or a list of rows like those"
        )
    found = declared_schema(f"harness: {argument}", schema)
    # As sources give them out.
    plain = pa.schema([field.with_type(plain_type(field.type)) for field in found], found.metadata)
    return check_schema("harness", plain), None


def build(
    tested: Any,
    schemas: Sequence[tuple[pa.Schema, pa.RecordBatch | None]],
    shape: Shape,
    config: Configuration,
    *,
    has_event_time: bool,
) -> Pipeline:
    """Plans what is tested.

    Raises:
        JobRejected: it cannot run.
    """
    if isinstance(tested, Source):
        environment = Environment()
        builder = environment._builder
        stream: Any = environment.source(tested).uid(FUNCTION_UID)
    else:
        builder = JobBuilder(_no_job, _no_job)
        streams = [
            _input(builder, INPUT_UIDS[index], schema, rows, has_event_time=has_event_time)
            for index, (schema, rows) in enumerate(schemas)
        ]
        stream = _applied(tested, streams, shape)
    has_output = isinstance(stream, Stream)
    if has_output:
        _take_output(builder, stream._source)
    elif not isinstance(stream, StreamSink):
        raise JobRejected(
            f"harness: the chain must return a stream or the end of one, got {stream!r}; a windowed stream "
            "needs .aggregate(...), .reduce(...) or .process(...)"
        )
    nodes = reachable(builder.sinks)
    _check_inputs(nodes, len(schemas))
    _read_side_outputs(builder, nodes)
    graph = Planner(reachable(builder.sinks), config).plan()
    graph.name = "test"
    graph.config.update(config.of_job())
    for edge in (
        graph.edges
    ):  # nothing is restarted here, and what is pushed has no end before the test says
        edge.partition_type = PIPELINED
    validate(graph)
    return Pipeline(
        graph,
        tuple(schema for schema, _ in schemas),
        has_output,
        isinstance(tested, Source),
        has_event_time,
    )


def _no_job() -> NoReturn:
    raise JobRejected("harness: nothing runs while a chain is built: look at h.output")


def _input(
    builder: JobBuilder,
    uid: str,
    schema: pa.Schema,
    rows: pa.RecordBatch | None,
    *,
    has_event_time: bool,
) -> Stream:
    spec = graph_pb2.SourceSpec(custom=graph_pb2.Function(), bounded=True)
    sample = None if rows is None else lambda count: rows.slice(0, count)
    node = builder.add(
        ReadSource(spec, function=_Pushed(), sample=sample),
        (),
        label="input",
        schema=schema.remove_metadata(),
        has_event_time=has_event_time,
    )
    node.properties.uid = uid
    return Stream(builder, NodeInput(node))


def _take_output(builder: JobBuilder, source: NodeInput) -> None:
    """Event time comes out too, but where asking for it could change what a function may do."""
    schema = input_schema(source)
    is_strict = any(_pairs_rows_for_event_time(node) for node in reachable([source.node]))
    taken = builder.add(
        Union() if is_strict else Process(graph_pb2.PROCESS_KIND_PLAIN, _PassOn()),
        (source,),
        label="output",
        schema=schema,
        has_event_time=input_has_event_time(source),
    )
    taken.properties.uid = OUTPUT_UID
    _discard(builder, NodeInput(taken))


def _pairs_rows_for_event_time(node: Node) -> bool:
    """Whether its function must say which row each result is of, where event time is needed."""
    operation = node.operation
    return isinstance(operation, BatchFunction) or (
        isinstance(operation, Process) and operation.kind == graph_pb2.PROCESS_KIND_KEYED_BATCH
    )


def _discard(builder: JobBuilder, source: NodeInput) -> None:
    builder.add(
        WriteSink(graph_pb2.SinkSpec(discard=graph_pb2.DiscardSink())),
        (source,),
        label="discard",
        schema=input_schema(source),
        has_event_time=False,
    )


def _read_side_outputs(builder: JobBuilder, nodes: Sequence[Node]) -> None:
    """Reads the declared side outputs, so that their rows have all their columns."""
    read = {(source.node.index, source.tag) for node in nodes for source in node.inputs}
    for node in nodes:
        for tag in sorted({node.late_tag, node.error_tag} - {""}):
            if (node.index, tag) not in read:
                _discard(builder, NodeInput(node, tag))


def _check_inputs(nodes: Sequence[Node], count: int) -> None:
    read = {node.properties.uid for node in nodes}
    for index in range(count):
        if INPUT_UIDS[index] not in read:
            raise JobRejected(f"harness: nothing reads from input {index} of the chain")


def _applied(tested: Any, streams: Sequence[Stream], shape: Shape) -> Any:
    """What the user would write, for the kind of function that this is."""
    first = streams[0]
    function = _rejecting_classes(tested)
    if isinstance(function, StatefulFunction):
        return _processed(function, streams, shape).uid(FUNCTION_UID)
    output = shape.output_schema
    if isinstance(function, MapFunction):
        return first.map(function, schema=output).uid(FUNCTION_UID)
    if isinstance(function, FlatMapFunction):
        return first.flat_map(function, schema=output).uid(FUNCTION_UID)
    if isinstance(function, FilterFunction):
        return first.filter(function).uid(FUNCTION_UID)
    if isinstance(function, Sink):
        return first.sink(function).uid(FUNCTION_UID)
    grouped: Any = first.key_by(*shape.keys[0]) if shape.keys[0] else first
    if isinstance(function, WindowFunction):
        if shape.window is None:
            raise JobRejected(
                "harness: a ps.WindowFunction needs window=, such as ps.tumbling('10s')"
            )
        return grouped.window(shape.window).process(function, schema=output).uid(FUNCTION_UID)
    if hasattr(function, "create_accumulator"):
        if shape.window is not None:
            grouped = grouped.window(shape.window)
        elif not shape.keys[0]:
            raise JobRejected("harness: an aggregate needs keys=, window=, or both")
        return grouped.aggregate(result=aggregates.aggregate(function)).uid(FUNCTION_UID)
    if callable(function):
        return function(*streams)
    raise JobRejected(
        f"harness: {function!r} cannot be tested: give an object of a function class of penstock, or a "
        "function that builds a chain, such as lambda stream: stream.map(fn)"
    )


def _rejecting_classes(tested: Any) -> Any:
    if isinstance(tested, type):
        raise JobRejected(f"harness: pass an object, {tested.__name__}(), not the class")
    return tested


def _processed(function: Any, streams: Sequence[Stream], shape: Shape) -> Stream:
    output, keys = shape.output_schema, shape.keys
    if isinstance(function, _KEYED) and not keys[0]:
        raise JobRejected(
            f"harness: {type(function).__name__} has state per key: give keys=['user'] or another column"
        )
    first: Stream = streams[0].key_by(*keys[0]) if keys[0] else streams[0]
    if isinstance(function, BroadcastProcessFunction):
        return first.connect(streams[1].broadcast()).process(function, schema=output)
    if isinstance(function, CoProcessFunction):
        second: Stream = streams[1].key_by(*keys[1]) if keys[1] else streams[1]
        return first.connect(second).process(function, schema=output)
    return first.process(function, schema=output)
