"""From the job graph's entries to sources and sink writers that run."""

from __future__ import annotations

from penstock.connectors.source import Source
from penstock.errors import InvariantViolation, TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, user_schema
from taskmanager.connectors.artifact_source import ArtifactSource
from taskmanager.connectors.file_sink import FileSinkWriter
from taskmanager.connectors.file_source import FileSource
from taskmanager.connectors.generated_source import GeneratorSource, NexmarkSource
from taskmanager.connectors.print_writer import PrintWriter
from taskmanager.connectors.sink_writer import DiscardWriter, SinkWriter, UserSinkWriter
from taskmanager.connectors.socket_source import SocketSource
from taskmanager.user_code.calls import load_function


def build_source(spec: graph_pb2.SourceSpec, operator: graph_pb2.Operator) -> Source:
    """The source of an operator; its rows have the user's columns of the operator's output.

    Raises:
        TaskFailure: the user's source cannot be loaded or is none.
    """
    kind = spec.WhichOneof("kind")
    if kind == "files":
        return FileSource(spec.files)
    if kind == "socket":
        return SocketSource(spec.socket)
    if kind == "custom":
        source = load_function(spec.custom, operator.name)
        if not isinstance(source, Source):
            raise TaskFailure(
                f"the user's source is a {type(source).__name__}; derive it from penstock.Source",
                operator=operator.name,
            )
        return source
    schema = user_schema(schema_from_bytes(operator.output_schema))
    if kind == "arrow":
        return ArtifactSource(spec.arrow, schema)
    if kind == "generator":
        return GeneratorSource(spec.generator, schema, operator.name)
    if kind == "nexmark":
        return NexmarkSource(spec.nexmark, schema)
    raise InvariantViolation(f"operator {operator.uid}: a source of kind {kind!r}")


def build_sink_writer(spec: graph_pb2.SinkSpec, operator: graph_pb2.Operator) -> SinkWriter:
    """The writer of a sink operator; collect sinks have none, their rows are shipped to the client.

    Raises:
        TaskFailure: the user's sink cannot be loaded or is none.
    """
    kind = spec.WhichOneof("kind")
    if kind == "files":
        return FileSinkWriter(spec.files)
    if kind == "print":
        return PrintWriter()
    if kind == "discard":
        return DiscardWriter()
    if kind == "custom":
        return UserSinkWriter(load_function(spec.custom, operator.name), operator.name)
    raise InvariantViolation(f"operator {operator.uid}: a writer for a sink of kind {kind!r}")
