"""The job graph while it is being made: vertices with their chains, and the edges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.exchanges import PIPELINED, keeps_rows
from penstock.graph.operator_checks import shown_name, side_schema
from penstock.graph.repeatability import (
    Repeatability,
    VertexInput,
    after_operator,
    channels_read,
    into_vertex,
    on_edge,
    repeatability_of_edges,
)
from penstock.pb import graph_pb2
from penstock.planner.loading import settle_loading
from penstock.rows.schema import schema_to_bytes
from penstock.storage.key_groups import default_max_parallelism

FORWARD = graph_pb2.PARTITIONING_FORWARD
_NAME_MAX = 1_000
"""Characters of a chain's name that are shown whole."""


@dataclass(eq=False, slots=True)
class DraftVertex:
    """A chain of operators with one parallelism; None and "" = nobody has said."""

    parallelism: int
    slot_group: str
    max_parallelism: int | None
    colocation_group: str
    operators: list[DraftOperator] = field(default_factory=list)
    is_max_explicit: bool = False
    """The user has said max_parallelism of one of the operators."""


@dataclass(eq=False, slots=True)
class DraftOperator:
    """An operator in its chain.

    Attributes:
        proto: without ``input`` and schemas, which follow from the fields below.
        parent: the operator of the same chain that feeds it, and from which output; None at the head.
        given: what is known of its input when it is made again.
        second_input_schema: of operators with two inputs, which are always heads.
    """

    proto: graph_pb2.Operator
    vertex: DraftVertex
    input_schema: pa.Schema
    output_schema: pa.Schema
    parent: DraftOutput | None
    given: Repeatability
    second_input_schema: pa.Schema | None = None

    def schema_of(self, tag: str) -> pa.Schema:
        """The schema of the main output or of a side output, event time included."""
        return side_schema(self.proto, self.input_schema, tag) if tag else self.output_schema


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One output of an operator."""

    operator: DraftOperator
    tag: str

    @property
    def schema(self) -> pa.Schema:
        """What flows there."""
        return self.operator.schema_of(self.tag)

    @property
    def repeatability(self) -> Repeatability:
        """What is known of it when it is made again."""
        return after_operator(self.operator.proto, self.operator.given, self.tag)


@dataclass(frozen=True, slots=True)
class DraftEdge:
    """An exchange between two chains."""

    source: DraftOutput
    target: DraftVertex
    partitioning: graph_pb2.Partitioning.ValueType
    keys: tuple[str, ...]
    target_input: int
    partition_type: graph_pb2.ResultPartitionType.ValueType
    is_said: bool
    load_first: bool
    spill_format: graph_pb2.SpillFormat.ValueType


@dataclass(frozen=True, slots=True)
class DraftInput:
    """How an operator is to read an output.

    Attributes:
        target_input: which input of the operator it feeds: 0, or 1 for the second of two.
        is_said: the user has chosen the type.
        load_first: the operator reads it to its end before it reads the other input.
        spill_format: what its files have to be; unspecified = as the TaskManager likes.
    """

    source: DraftOutput
    partitioning: graph_pb2.Partitioning.ValueType
    keys: tuple[str, ...] = ()
    target_input: int = 0
    partition_type: graph_pb2.ResultPartitionType.ValueType = PIPELINED
    is_said: bool = False
    load_first: bool = False
    spill_format: graph_pb2.SpillFormat.ValueType = graph_pb2.SPILL_FORMAT_UNSPECIFIED

    def read_by(self, parallelism: int) -> VertexInput:
        """The input as that of a vertex."""
        producers = self.source.operator.vertex.parallelism
        return VertexInput(
            on_edge(self.source.repeatability, self.partitioning, producers, parallelism),
            keeps_rows(self.partition_type),
            channels_read(self.partitioning, producers, parallelism),
        )


class Draft:
    """Collects vertices and edges in topological order.

    Args:
        chaining: whether operators may share a vertex.
        default_max_parallelism: of vertices that set none; 0 = from their parallelism.
    """

    def __init__(self, *, chaining: bool, default_max_parallelism: int) -> None:
        self._chaining = chaining
        self._default_max = default_max_parallelism
        self._vertices: list[DraftVertex] = []
        self._edges: list[DraftEdge] = []

    def can_chain(
        self,
        inputs: Sequence[DraftInput],
        parallelism: int,
        slot_group: str,
        max_parallelism: int | None,
        colocation_group: str,
    ) -> bool:
        """Whether an operator with these properties may run in the chain that it reads from."""
        if not self._chaining or len(inputs) != 1 or inputs[0].partitioning != FORWARD:
            return False
        if keeps_rows(inputs[0].partition_type):
            return False
        vertex = inputs[0].source.operator.vertex
        return (
            vertex.parallelism == parallelism
            and vertex.slot_group == slot_group
            and (
                None in (vertex.max_parallelism, max_parallelism)
                or vertex.max_parallelism == max_parallelism
            )
            and (
                "" in (vertex.colocation_group, colocation_group)
                or vertex.colocation_group == colocation_group
            )
        )

    def append(
        self,
        proto: graph_pb2.Operator,
        source: DraftOutput,
        output_schema: pa.Schema,
        *,
        max_parallelism: int | None = None,
        colocation_group: str = "",
    ) -> DraftOperator:
        """Adds an operator to the chain that it reads from."""
        vertex = source.operator.vertex
        operator = DraftOperator(
            proto, vertex, source.schema, output_schema, source, source.repeatability
        )
        vertex.operators.append(operator)
        vertex.max_parallelism = vertex.max_parallelism or max_parallelism
        vertex.colocation_group = vertex.colocation_group or colocation_group
        return operator

    def start_vertex(
        self,
        proto: graph_pb2.Operator,
        inputs: Sequence[DraftInput],
        output_schema: pa.Schema,
        *,
        parallelism: int,
        slot_group: str,
        max_parallelism: int | None,
        colocation_group: str,
    ) -> DraftOperator:
        """Adds an operator as the head of a new chain, with an edge from each of its inputs."""
        vertex = DraftVertex(parallelism, slot_group, max_parallelism, colocation_group)
        schema = schema_of_input(inputs, 0) or pa.schema([])
        second = schema_of_input(inputs, 1)
        rows = into_vertex(proto.name, [given.read_by(parallelism) for given in inputs])
        operator = DraftOperator(proto, vertex, schema, output_schema, None, rows, second)
        vertex.operators.append(operator)
        self._vertices.append(vertex)
        for given in inputs:
            if given.partitioning == FORWARD and not _same_parallelism(given, vertex):
                raise JobRejected(
                    f"operator {proto.name!r}: .forward() needs the same parallelism on both sides, "
                    f"and {given.source.operator.proto.name!r} has "
                    f"{given.source.operator.vertex.parallelism}, this one {parallelism}"
                )
            self._edges.append(
                DraftEdge(
                    given.source,
                    vertex,
                    given.partitioning,
                    given.keys,
                    given.target_input,
                    given.partition_type,
                    given.is_said,
                    given.load_first,
                    given.spill_format,
                )
            )
        return operator

    def with_equal_key_groups(
        self, vertices: Sequence[DraftVertex], max_parallelism: int | None
    ) -> int:
        """Settles the key-groups of vertices whose rows stay where they lie by key in the next vertex.

        Args:
            vertices: of equal parallelism; those that have a max-parallelism have this one.
            max_parallelism: None = the default.

        Returns:
            The max-parallelism of them all.
        """
        settled = max_parallelism or self._max_parallelism(vertices[0])
        for vertex in vertices:
            vertex.max_parallelism = settled
        return settled

    def _max_parallelism(self, vertex: DraftVertex) -> int:
        return (
            vertex.max_parallelism
            or self._default_max
            or default_max_parallelism(vertex.parallelism)
        )

    def to_proto(self, *, is_batch: bool = False) -> graph_pb2.JobGraph:
        """Vertices and edges as they travel.

        Raises:
            JobRejected: what is to be loaded first cannot be.
        """
        graph = graph_pb2.JobGraph()
        ids = {id(vertex): f"v{i}" for i, vertex in enumerate(self._vertices)}
        for vertex in self._vertices:
            graph.vertices.append(
                _vertex_proto(
                    vertex,
                    ids[id(vertex)],
                    self._max_parallelism(vertex),
                    is_max_explicit=vertex.is_max_explicit or bool(self._default_max),
                )
            )
        for i, edge in enumerate(self._edges):
            operator = edge.source.operator
            graph.edges.append(
                graph_pb2.Edge(
                    id=f"e{i}",
                    source_vertex=ids[id(operator.vertex)],
                    source_output=_chain_input(edge.source),
                    target_vertex=ids[id(edge.target)],
                    partitioning=edge.partitioning,
                    key_columns=edge.keys,
                    partition_type=edge.partition_type,
                    schema=schema_to_bytes(edge.source.schema),
                    target_input=edge.target_input,
                    load_first=edge.load_first,
                    spill_format=edge.spill_format,
                )
            )
        said = {f"e{i}" for i, edge in enumerate(self._edges) if edge.is_said}
        settle_loading(graph, said, is_batch=is_batch)
        known = repeatability_of_edges(graph)
        for proto in graph.edges:
            proto.deterministic = known[proto.id].is_deterministic
            proto.reproducible = known[proto.id].is_reproducible
        return graph


def schema_of_input(inputs: Sequence[DraftInput], target_input: int) -> pa.Schema | None:
    """What comes in by one of an operator's inputs, None where there is no such input."""
    return next((i.source.schema for i in inputs if i.target_input == target_input), None)


def chain_name(vertex: graph_pb2.Vertex) -> str:
    """The chain as a person reads it: "read -> filter -> (print, project -> write)".

    Of a long one its ends.
    """
    children: dict[int, list[int]] = {i: [] for i in range(len(vertex.operators))}
    for i, operator in enumerate(vertex.operators[1:], start=1):
        children[operator.input.operator_index].append(i)

    names: dict[int, str] = {}
    for i in reversed(range(len(vertex.operators))):  # what an operator feeds stands behind it
        below = [names.pop(child) for child in children[i]]
        behind = [f"({', '.join(below)})"] if len(below) > 1 else below
        names[i] = " -> ".join([shown_name(vertex.operators[i]), *behind])
    text = names[0]
    if len(text) <= _NAME_MAX:
        return text
    half = _NAME_MAX // 2
    return f"{text[:half]} ... {len(vertex.operators)} operators ... {text[-half:]}"


def _vertex_proto(
    vertex: DraftVertex, vertex_id: str, max_parallelism: int, *, is_max_explicit: bool
) -> graph_pb2.Vertex:
    proto = graph_pb2.Vertex(
        id=vertex_id,
        parallelism=vertex.parallelism,
        max_parallelism=max_parallelism,
        max_parallelism_is_explicit=is_max_explicit,
        slot_group=vertex.slot_group,
        colocation_group=vertex.colocation_group,
    )
    for operator in vertex.operators:
        operator.proto.input_schema = schema_to_bytes(operator.input_schema)
        operator.proto.output_schema = schema_to_bytes(operator.output_schema)
        if operator.second_input_schema is not None:
            operator.proto.second_input_schema = schema_to_bytes(operator.second_input_schema)
        if operator.parent is not None:
            operator.proto.input.CopyFrom(_chain_input(operator.parent))
        proto.operators.append(operator.proto)
    proto.name = chain_name(proto)
    return proto


def _chain_input(output: DraftOutput) -> graph_pb2.ChainInput:
    index = output.operator.vertex.operators.index(output.operator)
    return graph_pb2.ChainInput(operator_index=index, side_tag=output.tag)


def _same_parallelism(given: DraftInput, vertex: DraftVertex) -> bool:
    return given.source.operator.vertex.parallelism == vertex.parallelism
