"""What Spark reads and writes itself beside a stage: sources and sinks of Parquet files, in place (pure).

A source of files that a stage reads without anything in between is no vertex for it: the stage has the list of files. A
sink of files that alone reads a stage's output is next in its chain, and is given the files that Spark has written. All
else goes through exchanges: other formats, S3, files that are watched, columns that Spark writes in another type,
partitions, and whatever the user has said of an operator that only one of its own can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from penstock.graph.logical import Node, Properties, ReadSource, SparkStage, WriteSink, is_spark
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from penstock.rows.spark_types import carried_schema
from penstock.storage.open_store import is_s3

_PARQUET = "parquet"


class FilesInPlace:
    """The sources and sinks of a job that are in place.

    Args:
        nodes: the job's, inputs first.
        has_chains: operators may share a vertex.
    """

    def __init__(self, nodes: Sequence[Node], *, has_chains: bool) -> None:
        readers: dict[int, list[tuple[Node, int]]] = {}
        for node in nodes:
            for position, given in enumerate(node.inputs):
                readers.setdefault(given.node.index, []).append((node, position))
        self._reads = {
            (node.index, position)
            for node in nodes
            if isinstance(node.operation, SparkStage)
            for position, given in enumerate(node.inputs)
            if not given.tag and is_read_in_place(given.node)
        }
        self._left_out = {
            index
            for index, those in readers.items()
            if all((node.index, position) in self._reads for node, position in those)
        }
        self._writes = {
            node.index
            for node in nodes
            if has_chains
            and isinstance(node.operation, WriteSink)
            and len(readers[node.inputs[0].node.index]) == 1
            and _is_written_in_place(node)
        }

    def reads(self, node: Node, position: int) -> bool:
        """Whether a stage reads one of its inputs in place."""
        return (node.index, position) in self._reads

    def is_left_out(self, node: Node) -> bool:
        """Whether all that read a node are stages which read it in place."""
        return node.index in self._left_out

    def writes(self, node: Node) -> bool:
        """Whether a sink is given files."""
        return node.index in self._writes

    def give_inputs(
        self, node: Node, spec: graph_pb2.SparkSpec, of_edges: Mapping[int, pa.Schema]
    ) -> None:
        """Says of a stage what its inputs are, and which files it reads.

        Args:
            of_edges: the columns of the inputs that edges feed, by their numbers.
        """
        schemas = dict(of_edges)
        for position, given in enumerate(node.inputs):
            if not self.reads(node, position):
                continue
            assert isinstance(given.node.operation, ReadSource), "only such a one is in place"
            files = spec.files.add(input=position, source=given.node.operation.spec.files)
            files.source.columns[:] = given.node.schema.names
            schemas[position] = given.node.schema
        spec.input_schemas.extend(schema_to_bytes(schemas[number]) for number in sorted(schemas))

    def give_output(self, node: Node, sink: graph_pb2.Operator, stage: graph_pb2.Operator) -> None:
        """Says of the stage in front of a sink where Spark writes, if it does.

        Args:
            node: in whose chain the stage is.
            sink: its operator.
            stage: the operator of the stage.
        """
        if not self.writes(node):
            return
        assert isinstance(node.operation, WriteSink), "it writes"
        spec = stage.source.spark if stage.HasField("source") else stage.spark
        spec.output_directory = node.operation.spec.files.directory
        spec.output_uid = sink.uid


def is_read_in_place(node: Node) -> bool:
    """Whether a stage that reads a node's output alone, as it is, is given the files of it."""
    if not isinstance(node.operation, ReadSource):
        return False
    spec = node.operation.spec
    return (
        spec.WhichOneof("kind") == "files"
        and spec.files.format == _PARQUET
        and not spec.files.watch_interval_ms
        and not is_s3(spec.files.path)
        and _is_plain(node)
    )


def _is_written_in_place(node: Node) -> bool:
    [given] = node.inputs
    assert isinstance(node.operation, WriteSink), "it writes"
    spec, stage = node.operation.spec, given.node
    return (
        is_spark(stage.operation)
        and not given.routing.is_asked
        and spec.WhichOneof("kind") == "files"
        and spec.files.format == _PARQUET
        and not spec.files.partition_by
        and not is_s3(spec.files.directory)
        and stage.schema.equals(carried_schema(stage.schema))
        and all(field.nullable for field in stage.schema)
        and node.properties.parallelism in (None, 1)
        and _is_plain(node)
        and stage.properties.exchange is None
        and not stage.properties.slot_group
        and not stage.properties.colocation_group
        and stage.properties.max_parallelism is None
    )


def _is_plain(node: Node) -> bool:
    return replace(node.properties, uid="", name="", parallelism=None) == Properties()
