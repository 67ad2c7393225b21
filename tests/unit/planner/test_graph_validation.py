"""Aim: a graph that cannot run is refused with an error that names the operator.

Method: a valid graph is damaged in one place at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.job_graph import validate
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes


def valid_graph() -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2)
    (
        env.from_rows([{"auction": 1, "price": 2, "ts": 3}])
        .with_event_time("ts")
        .filter(col("price") > 1)
        .key_by("auction")
        .window(ps.tumbling("10s"))
        .aggregate(n=ps.count(), total=ps.sum("price"))
        .collect()
    )
    return env.plan("valid").graph


def close_a_cycle(graph: graph_pb2.JobGraph) -> None:
    edge = graph.edges.add()
    edge.CopyFrom(graph.edges[0])
    edge.id, edge.source_vertex, edge.target_vertex = "back", "v2", "v1"
    edge.source_output.operator_index = 0


def rename_key(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].key_columns[0] = "bidder"


def forget_keys(graph: graph_pb2.JobGraph) -> None:
    del graph.edges[-1].key_columns[:]


def rebalance_instead_of_hash(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].partitioning = graph_pb2.PARTITIONING_REBALANCE
    del graph.edges[-1].key_columns[:]


def other_edge_schema(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].schema = schema_to_bytes(pa.schema([("auction", pa.string())]))


def no_schema_at_all(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].schema = b"garbage"


def too_parallel(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].parallelism = 129


def too_many_key_groups(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].max_parallelism = 40_000


def same_uid_twice(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[0].operators[0].uid = graph.vertices[2].operators[0].uid


def no_uid(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[0].operators[0].uid = ""


def no_sink(graph: graph_pb2.JobGraph) -> None:
    del graph.vertices[2].operators[1:]


def no_source(graph: graph_pb2.JobGraph) -> None:
    del graph.edges[0]


def source_with_input(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[1].operators[0].source.socket.host = "x"


def unknown_vertex(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].source_vertex = "v9"


def unknown_operator(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].source_output.operator_index = 7


def chain_reads_forward(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].operators[1].input.operator_index = 1


def unknown_side_output(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].source_output.side_tag = "late"


def missing_filter_column(graph: graph_pb2.JobGraph) -> None:
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.WhichOneof("spec") == "filter":
                operator.filter.predicate.CopyFrom((col("prise") > 1).to_proto())


def missing_aggregate_column(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].operators[0].window_aggregate.aggregates[1].column = "euro"


def no_specification(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].operators[0].ClearField("window_aggregate")


def no_artifact(graph: graph_pb2.JobGraph) -> None:
    for artifact in graph.artifacts:
        artifact.id = "0" * 64


def blocking_behind_an_endless_source(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].partition_type = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
    graph.vertices[0].operators[0].source.bounded = False


def unknown_exchange(graph: graph_pb2.JobGraph) -> None:
    graph.edges[0].partition_type = 9  # type: ignore[assignment]


def colocated_with_other_parallelism(graph: graph_pb2.JobGraph) -> None:
    for vertex in graph.vertices[:2]:
        vertex.colocation_group = "pair"


def colocated_in_other_slot_groups(graph: graph_pb2.JobGraph) -> None:
    for vertex in graph.vertices[1:3]:
        vertex.colocation_group = "pair"
        vertex.slot_group = vertex.id


def forward_between_unequal(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[0].parallelism = 3
    graph.edges[0].partitioning = graph_pb2.PARTITIONING_FORWARD


def reserved_name(graph: graph_pb2.JobGraph) -> None:
    schema = pa.schema([("__event_time", pa.string()), ("a", pa.int64())])
    graph.vertices[0].operators[0].output_schema = schema_to_bytes(schema)


def column_twice(graph: graph_pb2.JobGraph) -> None:
    schema = pa.schema([("a", pa.string()), ("a", pa.int64())])
    graph.vertices[0].operators[0].output_schema = schema_to_bytes(schema)


def empty(graph: graph_pb2.JobGraph) -> None:
    del graph.vertices[:]
    del graph.edges[:]


def nameless_side_output(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[0].operators[0].on_error.action = graph_pb2.ERROR_ACTION_SIDE_OUTPUT


def event_time_is_gone(graph: graph_pb2.JobGraph) -> None:
    schema = schema_to_bytes(pa.schema([("auction", pa.int64()), ("price", pa.int64())]))
    head = graph.vertices[2].operators[0]
    for operator in (graph.vertices[1].operators[-1], head):
        operator.input_schema = schema
    graph.vertices[1].operators[-1].output_schema = schema
    graph.vertices[1].operators[-2].output_schema = schema
    graph.edges[-1].schema = schema


def nothing_to_read(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[0].operators[0].source.ClearField("arrow")


def nothing_to_write(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[2].operators[1].sink.ClearField("collect")


def unkeyed_in_parallel(graph: graph_pb2.JobGraph) -> None:
    del graph.vertices[2].operators[0].window_aggregate.keys[:]


DAMAGE: list[tuple[Callable[[graph_pb2.JobGraph], None], str]] = [
    (close_a_cycle, r"cycle through .*'filter' \(vertex v1\).*'window_aggregate' \(vertex v2\)"),
    (rename_key, r"operator 'window_aggregate' \(vertex v2\): it works per key \(auction\)"),
    (forget_keys, r"'window_aggregate' \(vertex v2\): it works per key"),
    (rebalance_instead_of_hash, r"'window_aggregate' \(vertex v2\): .*use .key_by"),
    (other_edge_schema, r"operator 'filter' \(vertex v1\): it expects"),
    (no_schema_at_all, r"operator 'filter' \(vertex v1\): its schema cannot be read"),
    (too_parallel, r"'window_aggregate' \(vertex v2\): parallelism is 129"),
    (too_many_key_groups, r"'window_aggregate' \(vertex v2\): max_parallelism is 40000"),
    (
        same_uid_twice,
        r"operator 'window_aggregate' \(vertex v2\): its uid .* also that of .*from_rows",
    ),
    (no_uid, r"operator 'from_rows' \(vertex v0\): it has no uid"),
    (no_sink, "no sink"),
    (no_source, r"operator 'filter' \(vertex v1\): it has no input"),
    (source_with_input, r"\(vertex v1\): a source cannot have an input"),
    (unknown_vertex, "edge e0 names vertex 'v9'"),
    (unknown_operator, "edge e0 leaves operator 7 of vertex v0"),
    (chain_reads_forward, r"operator 'collect' \(vertex v2\): it does not read from an operator"),
    (unknown_side_output, r"has no side output 'late'"),
    (
        missing_filter_column,
        r"operator 'filter' \(vertex v1\): there is no column 'prise' \(did you",
    ),
    (missing_aggregate_column, r"'window_aggregate' \(vertex v2\): there is no column 'euro'"),
    (no_specification, r"'window_aggregate' \(vertex v2\): it has no specification"),
    (no_artifact, r"operator 'from_rows' \(vertex v0\): its table .* not among"),
    (
        blocking_behind_an_endless_source,
        r"\(vertex v1\): its output is read over a blocking .* source 'from_rows' reads without end\.",
    ),
    (unknown_exchange, r"\(vertex v0\): edge e0 has the unknown type 9"),
    (
        colocated_with_other_parallelism,
        r"\(vertex v1\): it is colocated with .* \(vertex v0\) as 'pair', but its parallelism is 2 and",
    ),
    (
        colocated_in_other_slot_groups,
        r"its slot group is v2 and the other's v1: give both the same with \.slot_group\(s\)",
    ),
    (
        forward_between_unequal,
        r"\(vertex v1\): edge e0 is forward, but its producer has parallelism 3",
    ),
    (
        reserved_name,
        r"operator 'from_rows' \(vertex v0\): the column name '__event_time' is reserved",
    ),
    (column_twice, r"operator 'from_rows' \(vertex v0\): column 'a' is there twice"),
    (empty, "no operators"),
    (nameless_side_output, r"operator 'from_rows' \(vertex v0\): a side output .* needs a name"),
    (event_time_is_gone, r"an event-time window needs event time"),
    (nothing_to_read, r"operator 'from_rows' \(vertex v0\): it does not say what to read"),
    (nothing_to_write, r"operator 'collect' \(vertex v2\): it does not say where the rows go"),
    (unkeyed_in_parallel, r"'window_aggregate' \(vertex v2\): without key_by .* not 2"),
]


def test_the_undamaged_graph_is_valid() -> None:
    validate(valid_graph())


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damaged_graph_is_refused(
    damage: Callable[[graph_pb2.JobGraph], None], message: str
) -> None:
    graph = valid_graph()
    damage(graph)
    with pytest.raises(JobRejected, match=message):
        validate(graph)


def test_validation_survives_the_wire_and_does_not_change_the_graph() -> None:
    graph = valid_graph()
    before = graph.SerializeToString(deterministic=True)
    validate(graph_pb2.JobGraph.FromString(before))
    validate(graph)
    assert graph.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", ["../../v0", "a/b", "..", ".hidden", "", "v0\0", "x" * 101])
def test_ids_that_lead_out_of_a_directory_are_refused(name: str) -> None:
    """A TaskManager names logs and kept partitions after them."""
    of_edge = valid_graph()
    of_edge.edges[0].id = name
    of_vertex = valid_graph()
    old = of_vertex.vertices[0].id
    of_vertex.vertices[0].id = name
    for edge in of_vertex.edges:
        if edge.source_vertex == old:
            edge.source_vertex = name
    for graph in (of_edge, of_vertex):
        with pytest.raises(JobRejected, match=r"cannot be the id of|not unique"):
            validate(graph)
