"""Logical nodes: what the user's calls on streams add up to, before it is planned.

A node is one operation with its inputs; streams are references to a node's main or side output. Nodes
are numbered in the order they were made, so that inputs always have smaller numbers and a node's number
is a topological order. Operations never change; the properties of a node (uid, parallelism, ...) do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.aggregates.aggregates import Aggregate
from penstock.client.artifacts import LocalArtifact
from penstock.errors import JobRejected
from penstock.expressions import Expr
from penstock.graph.operator_checks import ERROR_COLUMN, SOURCE_ERROR_SCHEMA
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME

EVENT_TIME_FIELD = pa.field(EVENT_TIME, pa.int64(), nullable=False)


# ---------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class ReadSource:
    """Rows from outside.

    Attributes:
        spec: without the pickle of a function; ``function`` has it.
        function: the user's source object or generator function, pickled when the job is planned.
        is_single: it has one split, so one subtask reads it.
        sample: some rows of it while the job is being built, at most as many as asked for.
        updates_of: they are updates, which this operator of an earlier job gave out; "" = rows.
    """

    spec: graph_pb2.SourceSpec
    artifacts: tuple[LocalArtifact, ...] = ()
    function: object | None = None
    is_single: bool = False
    sample: Callable[[int], pa.RecordBatch | None] | None = None
    updates_of: str = ""


@dataclass(frozen=True, slots=True)
class Project:
    """Replaces the columns."""

    columns: tuple[tuple[str, Expr], ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Keeps the rows for which an expression is true."""

    predicate: Expr


@dataclass(frozen=True, slots=True)
class RowFunction:
    """A Python function per row.

    Attributes:
        columns: what it reads, None = it may read every column.
    """

    kind: graph_pb2.RowFunctionKind.ValueType
    function: object
    columns: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class BatchFunction:
    """A Python function per batch."""

    function: Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class AssignEventTime:
    """Gives rows their event time."""

    column: str
    out_of_orderness_ms: int
    idle_timeout_ms: int


@dataclass(frozen=True, slots=True)
class WindowAggregate:
    """Aggregates per key and window."""

    window: graph_pb2.WindowSpec
    keys: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregate], ...]


@dataclass(frozen=True, slots=True)
class ApplyWindowFunction:
    """A Python function per key and window."""

    window: graph_pb2.WindowSpec
    keys: tuple[str, ...]
    kind: graph_pb2.WindowFunctionKind.ValueType
    function: object


@dataclass(frozen=True, slots=True)
class RunningAggregate:
    """Aggregates per key over all rows so far."""

    keys: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregate], ...]


@dataclass(frozen=True, slots=True)
class Process:
    """A process function of the user's, of one or two inputs.

    Attributes:
        keys: key columns of the first input, () for functions without keys.
        second_keys: key columns of the second input, where it is keyed too.
        columns: per input what the function reads, None = it may read every column.
        compiled: what is called for rows instead of the function, where it is compiled.
    """

    kind: graph_pb2.ProcessKind.ValueType
    function: object
    keys: tuple[str, ...] = ()
    second_keys: tuple[str, ...] = ()
    columns: tuple[frozenset[str] | None, ...] = (None,)
    compiled: graph_pb2.CompiledLoop | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Joins the rows of two inputs that have equal keys.

    Attributes:
        interval: of an interval join, (lower, upper) in milliseconds; else None.
        window: of a window join, else None.
        left: columns of the left input that are no keys, with their names in the output.
        right: the same of the right input.
    """

    keys: tuple[str, ...]
    how: graph_pb2.JoinKind.ValueType
    interval: tuple[int, int] | None
    window: graph_pb2.WindowSpec | None
    left: tuple[tuple[str, str], ...]
    right: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SparkStage:
    """A function of the user's that takes and returns Spark DataFrames: of all its rows at once.

    Attributes:
        timeout_ms: how long it may take, 0 = as long as it likes.
        cores: of Spark in local mode, 0 = as many as the TaskManager has slots.
        is_compiled: the function was compiled from relational operators, so the session has to be as they mean it.
    """

    function: object
    timeout_ms: int
    cores: int
    is_compiled: bool = False


@dataclass(frozen=True, slots=True)
class WriteSink:
    """Rows to the outside.

    Attributes:
        spec: without the pickle of a custom sink; ``function`` has it.
    """

    spec: graph_pb2.SinkSpec
    function: object | None = None


@dataclass(frozen=True, slots=True)
class Union:
    """All rows of all inputs."""


Operation = (
    ReadSource
    | Project
    | Filter
    | RowFunction
    | BatchFunction
    | AssignEventTime
    | WindowAggregate
    | ApplyWindowFunction
    | RunningAggregate
    | Process
    | Join
    | SparkStage
    | WriteSink
    | Union
)


def is_key_function(operation: Operation) -> bool:
    """Whether it is the function of ``key_by(fn)``."""
    return isinstance(operation, RowFunction) and operation.kind == graph_pb2.ROW_FUNCTION_KIND_KEY


def is_spark(operation: Operation) -> bool:
    """Whether Spark does it."""
    if isinstance(operation, ReadSource):
        return operation.spec.WhichOneof("kind") == "spark"
    return isinstance(operation, SparkStage)


# ---------------------------------------------------------------- nodes


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows reach the subtasks of the next operator; without a partitioning the planner chooses.

    Attributes:
        keys: of a keyed stream.
        is_placed: the rows lie by their keys already, and stay where they are unless the next operator
            has another number of subtasks or key-groups.
        lost_keys: of a keyed stream that was routed otherwise.
        load_first: of a broadcast stream: it is read whole before the other input; None = in batch mode.
    """

    partitioning: graph_pb2.Partitioning.ValueType | None = None
    keys: tuple[str, ...] = ()
    is_placed: bool = False
    lost_keys: tuple[str, ...] = ()
    load_first: bool | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the user asked for an exchange here."""
        return self.partitioning is not None and not self.is_placed

    @property
    def call(self) -> str:
        """The user's call, for errors; only where there was one."""
        assert self.partitioning is not None, "the planner chooses the others"
        name = graph_pb2.Partitioning.Name(self.partitioning)
        return f".{name.removeprefix('PARTITIONING_').lower()}()"


ANY_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class NodeInput:
    """Where a node reads: a node's main output, or its side output ``tag``.

    Attributes:
        is_rows: the user said that each update is a row of its own.
    """

    node: Node
    tag: str = ""
    routing: Routing = ANY_ROUTING
    is_rows: bool = False

    @property
    def in_front(self) -> NodeInput:
        """The same rows in front of the exchange that the user asked for, if any."""
        return replace(self, routing=ANY_ROUTING) if self.routing.is_asked else self


@dataclass(slots=True)
class Properties:
    """What the user set on an operator; None or "" = not set.

    Attributes:
        exchange: type of the exchange that its main output goes through.
        deterministic: whether equal input gives equal output.
        colocation_group: whose subtasks of equal index share a slot and are restarted together.
        engine: "penstock" where a part for Spark begins behind it.
    """

    uid: str = ""
    name: str = ""
    parallelism: int | None = None
    max_parallelism: int | None = None
    slot_group: str = ""
    exchange: graph_pb2.ResultPartitionType.ValueType | None = None
    deterministic: bool | None = None
    colocation_group: str = ""
    engine: str = ""
    on_error: graph_pb2.ErrorPolicy = field(default_factory=graph_pb2.ErrorPolicy)


@dataclass(eq=False, slots=True)
class Node:
    """One operation of a job.

    Attributes:
        index: number within the environment.
        label: what the operator is called unless the user names it.
        schema: the user's columns of the main output, event time not among them.
        has_event_time: the main output can carry event time.
        is_inserted: not the user's call but a preparation of the next one; it runs where its input does.
        hidden_columns: columns of the input that such a preparation added.
    """

    index: int
    operation: Operation
    inputs: tuple[NodeInput, ...]
    label: str
    schema: pa.Schema
    has_event_time: bool
    is_inserted: bool = False
    hidden_columns: frozenset[str] = frozenset()
    properties: Properties = field(default_factory=Properties)

    @property
    def name(self) -> str:
        """What a person reads in plans, logs and errors."""
        return self.properties.name or self.label

    @property
    def is_preparation(self) -> bool:
        """Whether it belongs to the next call, so that what was said of its input's output holds for its own."""
        # with_event_time is a call of its own that only runs where its input does.
        return (
            self.is_inserted
            and not isinstance(self.operation, AssignEventTime)
            and not self.inputs[0].routing.is_asked
        )

    @property
    def is_grouping(self) -> bool:
        """Whether it works on groups of rows, so that it knows no single bad record."""
        grouping = (WindowAggregate, ApplyWindowFunction, RunningAggregate, Join)
        return isinstance(self.operation, grouping)

    @property
    def late_tag(self) -> str:
        """The side output of late rows, "" where there is none."""
        if isinstance(self.operation, (WindowAggregate, ApplyWindowFunction)):
            return self.operation.window.late_tag
        return ""

    @property
    def error_tag(self) -> str:
        """The side output of bad records, "" where there is none."""
        return self.properties.on_error.tag

    def side_schema(self, tag: str) -> pa.Schema:
        """The user's columns of a side output.

        Raises:
            JobRejected: the operator has no side output of that name.
        """
        if tag and tag == self.error_tag:
            if isinstance(self.operation, ReadSource):
                return SOURCE_ERROR_SCHEMA
            return input_schema(self.inputs[0]).append(pa.field(ERROR_COLUMN, pa.string()))
        if tag and (tag == self.late_tag or self.emits_any_tag):
            return input_schema(self.inputs[0])
        raise JobRejected(self._unknown_tag(tag))

    @property
    def emits_any_tag(self) -> bool:
        """Whether the user's function may send rows to side outputs of any name (``out.side``)."""
        operation = self.operation
        return isinstance(operation, Process) or (
            isinstance(operation, ApplyWindowFunction)
            and operation.kind == graph_pb2.WINDOW_FUNCTION_KIND_PROCESS
        )

    def _unknown_tag(self, tag: str) -> str:
        tags = [known for known in (self.late_tag, self.error_tag) if known]
        if not tags and isinstance(self.operation, RunningAggregate):
            return (
                f"operator {self.name!r} has no side output {tag!r}: a running aggregate has none"
            )
        if isinstance(self.operation, Join):
            return f"operator {self.name!r} has no side output {tag!r}: a join has none"
        if is_spark(self.operation):
            return f"operator {self.name!r} has no side output {tag!r}: what runs on Spark has none"
        if not tags and self.is_grouping:
            return (
                f"operator {self.name!r} has no side output {tag!r}: it gets one by "
                f".window(..., late_to={tag!r}) for late rows"
            )
        if not tags:
            return (
                f"operator {self.name!r} has no side output {tag!r}: it gets one by "
                f".on_error({tag!r}) for bad records, or .window(..., late_to={tag!r}) for late rows"
            )
        return (
            f"operator {self.name!r} has no side output {tag!r}{nearest_hint(tag, tags)}; it has "
            + ", ".join(repr(known) for known in tags)
        )


def input_schema(source: NodeInput) -> pa.Schema:
    """The user's columns of an input."""
    return source.node.side_schema(source.tag) if source.tag else source.node.schema


def input_has_event_time(source: NodeInput) -> bool:
    """Whether an input can carry event time; bad records never do."""
    if not source.tag:
        return source.node.has_event_time
    return source.tag == source.node.late_tag and input_has_event_time(source.node.inputs[0])


def endless_input(source: NodeInput) -> str:
    """The name of a source that reads without end in front of an input, "" = there is none."""
    for node in reachable([source.node]):
        if isinstance(node.operation, ReadSource) and not node.operation.spec.bounded:
            return node.name
    return ""


def reachable(sinks: list[Node]) -> list[Node]:
    """The sinks and everything they read from, inputs first."""
    found: dict[int, Node] = {}
    waiting = list(sinks)
    while waiting:
        node = waiting.pop()
        if node.index not in found:
            found[node.index] = node
            waiting.extend(source.node for source in node.inputs)
    return [found[index] for index in sorted(found)]
