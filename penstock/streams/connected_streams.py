"""Process functions in the graph, of one stream or of two that were connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import JobRejected
from penstock.functions.row_access import columns_used
from penstock.graph.join_schemas import check_same_keys
from penstock.graph.logical import (
    NodeInput,
    Process,
    input_has_event_time,
    input_schema,
)
from penstock.loops.build import build_loop
from penstock.pb import graph_pb2
from penstock.processing.process_functions import PROCESS_KINDS, ProcessKindInfo, process_kind
from penstock.rows.schema import user_schema
from penstock.streams.foreign_names import missing_call
from penstock.streams.function_schemas import process_output_schema
from penstock.streams.job_builder import JobBuilder
from penstock.streams.kept_keys import lost_keys
from penstock.streams.stream import Schema, Stream, stream_of

_HASH = graph_pb2.PARTITIONING_HASH
_BROADCAST = graph_pb2.PARTITIONING_BROADCAST


class ConnectedStreams:
    """Two streams whose rows go to one function, in any order between them; made by ``connect``.

    Only behind ``other.broadcast(load_first=True)``, and behind ``other.broadcast()`` in batch mode, the order is
    settled: all rows of the other stream come before the first of this one.

    Which functions fit follows from the streams:

    - ``stream.key_by(...).connect(other.broadcast())``: ``KeyedBroadcastProcessFunction``
    - ``stream.connect(other.broadcast())``: ``BroadcastProcessFunction``
    - ``stream.key_by(...).connect(other.key_by(...))``: ``KeyedCoProcessFunction``
    - ``stream.connect(other)``: ``CoProcessFunction``
    """

    def __init__(self, builder: JobBuilder, first: NodeInput, second: NodeInput) -> None:
        self._builder = builder
        self._inputs = (first, second)
        self._kind = _connected_kind(first, second)

    if not TYPE_CHECKING:  # type checkers know the names that there are

        def __getattr__(self, name: str) -> Any:
            raise missing_call(self, name)

    def process(self, function: object, schema: Schema = None) -> Stream:
        """Hands the rows of both streams to a function, which emits rows.

        Rows come in any order between the streams, unless the second is read first
        (``.broadcast(load_first=True)``). The output has event time where both streams have.

        Args:
            function: an object of the class that fits the streams.
            schema: the columns of what it emits; None = from annotations.
        """
        return add_process(self._builder, self._inputs, function, (self._kind,), schema)


def add_process(
    builder: JobBuilder,
    inputs: tuple[NodeInput, ...],
    function: object,
    fitting: Sequence[graph_pb2.ProcessKind.ValueType],
    schema: Schema,
) -> Stream:
    """The output of a process function.

    Args:
        fitting: kinds of functions that go with the inputs.
        schema: what the user gave.

    Raises:
        JobRejected: the function does not fit, or its output's columns are not known.
    """
    info = _fitting_kind(function, fitting, inputs)
    kind = info.kind
    output = process_output_schema(function, info.methods, schema)
    keys = tuple(source.routing.keys for source in inputs)
    if kind == graph_pb2.PROCESS_KIND_PLAIN:
        keys = ((),)
    has_event_time = all(input_has_event_time(source) for source in inputs)
    columns = tuple(
        _columns_read(function, method, source)
        for method, source in zip(info.methods, inputs, strict=True)
    )
    loop = None
    if kind == graph_pb2.PROCESS_KIND_KEYED:
        given = user_schema(input_schema(inputs[0]))
        loop = build_loop(function, given, keys[0], output, has_event_time=has_event_time)
    if loop is not None:
        columns = (frozenset([*(each.name for each in loop.columns), *loop.passed.values()]),)
    operation = Process(kind, function, keys[0], keys[1] if len(keys) > 1 else (), columns, loop)
    node = builder.add(
        operation,
        inputs,
        label=type(function).__name__,
        schema=output,
        has_event_time=has_event_time,
    )
    return stream_of(builder, node)


_CALLS = {
    graph_pb2.PROCESS_KIND_PLAIN: "stream.process(...)",
    graph_pb2.PROCESS_KIND_KEYED: "stream.key_by('user').process(...)",
    graph_pb2.PROCESS_KIND_KEYED_BATCH: "stream.key_by('user').process(...)",
    graph_pb2.PROCESS_KIND_BROADCAST: "stream.connect(rules.broadcast()).process(...)",
    graph_pb2.PROCESS_KIND_KEYED_BROADCAST: (
        "stream.key_by('user').connect(rules.broadcast()).process(...)"
    ),
    graph_pb2.PROCESS_KIND_CO: "first.connect(second).process(...)",
    graph_pb2.PROCESS_KIND_KEYED_CO: (
        "first.key_by('user').connect(second.key_by('user')).process(...)"
    ),
}


def _fitting_kind(
    function: object,
    fitting: Sequence[graph_pb2.ProcessKind.ValueType],
    inputs: Sequence[NodeInput],
) -> ProcessKindInfo:
    """The kind of a function, which must be one of those that go with the streams.

    Raises:
        JobRejected: it is not, or its states contradict each other.
    """
    classes = [info.base.__name__ for info in PROCESS_KINDS if info.kind in fitting]
    wanted = " or a ".join(f"ps.{name}" for name in classes)
    if callable(function) and not hasattr(function, "process") and not isinstance(function, type):
        raise JobRejected(
            f"process: {function!r} is a plain function, which goes with .map or .flat_map; here pass "
            f"an object of a class derived from a {wanted}"
        )
    info = process_kind(function)
    if info.kind not in fitting:
        lost = next(filter(None, map(lost_keys, inputs)), None) if info.is_keyed else None
        if lost is not None:
            raise JobRejected(
                f"process: {type(function).__name__} is a {info.base.__name__}, which is used as "
                f"{_CALLS[info.kind]}; {lost.story}: call .key_by(...) again before it"
            )
        raise JobRejected(
            f"process: {type(function).__name__} is a {info.base.__name__}, which is used as "
            f"{_CALLS[info.kind]}; on these streams use a {wanted}"
        )
    return info


def _columns_read(function: object, method: str, source: NodeInput) -> frozenset[str] | None:
    """The columns of an input that the function reads, None = it may read all of them."""
    if method == "process_batch":
        return None
    return columns_used(getattr(function, method), input_schema(source))


def _connected_kind(first: NodeInput, second: NodeInput) -> graph_pb2.ProcessKind.ValueType:
    kinds = (first.routing.partitioning, second.routing.partitioning)
    if kinds[0] == _BROADCAST:
        raise JobRejected(
            "connect: the first stream is broadcast; it is the second that may be: "
            "stream.connect(rules.broadcast()), or stream.key_by(...).connect(rules.broadcast())"
        )
    if kinds[1] == _BROADCAST:
        if kinds[0] == _HASH:
            return graph_pb2.PROCESS_KIND_KEYED_BROADCAST
        return graph_pb2.PROCESS_KIND_BROADCAST
    if kinds[0] == _HASH and kinds[1] == _HASH:
        check_same_keys(
            "connect",
            input_schema(first),
            first.routing.keys,
            input_schema(second),
            second.routing.keys,
        )
        return graph_pb2.PROCESS_KIND_KEYED_CO
    if _HASH in kinds:
        which, other = ("first", "second") if kinds[0] == _HASH else ("second", "first")
        advice = " or .broadcast()" if other == "second" else ""
        lost = lost_keys(first if other == "first" else second)
        if lost is not None:
            raise JobRejected(
                f"connect: the {which} stream has keys and the {other} has none any more: {lost.story}: "
                f"call .key_by(...) again{advice} on the {other}"
            )
        raise JobRejected(
            f"connect: the {which} stream has keys and the {other} has none, so rows that belong "
            f"together would not meet: call .key_by(...){advice} on the {other} too, or connect both "
            "before key_by"
        )
    return graph_pb2.PROCESS_KIND_CO
