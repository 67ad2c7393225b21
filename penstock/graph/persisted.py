"""What outlives a job under a name: the names, and what a graph says of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import JobRejected
from penstock.graph.exchange_checks import endless_source
from penstock.graph.operator_checks import operator_where
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, user_schema

_PROBE = [("x", "ascending"), ("y", "ascending")]
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


def check_sort_columns(
    call: str, columns: Sequence[str], schema: pa.Schema, updates_of: str
) -> None:
    """Checks that rows can be put in order of columns.

    Raises:
        JobRejected: there is no such column, its values have no order, or the order of rows says something already.
    """
    if columns and updates_of:
        raise JobRejected(
            f"{call}: the rows are updates of {updates_of!r}, and which one is the last counts: they cannot be put in "
            "another order"
        )
    for position, column in enumerate(columns):
        if column not in schema.names:
            raise JobRejected(
                f"{call}: there is no column {column!r}{nearest_hint(column, schema.names)}; the columns there are: "
                f"{', '.join(map(repr, schema.names))}"
            )
        if column in columns[:position]:
            raise JobRejected(f"{call}: {column!r} is named twice")
        kind = schema.field(column).type
        if not _has_order(kind):
            raise JobRejected(
                f"{call}: {column!r} has type {kind}, whose values have no order: choose a column of numbers, times, "
                "texts or bytes"
            )


def _has_order(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return False
    try:
        pc.sort_indices(pa.table({"x": pa.nulls(2, kind), "y": [0, 0]}), _PROBE)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return True


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
            sink = operator.sink.persist
            name = check_name(where, sink.name)
            schema = user_schema(schema_from_bytes(operator.input_schema))
            check_sort_columns(where, sink.sort_by, schema, sink.updates_of)
            if name in seen:
                raise JobRejected(f"{where}: two streams of the job are persisted as {name!r}")
            seen.add(name)
            endless = endless_source(graph, vertex)
            if endless is not None:
                raise JobRejected(
                    f"{where}: what is persisted must be complete first, and it never is: source "
                    f"{endless!r} reads without end. Give the source an end, or use another sink"
                )
