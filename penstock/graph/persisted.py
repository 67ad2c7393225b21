"""What outlives a job under a name: the names, and what a graph says of them."""

from __future__ import annotations

import re

from penstock.errors import JobRejected
from penstock.graph.exchange_checks import endless_source
from penstock.graph.operator_checks import operator_where
from penstock.pb import graph_pb2

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(call: str, name: object) -> str:
    """The name, when it can be one.

    Raises:
        JobRejected: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JobRejected(
            f"{call}: {name!r} is no usable name: letters, digits, '.', '_' and '-' only, starting with a "
            "letter or digit, 100 at most"
        )
    return name


def persist_sinks(graph: graph_pb2.JobGraph) -> list[graph_pb2.PersistSink]:
    """What a job leaves behind."""
    return [
        operator.sink.persist
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.sink.WhichOneof("kind") == "persist"
    ]


def persisted_sources(graph: graph_pb2.JobGraph) -> list[graph_pb2.PersistedSource]:
    """What a job reads of what others have left."""
    return [
        operator.source.persisted
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.source.WhichOneof("kind") == "persisted"
    ]


def check_persisted(graph: graph_pb2.JobGraph) -> None:
    """Checks that what a job leaves behind is complete some day, each under a name of its own.

    Raises:
        JobRejected: it is not, or what is read is not named in full.
    """
    seen: set[str] = set()
    for vertex in graph.vertices:
        for index, operator in enumerate(vertex.operators):
            where = operator_where(vertex, index)
            if operator.source.WhichOneof("kind") == "persisted":
                source = operator.source.persisted
                check_name(where, source.name)
                if not source.job_id or source.partition_count < 1 or not source.schema:
                    raise JobRejected(f"{where}: it does not say whose {source.name!r} it reads")
            if operator.sink.WhichOneof("kind") != "persist":
                continue
            name = check_name(where, operator.sink.persist.name)
            if name in seen:
                raise JobRejected(f"{where}: two streams of the job are persisted as {name!r}")
            seen.add(name)
            endless = endless_source(graph, vertex)
            if endless is not None:
                raise JobRejected(
                    f"{where}: what is persisted must be complete first, and it never is: source "
                    f"{endless!r} reads without end. Give the source an end, or use another sink"
                )
